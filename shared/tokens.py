"""A name for a tokenizer's behaviour, so that two processes can tell whether theirs agree."""

from __future__ import annotations

import json
from typing import Any

import xxhash


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """128-bit hex fingerprint of vocabulary, special tokens and chat template.

    Args:
        tokenizer: any Hugging Face tokenizer.

    Two tokenizers with one fingerprint give every id the same meaning and render chats alike.
    The merge rules are not part of it: ids are never re-encoded, so they cannot matter.
    """
    content = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        "special": sorted(tokenizer.all_special_ids),
        "eos": tokenizer.eos_token_id,
        "chat_template": tokenizer.chat_template,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

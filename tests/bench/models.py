"""Models of known sizes, without weights, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

DIMS: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""Shapes of Qwen3 models; their weights are random, and what they say is noise."""


def make_model(folder: Path, dims: dict[str, int], context: int) -> Path:
    """A folder with a config and a tokenizer, without weights."""
    shape: dict[str, Any] = dict(dims)
    shape.setdefault("tie_word_embeddings", True)
    config = Qwen3Config(**shape, max_position_embeddings=context)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    words = {f"t{index}": index for index in range(dims["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="t1", unk_token="t0").save_pretrained(folder)
    return folder


def random_prompts(count: int, length: int) -> list[list[int]]:
    """Token ids."""
    ids: list[list[int]] = np.random.default_rng(0).integers(3, 250, (count, length)).tolist()
    return ids

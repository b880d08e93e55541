"""Models of known sizes, without weights or with random ones, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.tiny_policy import build_tokenizer

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


def save_random(folder: Path, dims: dict[str, int], dtype: torch.dtype, device: str) -> int:
    """Save a model with random weights and the tiny policy's tokenizer.

    Args:
        device: that the weights are made on.

    Returns:
        The number of its parameters.
    """
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(dims)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
        model = model.to(dtype)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    count: int = model.num_parameters()
    return count


def random_prompts(count: int, length: int) -> list[list[int]]:
    """Token ids."""
    ids: list[list[int]] = np.random.default_rng(0).integers(3, 250, (count, length)).tolist()
    return ids

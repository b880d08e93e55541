"""The model of ``bench_publish.py``, and a trainer's steps with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.bench.checkpoints import Tensors, write
from tests.bench.models import DIMS
from tests.bench.servers import CONTEXT
from trainer.tiny_policy import build_tokenizer

LEARNING_RATE = 1e-6
_VOCABULARY = 32768


def trained(megabytes: int, steps: int) -> tuple[Qwen3Config, list[Tensors]]:
    """The weights at the start and after each of some steps on random tokens."""
    torch.manual_seed(0)
    config = _config_of(megabytes)
    model: Any = Qwen3ForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    weights = [_rounded(model)]
    for _ in range(steps):
        ids = torch.randint(_VOCABULARY, (2, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(_rounded(model))
    return config, weights


def _config_of(megabytes: int) -> Qwen3Config:
    """As many layers of Qwen3-0.6B's shape as make up the size in bfloat16."""
    shape: dict[str, Any] = DIMS["0.6b"] | {"vocab_size": _VOCABULARY}
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = hidden * shape["head_dim"] * heads + 3 * hidden * inner
    left = megabytes * 10**6 // 2 - _VOCABULARY * hidden
    shape |= {"num_hidden_layers": max(1, -(-left // layer))}
    return Qwen3Config(**shape, max_position_embeddings=CONTEXT, tie_word_embeddings=True)


def _rounded(model: Qwen3ForCausalLM) -> Tensors:
    """What a trainer publishes: its float32 weights in bfloat16, the tied head left out."""
    return {name: p.detach().bfloat16() for name, p in model.named_parameters()}


def save(folder: Path, config: Qwen3Config, weights: Tensors) -> Path:
    """A Hugging Face directory."""
    folder.mkdir(parents=True)
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    write(weights, folder)
    return folder

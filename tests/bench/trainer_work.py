"""What every contender of ``bench_trainer.py`` gets: a model's shape, samples, rewards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch

from shared.protocol import Sample
from tests.bench.models import DIMS

GROUP = 4
"""Samples of each prompt."""
REAL = ("0.6b", "4b")
"""Whose sizes ``--dims`` stands for."""
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
_HEAD_DIM = 64
_SHORTEST, _LONGEST = 50, 1000
_REAL_LENGTHS = 890, 1090


def shape_of(arguments: argparse.Namespace) -> dict[str, int]:
    """As Qwen3's configuration names it."""
    if arguments.dims:
        return DIMS[arguments.dims]
    heads = arguments.hidden // _HEAD_DIM
    return {
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": _HEAD_DIM,
    }


def samples_of(arguments: argparse.Namespace) -> list[Sample]:
    """Random ones, the same for each contender.

    With ``--dims`` answers have about 1,000 tokens; else their lengths are skewed as real ones are,
    most short, one at the limit.
    """
    draw = np.random.default_rng(0)
    count, vocabulary = arguments.samples, shape_of(arguments)["vocab_size"]
    lengths = np.clip(draw.lognormal(5.5, 0.7, count), _SHORTEST, _LONGEST).astype(int)
    lengths[0] = _LONGEST
    if arguments.dims:
        lengths = draw.integers(*_REAL_LENGTHS, count)
    prompts = [draw.integers(10, vocabulary, draw.integers(20, 120)) for _ in range(count // GROUP)]
    return [
        Sample(
            group_id=index // GROUP,
            prompt_ids=prompts[index // GROUP].astype(np.int32),
            completion_ids=draw.integers(10, vocabulary, length).astype(np.int32),
            logprobs=np.zeros(length, np.float32),
            finish_reason="stop",
            version=1,
            digest="0" * 32,
            spans=(),
        )
        for index, length in enumerate(lengths)
    ]


def rewards_of(samples: Sequence[Sample]) -> list[float]:
    """One answer of each group is right."""
    return [float(index % GROUP == 0) for index in range(len(samples))]


def advantages_of(samples: Sequence[Sample]) -> torch.Tensor:
    """As GRPO has them, ``(samples,)``."""
    scores = torch.tensor(rewards_of(samples)).reshape(-1, GROUP)
    spread = scores.std(1, keepdim=True) + 1e-4
    return ((scores - scores.mean(1, keepdim=True)) / spread).flatten()

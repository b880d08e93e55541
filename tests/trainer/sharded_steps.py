"""A few optimizer steps on fixed samples, alone or under torchrun, and what came of them.

    python tests/trainer/sharded_steps.py CONFIG.toml OUT.pt [--steps 3] [--samples 8]
    torchrun --nproc-per-node 2 tests/trainer/sharded_steps.py ...

Rank 0 writes the figures of each step and the weights after the last.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.protocol import Sample
from trainer.config import Config
from trainer.config_file import load_config
from trainer.follower import follow
from trainer.learner import Learner, build_learner
from trainer.publish import checkpoint_tensors
from trainer.ranks import BEGIN, Ranks, ranks_of
from trainer.update import TrainingSet, learn


def samples_of(count: int, *, vocabulary: int, shortest: int, longest: int) -> list[Sample]:
    """Answers of uneven lengths, from nobody in particular."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(shortest, longest + 1, count)
    return [
        Sample(
            group_id=index,
            prompt_ids=draw.integers(0, vocabulary, 1 + index % 5).astype(np.int32),
            completion_ids=draw.integers(0, vocabulary, length).astype(np.int32),
            logprobs=draw.normal(-np.log(vocabulary), 0.1, length).astype(np.float32),
            finish_reason="stop",
            version=1,
            digest="0" * 32,
            spans=(),
        )
        for index, length in enumerate(lengths)
    ]


def steps(learner: Learner, config: Config, args: argparse.Namespace) -> list[dict[str, Any]]:
    vocabulary = learner.model.config.get_text_config().vocab_size
    samples = samples_of(
        args.samples, vocabulary=vocabulary, shortest=args.shortest, longest=args.longest
    )
    advantages = torch.linspace(-1.0, 1.5, len(samples))
    tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    found = []
    for _ in range(args.steps):
        started = time.perf_counter()
        update = learn(learner, TrainingSet(samples, advantages), config)
        if learner.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        found.append(asdict(update) | {"tokens_per_second": tokens / seconds})
    return found


def lead(config: Config, args: argparse.Namespace, ranks: Ranks) -> None:
    ranks.tell_all(BEGIN, checkpoint=None)
    learner = build_learner(config, None, ranks)
    figures = steps(learner, config, args)
    weights = {} if args.without_weights else {
        tensor.spec.name: torch.frombuffer(bytearray(tensor.load()), dtype=torch.float32)
        for tensor in checkpoint_tensors(learner.model, torch.float32)
    }  # fmt: skip
    torch.save({"figures": figures, "weights": weights}, args.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--shortest", type=int, default=1)
    parser.add_argument("--longest", type=int, default=40)
    parser.add_argument("--without-weights", action="store_true")
    args = parser.parse_args()
    config = load_config(args.config, [])
    with ranks_of(config.model.device) as ranks:
        if ranks.rank:
            follow(config, ranks)
        else:
            lead(config, args, ranks)
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"rank {ranks.rank} peak GiB {peak:.3f}", flush=True)


if __name__ == "__main__":
    main()

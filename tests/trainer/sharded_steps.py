"""A few optimizer steps on fixed samples, alone or under torchrun, and what came of them.

    python tests/trainer/sharded_steps.py OUT.pt CONFIG.toml [CONFIG.toml ...] [--samples 8]
    torchrun --nproc-per-node 2 tests/trainer/sharded_steps.py ...

For each configuration in turn, rank 0 puts the figures of all steps and the weights after the last
into the file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.protocol import Sample
from trainer.config import Config
from trainer.config_file import load_config
from trainer.follower import follow
from trainer.learner import build_learner
from trainer.publish import checkpoint_tensors
from trainer.ranks import ALONE, BEGIN, END, Ranks, ranks_of
from trainer.update import TrainingSet, learn


@dataclass(frozen=True)
class Work:
    """Steps on samples of so many completion tokens."""

    steps: int = 3
    samples: int = 8
    shortest: int = 1
    longest: int = 40
    weights: bool = True


@dataclass(frozen=True)
class Done:
    """What came of them.

    Attributes:
        figures: of each step, as the loop logs them.
        weights: float32, by name as they are published; none if they were not wanted.
        tokens_per_second: of each step.
    """

    figures: list[dict[str, Any]]
    weights: dict[str, Tensor]
    tokens_per_second: list[float]


def samples_of(work: Work, vocabulary: int) -> list[Sample]:
    """Answers of uneven lengths, from nobody in particular."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(work.shortest, work.longest + 1, work.samples)
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


def take_steps(config: Config, work: Work, ranks: Ranks = ALONE) -> Done:
    """On rank 0, or alone."""
    ranks.tell_all(BEGIN, checkpoint=None)
    learner = build_learner(config, None, ranks)
    samples = samples_of(work, learner.model.config.get_text_config().vocab_size)
    chosen = TrainingSet(samples, torch.linspace(-1.0, 1.5, len(samples)))
    tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    figures, speeds = [], []
    for _ in range(work.steps):
        started = time.perf_counter()
        figures.append(asdict(learn(learner, chosen, config)))  # its figures wait for the device
        speeds.append(tokens / (time.perf_counter() - started))
    tensors = checkpoint_tensors(learner.model, torch.float32) if work.weights else []
    weights = {
        tensor.spec.name: torch.frombuffer(bytearray(tensor.load()), dtype=torch.float32)
        for tensor in tensors
    }
    return Done(figures, weights, speeds)


def main(configs: Sequence[Config], out: Path, work: Work) -> None:
    """All configurations, which train on the same device, in one group of processes."""
    with ranks_of(configs[0].model.device) as ranks:
        done = []
        for number, config in enumerate(configs, start=1):
            if ranks.rank:
                follow(config, ranks)
                continue
            done.append(asdict(take_steps(config, work, ranks)))
            if number < len(configs):
                ranks.tell_all(END)
        if ranks.rank == 0:
            torch.save(done, out)
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"rank {ranks.rank}: at most {peak:.2f} GiB allocated", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--without-weights", dest="weights", action="store_false")
    for name in ("steps", "samples", "shortest", "longest"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Work, name))
    args = vars(parser.parse_args())
    main([load_config(path, []) for path in args.pop("configs")], args.pop("out"), Work(**args))

"""A few optimizer steps on fixed samples, alone or under torchrun, and what came of them.

    python tests/trainer/sharded_steps.py OUT.pt CONFIG.toml [CONFIG.toml ...] [--samples 8 ...]
    torchrun --nproc-per-node 2 tests/trainer/sharded_steps.py ...

For each configuration and number of samples in turn, rank 0 puts the figures of all steps and the
weights after the last into the file.
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
from trainer.ranks import ALONE, BEGIN, END, Ranks
from trainer.torchrun import ranks_of
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
        weights: by name as the optimizer has them; none if they were not wanted.
        tokens_per_second: of each step.
        loading_s: in which all tensors were made ready to be sent, one after the other.
    """

    figures: list[dict[str, Any]]
    weights: dict[str, Tensor]
    tokens_per_second: list[float]
    loading_s: float


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
    dtype = learner.optimizer.param_groups[0]["params"][0].dtype
    weights, started = {}, time.perf_counter()
    for tensor in checkpoint_tensors(learner.model, dtype):
        sent = tensor.load()
        if work.weights:
            weights[tensor.spec.name] = torch.frombuffer(bytearray(sent), dtype=dtype)
    return Done(figures, weights, speeds, time.perf_counter() - started)


def main(jobs: Sequence[tuple[Config, Work]], out: Path) -> None:
    """All jobs, which use the same device, in one group of processes."""
    with ranks_of(jobs[0][0].model.device) as ranks:
        done = []
        for number, (config, work) in enumerate(jobs, start=1):
            if ranks.rank:
                follow(config, ranks)
                continue
            done.append(asdict(take_steps(config, work, ranks)))
            if number < len(jobs):
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
    parser.add_argument("--samples", type=int, nargs="+", default=[Work.samples])
    for name in ("steps", "shortest", "longest"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Work, name))
    args = vars(parser.parse_args())
    out, configs = args.pop("out"), [load_config(path, []) for path in args.pop("configs")]
    counts = args.pop("samples")
    main([(c, Work(samples=count, **args)) for c in configs for count in counts], out)

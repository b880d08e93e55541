"""Steps in float16 on two ranks, some of which overflow on one of them alone.

    torchrun --nproc-per-node 2 -m tests.trainer.scaled_steps CONFIG.toml OUT_DIRECTORY

Each rank writes what it has seen of each step to ``OUT_DIRECTORY/RANK.pt``: the update as
``asdict``, and the weights after it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.trainer.sharded_steps import Work, samples_of
from trainer.config import Config
from trainer.config_file import load_config
from trainer.learner import Learner, build_learner
from trainer.ranks import END, Ranks
from trainer.sharding import put_together
from trainer.shares import Share
from trainer.tally import Update
from trainer.torchrun import ranks_of
from trainer.update import TrainingSet, learn, learn_share

FACTORS = (1.0, 1e6, 1.0, 1.0)
"""Of the advantage of one sample, which one rank has."""
POISONED = 2
"""The step in which one element of rank 1's part of the gradient is infinite."""


def advantages(factor: float) -> Tensor:
    found = torch.linspace(-1.0, 1.5, Work.samples)
    found[0] *= factor
    return found


def take(learner: Learner, config: Config, factor: float) -> Update:
    """One step; on rank 0, or alone."""
    samples = samples_of(Work(), learner.model.config.vocab_size)
    return learn(learner, TrainingSet(samples, advantages(factor)), config)


def poison(learner: Learner) -> None:
    """Let the next gradient of rank 1 be infinite in one place, when it is about to be unscaled."""
    unscale = learner.scaler.unscale_

    def poisoned(optimizer: torch.optim.Optimizer) -> None:
        sharded: Any = optimizer.param_groups[0]["params"][-1].grad
        sharded.to_local().view(-1)[0] = torch.inf
        vars(learner.scaler).pop("unscale_")
        unscale(optimizer)

    vars(learner.scaler)["unscale_"] = poisoned


def main(config: Config, out: Path) -> None:
    with ranks_of("cpu") as ranks:
        learner = build_learner(config, None, ranks)
        seen = []
        for number, factor in enumerate(FACTORS):
            if ranks.rank == 1 and number == POISONED:
                poison(learner)
            update = take(learner, config, factor) if ranks.rank == 0 else obey(learner, config)
            weights = [put_together(p) for p in learner.model.parameters()]
            seen.append((asdict(update), weights))
        torch.save(seen, out / f"{ranks.rank}.pt")
        if ranks.rank:
            assert ranks.hear().name == END


def obey(learner: Learner, config: Config) -> Update:
    ranks: Ranks = learner.ranks
    return learn_share(learner, Share.from_order(ranks.hear()), config)


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), []), Path(sys.argv[2]))

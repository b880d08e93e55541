"""How the learning rate goes over the updates of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from trainer.config import OptimizerConfig


def build_scheduler(
    optimizer: torch.optim.Optimizer, options: OptimizerConfig, updates: int
) -> LambdaLR:
    """Linear warm-up to the full rate in update number ``warmup_updates``, then as configured.

    Args:
        optimizer: whose rate it sets.
        options: name the schedule.
        updates: of the whole run. More are made at the rate of the last.
    """
    fall = _FALLS[options.schedule]
    return LambdaLR(optimizer, lambda update: _share(update, options.warmup_updates, updates, fall))


def continue_schedule(scheduler: LambdaLR) -> None:
    """After both were restored: the next update has the rate of this schedule.

    The optimizer's state holds that of the schedule under which it was written, of a run that may
    have been shorter.
    """
    parts = zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    )
    for group, rate, share in parts:
        group["lr"] = rate * share(scheduler.last_epoch)


def _share(update: int, warmup: int, updates: int, fall: Callable[[float], float]) -> float:
    """Of the full rate, in an update; they count from 0."""
    if update < warmup:
        return (update + 1) / warmup
    left = max(updates - update, 1) / max(updates - warmup, 1)
    return fall(min(left, 1.0))


_FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
}
"""The share of the full rate from the share of the updates that is left, this one included."""

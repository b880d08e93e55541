"""The learning rate over the updates of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.config import OptimizerConfig
from trainer.learner import build_optimizer
from trainer.schedule import build_scheduler, continue_schedule


def rates(updates: int, made: int, **options: Any) -> list[float]:
    config = OptimizerConfig(lr=2.0, **options)
    optimizer = build_optimizer(torch.nn.Linear(1, 1), config)
    scheduler = build_scheduler(optimizer, config, updates)
    used: list[float] = []
    for _ in range(made):
        used.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return used


def test_warm_up_rises_linearly_and_stays() -> None:
    assert rates(6, 6, warmup_updates=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(2, 3) == [2.0, 2.0, 2.0]


def test_a_line_falls_to_the_last_update() -> None:
    found = rates(6, 6, warmup_updates=2, schedule="linear")
    assert found == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5])


def test_half_a_cosine_is_flat_at_both_ends_and_halved_in_the_middle() -> None:
    found = rates(100, 100, schedule="cosine")
    assert found[0] == pytest.approx(2.0)
    assert found[50] == pytest.approx(1.0)
    assert found[0] - found[1] < found[49] - found[50] > found[98] - found[99]
    assert 0 < found[99] < 0.001


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_more_updates_are_made_at_the_rate_of_the_last(schedule: str) -> None:
    found = rates(3, 6, schedule=schedule)
    assert found[3:] == [found[2]] * 3 != [0.0] * 3


def test_a_run_that_became_longer_continues_on_its_new_line() -> None:
    config = OptimizerConfig(lr=2.0, schedule="linear")
    old = build_optimizer(torch.nn.Linear(1, 1), config)
    shorter = build_scheduler(old, config, 4)
    for _ in range(3):
        old.step()
        shorter.step()
    new = build_optimizer(torch.nn.Linear(1, 1), config)
    longer = build_scheduler(new, config, 8)
    new.load_state_dict(old.state_dict())
    longer.load_state_dict(shorter.state_dict())
    assert new.param_groups[0]["lr"] == pytest.approx(0.5)
    continue_schedule(longer)
    assert new.param_groups[0]["lr"] == pytest.approx(2.0 * 5 / 8)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_warm_up_may_take_the_whole_run(schedule: str) -> None:
    assert rates(2, 4, warmup_updates=4, schedule=schedule) == [0.5, 1.0, 1.5, 2.0]

"""Rewards and objectives as a configuration names them, through the loop, and what is logged."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.trainer.fake_servers import FakeServer, fake_servers
from trainer import train as loop
from trainer.config import Config
from trainer.curve import read_records

REWARDS = """
import asyncio

def even(*, sample, **_):
    return float(sample.completion_ids[0] % 2)

async def slow(*, text, **_):
    await asyncio.sleep(0.01)
    return len(text)

def same(**_):
    return 1.0
"""


@pytest.fixture(scope="module")
def server(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as (server,):
        yield server


@pytest.fixture
def train(
    make_config: Callable[..., Config], untrained_model: Path, server: FakeServer, tmp_path: Path
) -> Callable[..., Path]:
    """Train two steps with some sections changed; gives the run's directory."""
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")

    def run(**sections: Any) -> Path:
        known: dict[str, dict[str, Any]] = {
            "model": {"path": str(untrained_model), "device": "cpu"},
            "server": {"url": server.url, "ready_timeout": 60},
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 6, "seeded": True},
            "reward": {"function": f"{tmp_path / 'rewards.py'}:even"},
            "train": {"output": str(tmp_path / "run"), "steps": 2},
            "evaluation": {"prompts": 0},
        }
        config = make_config(
            **{k: known.get(k, {}) | sections.get(k, {}) for k in known | sections}
        )
        loop.train(config, console=Console(file=io.StringIO()))
        return tmp_path / "run"

    return run


def test_several_rewards_are_logged_by_name(train: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    functions = [
        {"function": f"{file}:even"},
        {"name": "length", "function": f"{file}:slow", "weight": 0.01},
    ]
    run = train(reward={"function": None, "functions": functions}, objective={"normalise": "each"})
    for line in read_records(run / "metrics.jsonl"):
        total = line["rewards/even"] + 0.01 * line["rewards/length"]
        assert line["reward_mean"] == pytest.approx(total)
        assert line["updates"] == 1
    objective = (run / "objective.txt").read_text()
    assert "A    = (1 A_even + 0.01 A_length) / (batch std of that + 0.0001)" in objective


def test_what_the_correction_masks_is_logged_by_length(train: Callable[..., Path]) -> None:
    """The server's log-probabilities are -5 for every token, the model's are those of 200 words."""
    correction = {"correction": "token_mask", "correction_low": 0.99, "correction_high": 1.01}
    run = train(objective={"name": "dapo", **correction})
    for line, entry in zip(
        read_records(run / "metrics.jsonl"), read_records(run / "ledger.jsonl"), strict=True
    ):
        assert 0 < entry["masked_tokens"] <= entry["loss_tokens"]
        assert line["masked"] == pytest.approx(entry["masked_tokens"] / entry["loss_tokens"])
        by_length = {k: v for k, v in line.items() if k.startswith("masked_by_length/")}
        assert by_length.keys() <= {f"masked_by_length/{b}" for b in ("1", "2", "3-4", "5-8")}
        assert any(by_length.values())
    objective = (run / "objective.txt").read_text()
    assert "c    = token_mask of old / sampler, [0.99, 1.01], without gradient" in objective


def test_useless_groups_are_refilled_up_to_the_budget(
    train: Callable[..., Path], tmp_path: Path
) -> None:
    run = train(
        reward={"function": f"{tmp_path / 'rewards.py'}:same"}, rollout={"refill_budget": 1.5}
    )
    for entry in read_records(run / "ledger.jsonl"):
        assert entry["prompts"] == 4 + 6
        assert entry["groups"] == {"zero_variance": 10}
        assert (entry["updates"], entry["loss_tokens"]) == (0, 0)


def test_long_answers_are_punished_softly(train: Callable[..., Path], tmp_path: Path) -> None:
    run = train(
        reward={"function": f"{tmp_path / 'rewards.py'}:same"},
        objective={"name": "rloo", "truncated": "punish", "overlong_cache": 3},
    )
    for line in read_records(run / "metrics.jsonl"):
        assert 0 < line["reward_mean"] < 1
        assert line["updates"] == 1
    assert (
        "R    = same + 1 min(max((3 - length) / 3, -1), 0)" in (run / "objective.txt").read_text()
    )

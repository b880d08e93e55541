"""Controls: it is the rewards that teach, through the loop, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.protocol import Rollout
from trainer import train as loop
from trainer.curve import read_records
from trainer.demo import demo_config
from trainer.prompts import Task
from trainer.rewards import Outcome, Reward, score_rollout
from trainer.tiny_policy import ensure_tiny_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_policy(tmp_path_factory.mktemp("policies"))


def accuracies(policy: Path, url: str, output: Path, *overrides: str) -> list[float]:
    """Greedy held-out accuracy before, in between and after."""
    loop.train(demo_config(policy, url, output, overrides))
    return [line["greedy"]["accuracy"] for line in read_records(output / "evaluation.jsonl")]


def test_without_a_learning_rate_accuracy_stays(
    policy: Path, server_url: str, tmp_path: Path
) -> None:
    found = accuracies(policy, server_url, tmp_path / "run", "optimizer.lr=0", "train.steps=20")
    assert len(set(found)) == 1
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    # Sampler and trainer drift apart by nothing but rounding, at the end as at the start.
    assert all(abs(m["ratio"] - 1) < 0.02 for m in metrics)
    assert metrics[-1]["kl_sampler"] < 3 * metrics[0]["kl_sampler"] + 1e-3


def test_with_shuffled_rewards_accuracy_does_not_rise(
    policy: Path, server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)

    def shuffled(reward: Reward, tasks: Sequence[Task], rollout: Rollout) -> list[list[Outcome]]:
        flat = [o for group in score_rollout(reward, tasks, rollout) for o in group]
        draw.shuffle(flat)
        rest = iter(flat)
        return [[next(rest) for _ in group.samples] for group in rollout.groups]

    monkeypatch.setattr(loop, "score_rollout", shuffled)
    found = accuracies(policy, server_url, tmp_path / "run")
    assert max(found[1:]) < found[0] + 0.1


def test_with_true_rewards_it_rises_from_another_seed_too(
    policy: Path, server_url: str, tmp_path: Path
) -> None:
    found = accuracies(policy, server_url, tmp_path / "run", "train.seed=7")
    assert found[-1] >= 0.8
    assert found[-1] - found[0] >= 0.3

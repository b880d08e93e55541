"""A run that is killed, again and again, against one that is not: the same bits in the end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.fake_servers import fake_servers
from tests.trainer.processes import REWARD, Training
from trainer.checkpoint import latest_checkpoint
from trainer.config import Config
from trainer.curve import read_records

STEPS = 5
TIMES_AND_VERSIONS = {
    "tokens_per_second",
    "rollout_seconds",
    "update_seconds",
    "publish_seconds",
    "trainer_idle_seconds",
    "sampler_idle_seconds",
    # A resumed run publishes again, so a server counts further.
    "sampled_version",
    "version",
}


@pytest.fixture(scope="module")
def fake_url(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose engine draws by the seed alone."""
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as (server,):
        yield server.url


@pytest.fixture
def config_of(
    make_config: Callable[..., Config], untrained_model: Path, tmp_path: Path
) -> Callable[..., Config]:
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")

    def build(name: str, url: str, *, dtype: str = "float32", **train: Any) -> Config:
        known = {"output": str(tmp_path / name), "steps": STEPS, "checkpoint_every": 2}
        return make_config(
            model={"path": str(untrained_model), "device": "cpu", "dtype": dtype},
            server={"url": url},
            rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6, "seeded": True},
            reward={"function": f"{tmp_path / 'rewards.py'}:even"},
            optimizer={"lr": 1e-3, "warmup_updates": 3},
            train=known | train,
            evaluation={"prompts": 4, "every": 3},
        )

    return build


def finish(config: Config, file: Path, *, resume: bool = False) -> None:
    training = Training(config, file, resume=resume)
    assert training.wait() == 0, training.printed()


def has_checkpoint(config: Config) -> bool:
    return any((Path(config.train.output) / "checkpoints").glob("step-*"))


def finish_with_kills(config: Config, file: Path, kills: int, dice: random.Random) -> None:
    """Start the run again after every kill, until it is through."""
    done = 0
    while done < kills:
        training = Training(config, file, resume=has_checkpoint(config))
        # Somewhere in the step after this one, or, once in a while, while it starts.
        training.wait_for_steps(dice.randrange(STEPS))
        time.sleep(dice.random())
        if training.process.poll() == 0:
            return
        assert training.process.poll() is None, training.printed()
        training.kill()
        done += 1
    finish(config, file, resume=has_checkpoint(config))


def outcome(config: Config) -> dict[str, Any]:
    """Everything that a run leaves behind, as far as it is the run's own."""
    output = Path(config.train.output)
    metrics = [
        {name: value for name, value in record.items() if name not in TIMES_AND_VERSIONS}
        for record in read_records(output / "metrics.jsonl")
    ]
    evaluations = [
        (record["step"], record["greedy"]["accuracy"])
        for record in read_records(output / "evaluation.jsonl")
    ]
    ledger = read_records(output / "ledger.jsonl")
    return {"metrics": metrics, "ledger": ledger, "evaluations": evaluations}


def tensors(config: Config) -> list[torch.Tensor]:
    """Weights, moments and random states of the last checkpoint."""
    checkpoint = latest_checkpoint(Path(config.train.output) / "checkpoints")
    weights = load_file(checkpoint / "model" / "model.safetensors")
    state = torch.load(checkpoint / "trainer.pt", weights_only=True)
    moments = [
        moment[name]
        for moment in state["optimizer"]["state"].values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return [*weights.values(), *moments, state["random"]["torch"]]


def assert_same(one: Config, other: Config) -> None:
    assert outcome(one) == outcome(other)
    pairs = zip(tensors(one), tensors(other), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_a_killed_run_ends_with_the_same_bits(
    config_of: Callable[..., Config], deterministic_url: str, tmp_path: Path
) -> None:
    # vLLM itself, whose samples depend on the weights, and these on the samples before.
    unbroken = config_of("unbroken", deterministic_url)
    broken = config_of("broken", deterministic_url)
    finish(unbroken, tmp_path / "unbroken.toml")
    finish_with_kills(broken, tmp_path / "broken.toml", 1, random.Random(0))
    assert_same(unbroken, broken)
    found = outcome(unbroken)["metrics"]
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    assert all(record["updates"] == 1 for record in found)
    assert {record["staleness"] for record in found} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_killed_twice_ends_with_the_same_bits(
    config_of: Callable[..., Config], fake_url: str, tmp_path: Path, dtype: str
) -> None:
    unbroken = config_of("unbroken", fake_url, dtype=dtype)
    broken = config_of("broken", fake_url, dtype=dtype)
    finish(unbroken, tmp_path / "unbroken.toml")
    finish_with_kills(broken, tmp_path / "broken.toml", 2, random.Random(0))
    assert_same(unbroken, broken)
    assert {x.dtype for x in tensors(broken)} == {torch.float32, torch.uint8}  # masters, moments
    # The comparison can fail.
    other = config_of("other", fake_url, dtype=dtype, seed=1)
    finish(other, tmp_path / "other.toml")
    assert outcome(other)["metrics"] != outcome(unbroken)["metrics"]


@pytest.mark.slow
def test_a_run_that_samples_ahead_makes_every_step_once(
    config_of: Callable[..., Config], fake_url: str, tmp_path: Path
) -> None:
    broken = config_of("ahead", fake_url, max_staleness=2, checkpoint_every=1)
    finish_with_kills(broken, tmp_path / "ahead.toml", 1, random.Random(1))
    metrics = outcome(broken)["metrics"]
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    assert all(0 <= record["staleness"] <= 2 for record in metrics)
    # Which prompts are trained in which step does not depend on kills: their seeds tell.
    unbroken = config_of("synchronous", fake_url)
    finish(unbroken, tmp_path / "synchronous.toml")
    rewards = [record["reward_mean"] for record in metrics]
    assert rewards == [record["reward_mean"] for record in outcome(unbroken)["metrics"]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_many_kills(
    config_of: Callable[..., Config], deterministic_url: str, tmp_path: Path, seed: int
) -> None:
    unbroken = config_of("unbroken", deterministic_url)
    broken = config_of("broken", deterministic_url)
    finish(unbroken, tmp_path / "unbroken.toml")
    finish_with_kills(broken, tmp_path / "broken.toml", 10, random.Random(seed))
    assert_same(unbroken, broken)

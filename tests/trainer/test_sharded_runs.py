"""``torchrun --nproc-per-node 2 -m trainer train``: the run of one process, and its ends."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.client import RolloutClient
from tests.trainer.fake_servers import FakeServer, fake_servers
from tests.trainer.processes import REWARD, TORCHRUN, Training
from trainer.checkpoint import checkpoints, latest_checkpoint, read_state
from trainer.config import Config
from trainer.curve import read_records
from trainer.learner import build_learner
from trainer.masters import master_of
from trainer.train import train

STEPS = 4
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
CLOSE = 1e-5 if DEVICE == "cpu" else 1e-3
ROUNDED = ("loss", "kl_sampler", "ratio", "gradient_norm", "clipped", "learning_rate", "updates")
BROKEN = """
def broken(**_):
    raise RuntimeError("never a verdict")
"""


@pytest.fixture(scope="module")
def server(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as (server,):
        yield server


@pytest.fixture
def config_of(
    make_config: Callable[..., Config], untrained_model: Path, server: FakeServer, tmp_path: Path
) -> Callable[..., Config]:
    (tmp_path / "rewards.py").write_text(REWARD + BROKEN, encoding="utf-8")

    def build(name: str, reward: str = "even", *, dtype: str = "float32", **train: Any) -> Config:
        known = {"output": str(tmp_path / name), "steps": STEPS, "checkpoint_every": 2}
        return make_config(
            model={"path": str(untrained_model), "device": DEVICE, "dtype": dtype},
            server={"url": server.url, "ready_timeout": 60, "publish_dtype": "float32"},
            rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6, "seeded": True},
            reward={"function": f"{tmp_path / 'rewards.py'}:{reward}"},
            objective={"beta": 0.01},
            optimizer={"lr": 1e-3, "warmup_updates": 3},
            train=known | {"keep_checkpoints": STEPS} | train,
            evaluation={"prompts": 4},
        )

    return build


def together(config: Config, tmp_path: Path, *, resume: bool = False) -> Training:
    return Training(config, tmp_path / "run.toml", resume=resume, launcher=TORCHRUN)


def begun_as(config: Config, other: Config) -> Config:
    """A run that stopped after step 2, as the other was then."""
    output = Path(config.train.output)
    shutil.copytree(other.train.output, output)
    (latest,) = [c for c in checkpoints(output / "checkpoints") if read_state(c).step > 2]
    shutil.rmtree(latest)
    return config


def state(config: Config) -> dict[str, torch.Tensor]:
    """Weights and moments of the last checkpoint."""
    checkpoint = latest_checkpoint(Path(config.train.output) / "checkpoints")
    assert read_state(checkpoint).step == STEPS
    found: dict[str, torch.Tensor] = load_file(checkpoint / "model" / "model.safetensors")
    optimizer = torch.load(checkpoint / "trainer.pt", weights_only=True)["optimizer"]
    for index, slots in optimizer["state"].items():
        found |= {f"{slot} {index}": value for slot, value in slots.items()}
    return found


def assert_alike(one: Config, other: Config) -> None:
    """The same run but for the order of sums."""
    outputs = [Path(config.train.output) for config in (one, other)]
    ledgers = [read_records(output / "ledger.jsonl") for output in outputs]
    assert ledgers[0] == ledgers[1]
    metrics = [read_records(output / "metrics.jsonl") for output in outputs]
    assert [m["step"] for m in metrics[0]] == list(range(1, STEPS + 1))
    for mine, theirs in zip(*metrics, strict=True):
        assert mine["updates"] == 1
        for name in ROUNDED:
            assert theirs[name] == pytest.approx(mine[name], rel=CLOSE, abs=CLOSE / 10), name
    mine, theirs = state(one), state(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert (theirs[name] - tensor).norm() <= CLOSE * tensor.norm(), name


@pytest.mark.slow
def test_a_run_on_two_ranks_is_that_of_one_and_either_goes_on_with_the_others_checkpoint(
    config_of: Callable[..., Config], server: FakeServer, tmp_path: Path
) -> None:
    two = config_of("two")
    training = together(two, tmp_path)
    assert training.wait() == 0, training.printed()
    assert "the model is spread over 2 ranks" in training.printed()
    assert "decoder layers are not fused: there are 2 ranks" in training.printed()
    assert training.printed().count("step 4/4  reward") == 1
    with RolloutClient(server.url) as client:
        assert (
            client.info().digest
            == read_state(latest_checkpoint(tmp_path / "two" / "checkpoints")).digest
        )

    one = config_of("one")
    train(one)
    assert_alike(one, two)
    # What two ranks saved goes on on one,
    mixed = begun_as(config_of("mixed"), two)
    train(mixed, resume=True)
    assert_alike(one, mixed)
    # and on two, to the last bit.
    again = begun_as(config_of("again"), two)
    resumed = together(again, tmp_path, resume=True)
    assert resumed.wait() == 0, resumed.printed()
    assert_alike(one, again)
    before, after = state(two), state(again)
    if DEVICE == "cpu":  # kernels of GPUs may sum in any order
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_two_ranks_go_on_with_what_one_saved(
    config_of: Callable[..., Config], tmp_path: Path
) -> None:
    one = config_of("one")
    train(one)
    more = begun_as(config_of("more"), one)
    resumed = together(more, tmp_path, resume=True)
    assert resumed.wait() == 0, resumed.printed()
    assert_alike(one, more)


@pytest.mark.slow
def test_masters_of_two_ranks_come_back_to_the_last_bit(
    config_of: Callable[..., Config], tmp_path: Path
) -> None:
    two = config_of("two", dtype="bfloat16")
    training = together(two, tmp_path)
    assert training.wait() == 0, training.printed()
    again = begun_as(config_of("again", dtype="bfloat16"), two)
    resumed = together(again, tmp_path, resume=True)
    assert resumed.wait() == 0, resumed.printed()
    before, after = state(two), state(again)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    if DEVICE == "cpu":  # kernels of GPUs may sum in any order
        assert all(torch.equal(before[name], after[name]) for name in before)
    # One process has the same masters.
    checkpoint = latest_checkpoint(tmp_path / "again" / "checkpoints")
    model = build_learner(again, checkpoint).model
    for name, parameter in model.named_parameters():
        assert torch.equal(master_of(parameter).cpu(), after[name])


@pytest.mark.slow
def test_sigterm_finishes_the_step_and_saves_it(
    config_of: Callable[..., Config], server: FakeServer, tmp_path: Path
) -> None:
    config = config_of("stopped", steps=500, checkpoint_every=0)
    training = together(config, tmp_path)
    training.wait_for_steps(1)
    assert training.process.poll() is None, training.printed()
    training.process.send_signal(signal.SIGTERM)
    training.wait()
    saved = read_state(latest_checkpoint(tmp_path / "stopped" / "checkpoints"))
    assert saved.step == training.steps() < 500
    resume = "torchrun --nproc-per-node 2 -m trainer train"
    assert f"stopped after step {saved.step}. To go on: {resume}" in training.printed()
    with RolloutClient(server.url) as client, client.lease(holder="next", ttl=5):
        pass  # the lease was given back


@pytest.mark.slow
def test_an_error_of_rank_0_ends_all_and_is_told_once(
    config_of: Callable[..., Config], tmp_path: Path
) -> None:
    training = together(config_of("broken", "broken"), tmp_path)
    assert training.wait() == 1
    assert training.printed().count("error: none of 16 samples") == 1, training.printed()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all(config_of: Callable[..., Config], tmp_path: Path) -> None:
    training = together(config_of("killed", steps=500, checkpoint_every=0), tmp_path)
    training.wait_for_steps(1)
    (follower,) = [pid for pid in children(training.process.pid) if environment(pid) == "1"]
    os.kill(follower, signal.SIGKILL)
    assert training.wait() == 1
    assert "error: another rank has ended without a word" in training.printed()


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def environment(pid: int) -> str | None:
    """The rank of a process."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ranks = [pair.removeprefix(b"RANK=") for pair in pairs if pair.startswith(b"RANK=")]
    return ranks[0].decode() if ranks else None


@pytest.mark.slow
def test_a_server_that_goes_and_comes_back_leaves_no_rank_behind(
    config_of: Callable[..., Config], server: FakeServer, tmp_path: Path
) -> None:
    training = together(config_of("lost", steps=12), tmp_path)
    for steps in (1, 5):
        training.wait_for_steps(steps)
        server.kill()  # wherever the publish or the rollout is
        server.start()
    assert training.wait() == 0, training.printed()
    assert training.steps() == 12


@pytest.mark.slow
def test_a_real_server_samples_from_what_two_ranks_publish(
    config_of: Callable[..., Config], server_url: str, tmp_path: Path
) -> None:
    fake = config_of("real", steps=3)
    server = fake.server.model_copy(update={"url": server_url, "publish_dtype": "bfloat16"})
    rollout = fake.rollout.model_copy(update={"seeded": False})
    training = together(fake.model_copy(update={"server": server, "rollout": rollout}), tmp_path)
    assert training.wait() == 0, training.printed()
    metrics = read_records(tmp_path / "real" / "metrics.jsonl")
    # Sampler and trainer agree about the samples of every policy but for bfloat16.
    assert [m["kl_sampler"] < 2e-3 for m in metrics] == [True] * 3
    assert all(m["updates"] == 1 and m["gradient_norm"] > 0 for m in metrics)

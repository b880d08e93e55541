"""The loop with samples asked for ahead, against servers that are whole but for the engine."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.client import RolloutClient
from tests.rollout_server.support import eventually
from tests.trainer.fake_servers import FakeServer, fake_servers
from trainer import train as loop
from trainer.checkpoint import latest_checkpoint, read_queue, read_state
from trainer.config import Config
from trainer.curve import read_records
from trainer.run import Run
from trainer.stopping import Stop

REWARD = """
def even(*, sample, **_):
    return float(sample.completion_ids[0] % 2)
"""


@pytest.fixture(scope="module")
def servers(
    untrained_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[FakeServer]]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 2) as servers:
        yield servers


@pytest.fixture
def config_of(
    make_config: Callable[..., Config],
    untrained_model: Path,
    servers: list[FakeServer],
    tmp_path: Path,
) -> Callable[..., Config]:
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")

    def build(count: int = 1, **train: Any) -> Config:
        known = {"output": str(tmp_path / "run"), "steps": 4}
        return make_config(
            model={"path": str(untrained_model), "device": "cpu"},
            server={"urls": [server.url for server in servers[:count]], "ready_timeout": 60},
            rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6, "seeded": True},
            reward={"function": f"{tmp_path / 'rewards.py'}:even"},
            optimizer={"lr": 1e-3},
            train=known | train,
            evaluation={"prompts": 0},
        )

    return build


def run(config: Config, *, resume: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False)
    loop.train(config, resume=resume, console=console)
    return out.getvalue()


def at_step(
    monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[Run], None], *, after: bool = True
) -> None:
    """Let something happen before or after a step of the loop."""
    plain = loop.take_step

    def take_step(run: Run, number: int) -> None:
        if number == step and not after:
            act(run)
        plain(run, number)
        if number == step and after:
            act(run)

    monkeypatch.setattr(loop, "take_step", take_step)


def test_samples_are_one_step_old_and_trained_in_the_order_of_the_data(
    servers: list[FakeServer], config_of: Callable[..., Config], tmp_path: Path
) -> None:
    servers[0].engine.asked.clear()
    run(config_of(steps=5, max_staleness=1))
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    # Step 1 has nothing older to be trained on; later ones were asked for a step before.
    assert metrics[0]["staleness"] == 0
    assert all(0 <= m["staleness"] <= 1 for m in metrics)
    assert {m["updates"] for m in metrics} == {1}
    assert len(servers[0].engine.asked) == 5 * 4
    for m in metrics:
        assert m["sampler_idle_seconds"] >= 0
        assert m["trainer_idle_seconds"] >= m["rollout_seconds"] >= 0
        assert m["trained_length"] > 0
    for entry in read_records(tmp_path / "run" / "ledger.jsonl"):
        assert "stale" not in entry["groups"]
        assert entry["received_samples"] == sum(entry["samples"].values()) == 16


def test_the_trainer_does_not_wait_while_the_sampler_works_ahead(
    servers: list[FakeServer], config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    gate = servers[0].engine.gate

    def look(run: Run) -> None:
        # Step 2 was asked for before step 1 was over. Nothing of step 3 may be, yet.
        gate.clear()
        eventually(lambda: len(servers[0].engine.asked) == 8)
        seen.append(run.sampler.position)
        gate.set()

    servers[0].engine.asked.clear()
    at_step(monkeypatch, 1, look, after=False)
    run(config_of(steps=3, max_staleness=1))
    assert seen == [8]
    assert len(servers[0].engine.asked) == 12


def test_answers_that_were_waiting_are_trained_after_a_stop(
    servers: list[FakeServer],
    config_of: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(steps=6, max_staleness=2)
    engine = servers[0].engine
    engine.asked.clear()

    with monkeypatch.context() as patch:
        stop = Stop()
        patch.setattr(loop, "stop_on_signals", lambda: _given(stop))

        def ask(run: Run) -> None:
            eventually(lambda: len(run.sampler.waiting()) == 3 * 16, 60)
            stop.requested = True

        at_step(patch, 2, ask)
        printed = run(config)
    assert f"stopped after step 2. To go on: python -m trainer train {tmp_path}/run" in printed
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    state = read_state(checkpoint)
    assert (state.step, state.position) == (2, 20)
    assert [order["step"] for order in read_queue(checkpoint)] == [3, 4, 5]
    assert {2} <= set(state.published.values()) <= {0, 1, 2}

    engine.asked.clear()
    run(config, resume=True)
    # Steps 3 to 5 came from the checkpoint; step 6 was asked for.
    assert len(engine.asked) == 4
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    # Weights are known again by their digest, though the server counts on from another version.
    assert max(m["staleness"] for m in metrics[2:5]) == 2
    assert len({m["reward_mean"] for m in metrics}) > 1


class _given:
    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def __enter__(self) -> Stop:
        return self.stop

    def __exit__(self, *_: object) -> None:
        pass


def test_samples_of_a_server_that_lags_are_not_trained(
    servers: list[FakeServer],
    config_of: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lag(run: Run) -> None:
        eventually(lambda: len(run.sampler.waiting()) == 16)
        servers[0].engine.lag = 1

    at_step(monkeypatch, 1, lag, after=False)
    try:
        run(config_of(steps=3))
    finally:
        servers[0].engine.lag = 0
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [m["staleness"] for m in metrics] == [0, 1, 2]
    assert [m["updates"] for m in metrics] == [1, 0, 0]
    for entry in read_records(tmp_path / "run" / "ledger.jsonl")[1:]:
        assert entry["groups"] == {"stale": 4}
        assert entry["samples"] == {"stale": 16}
        assert entry["loss_tokens"] == 0


def test_a_server_that_dies_and_returns_costs_no_sample(
    servers: list[FakeServer],
    config_of: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mortal = servers[1]
    returned: list[str | None] = []

    def come_back(run: Run) -> None:
        def all_current() -> bool:
            run.servers.ensure()
            return run.servers.troubles() is None

        mortal.start()
        eventually(all_current, 60)
        mortal.engine.asked.clear()

    at_step(monkeypatch, 2, lambda _: mortal.kill())
    at_step(monkeypatch, 4, come_back)
    at_step(monkeypatch, 6, lambda run: returned.append(run.servers.troubles()))
    printed = run(config_of(count=2, steps=8, max_staleness=1))
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 9))
    assert all(m["updates"] == 1 and 0 <= m["staleness"] <= 1 for m in metrics)
    assert "warning: servers: 1 of 2 not current" in printed
    assert mortal.url in printed
    assert returned == [None]
    assert mortal.engine.asked, "it was never asked again"
    with RolloutClient(mortal.url) as one, RolloutClient(servers[0].url) as other:
        assert one.info().digest == other.info().digest


def test_all_servers_gone_for_a_moment(
    servers: list[FakeServer],
    config_of: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def restart(_: Run) -> None:
        servers[0].kill()
        servers[0].start()

    at_step(monkeypatch, 2, restart)
    run(config_of(steps=4))
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [(m["updates"], m["staleness"]) for m in metrics] == [(1, 0)] * 4

"""Ctrl-C and SIGTERM, as a person or a scheduler sends them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_server.support import eventually
from tests.trainer.fake_servers import FakeServer, fake_servers
from tests.trainer.processes import PATIENCE_S, REWARD, Training
from trainer.checkpoint import latest_checkpoint, read_state
from trainer.config import Config
from trainer.curve import read_records
from trainer.stopping import stop_on_signals


@pytest.fixture(scope="module")
def server(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as (server,):
        yield server


@pytest.fixture
def config(
    make_config: Callable[..., Config], untrained_model: Path, server: FakeServer, tmp_path: Path
) -> Config:
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")
    return make_config(
        model={"path": str(untrained_model), "device": "cpu"},
        server={"url": server.url, "ready_timeout": 60},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6, "seeded": True},
        reward={"function": f"{tmp_path / 'rewards.py'}:even"},
        train={"output": str(tmp_path / "run"), "steps": 500, "checkpoint_every": 0},
        evaluation={"prompts": 0},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_the_step_and_saves_it(
    config: Config, server: FakeServer, tmp_path: Path, number: int
) -> None:
    server.engine.asked.clear()
    training = Training(config, tmp_path / "run.toml")
    training.wait_for_steps(1)
    # The signal comes while a step waits for its samples, which is where most time goes.
    server.engine.gate.clear()
    try:
        eventually(lambda: server.engine.running == 4, PATIENCE_S)
        begun = len(server.engine.asked) // 4
        training.interrupt(number)
        eventually(lambda: "stopping after this step" in training.printed(), PATIENCE_S)
    finally:
        server.engine.gate.set()
    assert training.wait() == 130, training.printed()
    state = read_state(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    # Samples are asked for a moment before the loop has begun the step that they are for.
    assert state.step == training.steps()
    assert state.step in (begun - 1, begun)
    resume = f"python -m trainer train {tmp_path}/run/config.toml --resume"
    assert f"stopped after step {state.step}. To go on: {resume}" in training.printed()
    assert "Traceback" not in training.printed()
    if number == signal.SIGINT:
        # What it said works, and makes each step once.
        longer = config.train.model_copy(update={"steps": state.step + 2})
        config = config.model_copy(update={"train": longer})
        rest = Training(config, tmp_path / "run.toml", resume=True)
        assert rest.wait() == 0, rest.printed()
        metrics = read_records(tmp_path / "run" / "metrics.jsonl")
        assert [m["step"] for m in metrics] == list(range(1, state.step + 3))


def test_the_second_signal_quits_at_once(
    config: Config, server: FakeServer, tmp_path: Path
) -> None:
    training = Training(config, tmp_path / "run.toml")
    training.wait_for_steps(1)
    server.engine.gate.clear()
    try:
        eventually(lambda: server.engine.running == 4, PATIENCE_S)
        training.interrupt()
        eventually(lambda: "once more to quit at once" in training.printed(), PATIENCE_S)
        training.interrupt()
        # The samples that it waits for never come.
        assert training.wait() == 130, training.printed()
    finally:
        server.engine.gate.set()
    assert "interrupted" in training.printed()
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_signals_are_noted_and_then_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    requested = []
    with stop_on_signals() as stop:
        requested.append(stop.requested)
        signal.raise_signal(signal.SIGTERM)
        requested.append(stop.requested)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert requested == [False, True]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_nothing_is_requested() -> None:
    seen: list[Any] = []

    def work() -> None:
        with stop_on_signals() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]

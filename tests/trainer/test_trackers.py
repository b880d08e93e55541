"""Figures reach every tracker that is configured, and none of them can end a run."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rich.console import Console

from tests.conftest import free_port
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.progress import ProgressLog
from trainer.run import open_run
from trainer.trackers import Hosted, open_trackers, refuse_missing

MakeConfig = Callable[..., Config]


class Library:
    """In the place of wandb or Trackio: notes what it is called with."""

    def __init__(self) -> None:
        self.began: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = 0
        self.error: Exception | None = None

    def init(self, **arguments: Any) -> SimpleNamespace:
        if self.error is not None:
            raise self.error
        self.began.append(arguments)
        return SimpleNamespace(log=self._log, finish=self._finish)

    def _log(self, figures: dict[str, float], step: int) -> None:
        if self.error is not None:
            raise self.error
        self.logged.append((figures, step))

    def _finish(self) -> None:
        self.finished += 1


@pytest.fixture(params=["wandb", "trackio"])
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def library(name: str, monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    monkeypatch.setitem(sys.modules, name, fake)
    return fake


@pytest.fixture
def config_with(make_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    def make(**tracking: Any) -> Config:
        tmp_path.joinpath("run").mkdir(exist_ok=True)
        return make_config(train={"output": str(tmp_path / "run")}, tracking=tracking)

    return make


def test_a_run_is_begun_under_a_name_that_resuming_finds(
    name: str, library: Library, config_with: MakeConfig
) -> None:
    for _ in range(2):
        with open_trackers(config_with(**{name: "sums"}), 0) as trackers:
            trackers[-1].log({"train/reward_mean": 0.5}, 3)
    first, second = library.began
    assert first == second
    assert (first["project"], first["resume"]) == ("sums", "allow")
    assert first["name"].startswith("run-")
    assert first["config"]["tracking"][name] == "sums"
    assert library.logged == [({"train/reward_mean": 0.5}, 3)] * 2
    assert library.finished == 2


def test_nothing_is_asked_for_that_is_not_configured(
    library: Library, config_with: MakeConfig
) -> None:
    with open_trackers(config_with(), 0) as trackers:
        assert len(trackers) == 1
    assert not library.began


def test_a_library_that_is_missing_is_named(
    name: Any, config_with: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"tracking.{name} is set, and") as caught:
        Hosted(name, "sums", config_with())
    assert caught.value.advice == f"pip install {name}, or leave tracking.{name} empty"


def test_it_is_named_before_a_model_is_loaded(
    name: str, config_with: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.trackers.find_spec", lambda _: None)
    refuse_missing(config_with())
    with (
        pytest.raises(ConfigError, match=f"tracking.{name} is set, and {name} is not installed"),
        open_run(config_with(**{name: "sums"}), resume=False, console=None),
    ):
        pass


def test_a_library_that_begins_no_run_is_told_of(
    name: Any, library: Library, config_with: MakeConfig
) -> None:
    library.error = RuntimeError("no API\nkey")
    with pytest.raises(ConfigError, match=f"tracking.{name}: no run was begun: no API key"):
        Hosted(name, "sums", config_with())


def test_a_tracker_that_fails_costs_a_warning(tmp_path: Path, library: Library) -> None:
    out = io.StringIO()
    tracker: Any = SimpleNamespace(log=library._log)
    library.error = OSError("away")
    with ProgressLog(tmp_path, 9, console=Console(file=out), trackers=[tracker]) as log:
        log._track({"train/loss": 1.0}, 1)
        log._track({"train/loss": 1.0}, 2)
        library.error = None
        log._track({"train/loss": 1.0, "train/kl_reference": math.nan}, 3)
    assert out.getvalue() == "warning: tracking, SimpleNamespace: away\n"
    assert library.logged == [({"train/loss": 1.0}, 3)]


def test_prometheus_scrapes_the_newest_figures(config_with: MakeConfig) -> None:
    port = free_port()
    with open_trackers(config_with(metrics_port=port), 0) as trackers:
        for step in (1, 2):
            for tracker in trackers:
                tracker.log(
                    {
                        "train/reward_mean": step / 4,
                        "train/rewards/my.py:f": 1.0,
                        "train/rollout_seconds": 0.2,
                    },
                    step,
                )
        trackers[-1].log({"evaluation/greedy": 0.75}, 2)
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert "tito_trainer_steps_total 2.0" in text
    assert "tito_trainer_step 2.0" in text
    assert "tito_trainer_reward_mean 0.5" in text
    assert "tito_trainer_rewards_my_py_f 1.0" in text
    assert "tito_trainer_evaluation_greedy 0.75" in text
    assert 'tito_trainer_step_seconds_bucket{le="0.3",part="rollout"} 2.0' in text
    assert 'tito_trainer_step_seconds_bucket{le="0.1",part="rollout"} 0.0' in text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken_is_told_of(config_with: MakeConfig) -> None:
    config = config_with(metrics_port=free_port())
    taken = pytest.raises(ConfigError, match="cannot listen on 127")
    with open_trackers(config, 0), taken, open_trackers(config, 0):
        pass

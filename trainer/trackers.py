"""Where the figures of a run go, besides the console and ``metrics.jsonl``.

TensorBoard's files always; Weights & Biases, Trackio and a port for Prometheus when ``[tracking]``
says so. All take the same figures under the same names.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from torch.utils.tensorboard import SummaryWriter

from trainer.config import Config, TrackingConfig
from trainer.errors import ConfigError

_STAGE = "_seconds"
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Tracker(Protocol):
    """Takes the figures of steps."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures, none of them NaN, by names such as ``train/reward_mean``."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Files for TensorBoard.

    Args:
        directory: of the run.
        resumed_step: what an earlier run had recorded behind it is hidden.
    """

    def __init__(self, directory: Path, resumed_step: int) -> None:
        self._board = SummaryWriter(directory / "tensorboard", purge_step=resumed_step + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See :meth:`Tracker.log`."""
        for name, value in figures.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """See :meth:`Tracker.close`."""
        self._board.close()


class Hosted:
    """A run of wandb or Trackio, which have one interface.

    A run that is resumed goes on under its name. Neither takes back steps: those that were lost
    with a dead run, and are made again, are counted once more or left out, as the library likes.

    Raises:
        ConfigError: the library is not installed, or does not begin a run.
    """

    def __init__(self, library: Literal["wandb", "trackio"], project: str, config: Config) -> None:
        output = Path(config.train.output).absolute()
        name = f"{output.name}-{hashlib.sha256(str(output).encode()).hexdigest()[:8]}"
        # wandb resumes by id, Trackio by name.
        own = {"id": name, "dir": str(output)} if library == "wandb" else {}
        settings = config.model_dump(mode="json")
        try:
            begin = importlib.import_module(library).init
            self._run = begin(project=project, name=name, config=settings, resume="allow", **own)
        except ModuleNotFoundError as error:
            raise _missing(library, error.name) from None
        except Exception as error:
            raise ConfigError(
                f"tracking.{library}: no run was begun: {' '.join(str(error).split())}",
                advice=f"log in to {library}, or leave tracking.{library} empty",
            ) from error

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See :meth:`Tracker.log`."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """See :meth:`Tracker.close`."""
        self._run.finish()


class Prometheus:
    """Answers ``GET /metrics`` with the newest figures, on a port of its own.

    Names begin with ``tito_trainer_``. Parts of a step are one histogram, ``step_seconds``, by
    ``part``; steps are counted; all else is a gauge, shares from 0 to 1.

    Raises:
        ConfigError: the port cannot be listened on, or prometheus-client is not installed.
    """

    def __init__(self, tracking: TrackingConfig) -> None:
        try:
            import prometheus_client as prometheus
        except ModuleNotFoundError:
            raise ConfigError(
                "tracking.metrics_port is set, and prometheus-client is not installed",
                advice="pip install prometheus-client, or set tracking.metrics_port to 0",
            ) from None
        self._registry = prometheus.CollectorRegistry()
        self._gauge = prometheus.Gauge
        self._gauges: dict[str, Any] = {}
        self._steps = prometheus.Counter(
            "tito_trainer_steps", "Steps of this process.", registry=self._registry
        )
        self._seconds = prometheus.Histogram(
            "tito_trainer_step_seconds",
            "Time that each part of a step took.",
            ["part"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        where = tracking.metrics_host, tracking.metrics_port
        try:
            self._server, self._thread = prometheus.start_http_server(
                where[1], where[0], self._registry
            )
        except OSError as error:
            raise ConfigError(
                f"tracking.metrics_port: cannot listen on {where[0]} port {where[1]}: "
                f"{error.strerror}",
                advice="end what listens there, or choose another port",
            ) from None

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See :meth:`Tracker.log`."""
        self._set("step", step)
        for name, value in figures.items():
            kind, _, figure = name.partition("/")
            if kind == "train" and figure.endswith(_STAGE):
                self._seconds.labels(figure.removesuffix(_STAGE)).observe(value)
            else:
                self._set(figure if kind == "train" else name, value)
        if any(name.startswith("train/") for name in figures):
            self._steps.inc()

    def _set(self, figure: str, value: float) -> None:
        name = "tito_trainer_" + "".join(c if c.isalnum() else "_" for c in figure)
        if name not in self._gauges:
            about = f"{figure}, as in metrics.jsonl."
            self._gauges[name] = self._gauge(name, about, registry=self._registry)
        self._gauges[name].set(value)

    def close(self) -> None:
        """See :meth:`Tracker.close`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def refuse_missing(config: Config) -> None:
    """Look for the libraries that the configuration names, before minutes go into a model.

    Raises:
        ConfigError: one of them is not installed.
    """
    for library in ("wandb", "trackio"):
        if getattr(config.tracking, library) and find_spec(library) is None:
            raise _missing(library, library)


def _missing(library: str, package: str | None) -> ConfigError:
    return ConfigError(
        f"tracking.{library} is set, and {package} is not installed",
        advice=f"pip install {library}, or leave tracking.{library} empty",
    )


@contextmanager
def open_trackers(config: Config, resumed_step: int) -> Iterator[list[Tracker]]:
    """Every tracker that the configuration names; closed on the way out.

    Raises:
        ConfigError: one of them cannot be had.
    """
    tracking = config.tracking
    with ExitStack() as stack:
        trackers: list[Tracker] = [TensorBoard(Path(config.train.output), resumed_step)]
        stack.callback(trackers[0].close)
        if tracking.metrics_port:
            trackers.append(Prometheus(tracking))
            stack.callback(trackers[-1].close)
        hosted: list[tuple[Literal["wandb", "trackio"], str]]
        hosted = [("wandb", tracking.wandb), ("trackio", tracking.trackio)]
        for library, project in hosted:
            if project:
                trackers.append(Hosted(library, project, config))
                stack.callback(trackers[-1].close)
        yield trackers

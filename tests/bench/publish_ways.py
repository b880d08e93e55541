"""Publishing to a real server, timed, for ``bench_publish.py``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.protocol import ReloadResult
from tests.bench.checkpoints import Tensors, lazy, named, specs_of
from tests.bench.servers import READY_S, rollout_server
from trainer.channels import ChannelSender


class TimedClient(RolloutClient):
    """Notes when it was told that a channel's buffer is full.

    Attributes:
        asked_at: that moment.
    """

    asked_at = 0.0

    def reload_channel(self, id: str, *, durable: bool = False, **target: Any) -> ReloadResult:
        self.asked_at = time.perf_counter()
        return super().reload_channel(id, durable=durable, **target)


@contextmanager
def serving(model: Path) -> Iterator[TimedClient]:
    """A real server in a process of its own."""
    log = model.parent / "server.log"
    with (
        rollout_server(model, log, "--log-level", "warning") as server,
        TimedClient(server.url, timeout=READY_S) as client,
    ):
        server.wait_ready("/readyz")
        yield client


@dataclass
class Timed:
    """One publish.

    Attributes:
        total: seconds from the call to its answer.
    """

    total: float
    result: ReloadResult

    @property
    def paused(self) -> float:
        """Seconds for which generation stood still."""
        stages = ("pause", "load", "commit", "resume")
        return sum(self.result.timings.get(stage, 0.0) for stage in stages)


def publish(client: RolloutClient, weights: Tensors, base: DeltaBase | None = None) -> Timed:
    """By HTTP: all of them, or what has changed since the base."""
    start = time.perf_counter()
    result = client.reload(lazy(weights), base=base)
    return Timed(time.perf_counter() - start, result)


class SharedMemory:
    """Publishes by a channel: written into memory that the server's worker has mapped.

    Args:
        client: of the server.
        weights: such as will be published.
    """

    def __init__(self, client: TimedClient, weights: Tensors) -> None:
        self._client = client
        specs, device = specs_of(weights.items()), torch.device("cpu")
        self._sender = ChannelSender(client, "ipc", specs, first=None, device=device)
        self.publish(weights)  # warms up

    def publish(self, weights: Tensors) -> Timed:
        """One publish; the copy that is made of it afterwards is waited for, but not counted."""
        start = time.perf_counter()
        result = self._sender.publish(named(weights), None)
        total = time.perf_counter() - start
        written = self._client.asked_at - start
        self._client.await_channel(self._sender.id, 600.0)
        return Timed(total, replace(result, timings={"write": written, **result.timings}))

    def close(self) -> None:
        """Give the memory back."""
        self._sender.close()

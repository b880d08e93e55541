"""What a publish costs those who sample meanwhile, for ``bench_publish.py``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.client import RolloutClient
from tests.bench.checkpoints import Tensors
from tests.bench.publish_ways import publish
from tests.bench.results import median, report, seconds
from tests.bench.servers import roll

_TOKENS = 64
"""Of the rollout that a publish falls into."""


def stalls(client: RolloutClient, versions: list[Tensors], repeats: int) -> None:
    """Of small rollouts one after the other, and of a longer one."""
    roll(client, _TOKENS)
    usual, longest, pauses, alone, disturbed = [], [], [], [], []
    for index in range(repeats):
        weights = versions[index % 2]
        quiet, busy = _Probe(client), _Probe(client)
        with quiet.going_on():
            time.sleep(2)
        with busy.going_on():
            time.sleep(0.5)
            pauses.append(publish(client, weights).paused)
            time.sleep(0.5)
        usual.append(median(quiet.waits))
        longest.append(max(busy.waits))
        alone.append(seconds(lambda: roll(client, _TOKENS)))
        disturbed.append(_while_publishing(client, weights))
    report(
        "stall of one-token rollouts",
        usual_seconds=median(usual),
        longest_seconds=median(longest),
        stall_seconds=median(b - a for a, b in zip(usual, longest, strict=True)),
        paused_seconds=median(pauses),
    )
    report(
        "stall of a rollout in flight",
        tokens=_TOKENS,
        alone_seconds=median(alone),
        with_a_publish_seconds=median(disturbed),
        stall_seconds=median(b - a for a, b in zip(alone, disturbed, strict=True)),
    )


@dataclass
class _Probe:
    """One-token rollouts, one after the other, until told to stop.

    Attributes:
        waits: seconds that each took.
    """

    client: RolloutClient
    waits: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.waits.append(seconds(lambda: roll(self.client, 1)))

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def _while_publishing(client: RolloutClient, weights: Tensors) -> float:
    """Seconds of a rollout."""
    taken: list[float] = []

    def sample() -> None:
        taken.append(seconds(lambda: roll(client, _TOKENS)))

    thread = threading.Thread(target=sample)
    thread.start()
    publish(client, weights)
    thread.join()
    return taken[0]

"""Ways of publishing to one server, for ``bench_channels.py``: two kinds of channel, and others."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shared.channel import Kind, Layout
from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.protocol import ReloadResult
from shared.weights import TensorSpec
from tests.bench.checkpoints import lazy, named, random_weights, write, written_folder
from tests.bench.results import median, ratio, report, seconds
from tests.bench.servers import roll
from trainer.channels import ChannelSender


@dataclass(frozen=True)
class Served:
    """A model that a server serves, with random weights.

    Attributes:
        dims: name of its dimensions.
        model: its folder, without weights.
        specs: of its checkpoint.
        url, client: of the server.
    """

    dims: str
    model: Path
    specs: list[TensorSpec]
    url: str
    client: RolloutClient


@dataclass
class Times:
    """Of several publishes by the same way.

    Attributes:
        answers: seconds from the call to its answer.
        tokens: to the end of a rollout of one token of the new weights.
        stages: that the server tells.
    """

    client: RolloutClient
    answers: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    def add(self, publish: Callable[[], ReloadResult]) -> None:
        """One more."""
        start = time.perf_counter()
        result = publish()
        self.answers.append(time.perf_counter() - start)
        digest = roll(self.client, 1)
        self.tokens.append(time.perf_counter() - start)
        assert digest == result.digest, "the first token is of other weights"
        self.stages.append(result.timings)

    def told(self, warm_up: int) -> dict[str, Any]:
        """Medians of all but the first."""
        answers, stages = self.answers[warm_up:], self.stages[warm_up:]
        paused = [sum(s[name] for name in ("pause", "load", "resume")) for s in stages]
        # "copy" is another name for what happens while the answer is awaited.
        named_s = [sum(t for name, t in s.items() if name != "copy") for s in stages]
        return {
            "seconds": median(answers),
            "to_first_token": median(self.tokens[warm_up:]),
            "paused": median(paused),
            "paused_to_load": ratio(paused, [s["load"] for s in stages]),
            "beyond_stages": median(t - n for t, n in zip(answers, named_s, strict=True)),
            "all_seconds": self.answers,
            "stages": {name: median(s[name] for s in stages) for name in stages[-1]},
        }


# By a channel.


def by_channel(served: Served, kind: Kind, device: torch.device, repeats: int) -> None:
    """Publishes by one kind of channel, beside a plain copy of the same bytes."""
    client, specs = served.client, served.specs
    versions = [random_weights(specs, device, seed) for seed in (1, 2)]
    sender = ChannelSender(client, kind, specs, first=None, device=device)
    usual = [seconds(lambda: roll(client, 1)) for _ in range(repeats)]
    opening = seconds(lambda: sender.open(None))
    client.await_channel(sender.id, 60.0)
    times, copies = Times(client), []
    try:
        with _hops(sender, client) as hops:
            for index in range(repeats + 2):  # the first finds where everything goes
                times.add(partial(sender.publish, named(versions[index % 2]), None))
                copies.append(seconds(lambda: client.await_channel(sender.id, 120.0)))
        assert client.policy()["durable"], client.policy()["history"][0]["reason"]
    finally:
        sender.close()
    nbytes = Layout.of(specs).nbytes
    here = torch.device("cuda", 0) if device.type == "cuda" else device
    ceiling = _copy_seconds(nbytes, device, here, repeats)
    told = times.told(2)
    report(
        f"{served.dims} by {kind}"
        + (" from another GPU" if kind == "ipc" and device != here else ""),
        bytes=nbytes,
        **told,
        plain_copy=ceiling,
        seconds_to_copy=told["seconds"] / ceiling,
        first_publish=times.answers[0],
        open=opening,
        until_durable=median(copies[2:]),
        token_alone=median(usual),
        hops={name: median(spent[2:]) for name, spent in hops.items()},
    )


@contextlib.contextmanager
def _hops(sender: ChannelSender, client: RolloutClient) -> Iterator[dict[str, list[float]]]:
    """Seconds that the trainer's side of a publish spends in what."""
    found: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                found[name].append(time.perf_counter() - start)

        return run

    way: Any = sender._way
    changed: list[tuple[Any, str]] = [
        (sender, "_await"), (way, "send"), (client, "reload_channel")
    ]  # fmt: skip
    for owner, name in changed:
        setattr(owner, name, timed(name, getattr(owner, name)))
    try:
        yield found
    finally:
        for owner, name in changed:
            delattr(owner, name)


def _copy_seconds(nbytes: int, source: torch.device, target: torch.device, repeats: int) -> float:
    """One plain copy of so many bytes."""
    one = torch.zeros(nbytes, dtype=torch.uint8, device=source)
    other = torch.zeros(nbytes, dtype=torch.uint8, device=target)
    times = []
    for _ in range(repeats + 1):
        wait(source, target)
        start = time.perf_counter()
        other.copy_(one)
        wait(source, target)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def wait(*devices: torch.device) -> None:
    """Until they have done what they were told."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# By other ways.


def by_http(served: Served, device: torch.device, repeats: int) -> None:
    """The same bytes as an upload."""
    versions = [lazy(random_weights(served.specs, device, seed)) for seed in (3, 4)]
    times = Times(served.client)
    for index in range(repeats + 1):
        times.add(partial(served.client.reload, versions[index % 2]))
    report(f"{served.dims} by http", **times.told(1))


def by_delta(served: Served, device: torch.device, repeats: int) -> None:
    """A thirtieth of the values has changed each time, by one unit in the last place."""
    weights, base, times = (
        random_weights(served.specs, device, 5),
        DeltaBase(),
        Times(served.client),
    )
    served.client.reload(lazy(weights), base=base)
    for _ in range(repeats + 1):
        for tensor in weights.values():
            tensor.view(-1).view(torch.int16)[::30].bitwise_xor_(1)
        times.add(partial(served.client.reload, lazy(weights), base=base))
    report(f"{served.dims} by delta", **times.told(1))


def by_disk(served: Served, device: torch.device, repeats: int) -> None:
    """A file that this process writes and the server reads; in shared memory, if there is room."""
    weights, times, writing = random_weights(served.specs, device, 6), Times(served.client), []
    with written_folder(served.dims) as folder:
        for index in range(repeats + 1):
            next(iter(weights.values()))[0] += 0.01 * index
            writing.append(seconds(lambda: write(weights, folder)))
            times.add(partial(served.client.reload_path, folder))
    report(f"{served.dims} by disk", written=median(writing[1:]), **times.told(1))


OTHERS = {"http": by_http, "delta": by_delta, "disk": by_disk}

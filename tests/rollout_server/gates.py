"""What the tests of streams share: an engine that holds prompts back, and lines that are cut."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_server.app import create_app
from rollout_server.engine import Completion, VersionSpan
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.requests import SamplingSettings
from tests.rollout_server.support import FakeEngine, serving


@dataclass
class GatedEngine(FakeEngine):
    """Samples at random, so that nothing is the same twice, and holds prompts back.

    Attributes:
        withheld: first ids of the prompts that do not finish before they are let go.
        begun: how often each prompt was given to the engine.
        made: the completions of each prompt, one list for each time that it was sampled.
        length: tokens of a completion; None leaves it to max_tokens.
        drops: a prompt that starts with this id is let go of without a word.
    """

    withheld: set[int] = field(default_factory=set)
    begun: Counter[tuple[int, ...]] = field(default_factory=Counter)
    made: dict[tuple[int, ...], list[list[list[int]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    length: int | None = None
    drops: int | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSettings, n: int, *_: Any
    ) -> list[Completion]:
        prompt = tuple(prompt_ids)
        self.begun[prompt] += 1
        self.running += 1
        try:
            # Tests let go from other threads, so there is no asyncio event to wait for.
            while prompt[0] in self.withheld:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if prompt[0] == self.drops:
            raise asyncio.CancelledError
        if prompt[0] == self.poison:
            raise self.generate_error or RuntimeError("poisoned")
        length = self.length or sampling.max_tokens
        ids = [[random.randrange(256) for _ in range(length)] for _ in range(n)]
        self.made[prompt].append(ids)
        spans = (VersionSpan(self.version, 0, length),)
        return [Completion(one, [-1.0] * length, "length", spans) for one in ids]


@dataclass(frozen=True)
class Served:
    """An application around a gated engine, on a real socket."""

    url: str
    engine: GatedEngine
    client: RolloutClient


@contextlib.contextmanager
def served(
    model: Path, staging_dir: Path, token: str | None = None, **settings: Any
) -> Iterator[Served]:
    """The application, once it is ready."""
    engine = GatedEngine()
    options = ServerSettings(model=str(model), staging_dir=staging_dir, **settings)
    app = create_app(options, build_engine=lambda _: engine)
    with serving(app) as url, RolloutClient(url, token=token, timeout=60) as client:
        client.wait_ready(60)
        engine.begun.clear()  # the first token, by which the server knows that it works
        try:
            yield Served(url, engine, client)
        finally:
            engine.withheld.clear()


class CuttingProxy:
    """A line to a server that breaks after some bytes, again and again.

    Args:
        most_bytes: it breaks before so many bytes of an answer, at a random place.
        chance: that it breaks in an answer at all; sometimes it breaks in a request.

    Attributes:
        cuts: how often it broke so far.
        most_cuts: after these it holds.
    """

    def __init__(
        self, url: str, *, seed: int, most_bytes: int, most_cuts: int, chance: float = 0.9
    ) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._upstream = (host, int(port))
        self._random = random.Random(seed)
        self._most_bytes = most_bytes
        self._chance = chance
        self.most_cuts = most_cuts
        self.cuts = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        with self._lock:
            budgets = [
                self._budget(0.1),
                self._budget(self._chance),
            ]  # what is sent, what is answered
        there = socket.create_connection(self._upstream)
        pairs = [(here, there, budgets[0]), (there, here, budgets[1])]
        for source, sink, budget in pairs:
            threading.Thread(
                target=self._pump, args=(source, sink, budget, (here, there)), daemon=True
            ).start()

    def _budget(self, chance: float) -> int | None:
        if self._random.random() < chance:
            return self._random.randrange(self._most_bytes)
        return None

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        budget: int | None,
        line: tuple[socket.socket, socket.socket],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if budget is not None and len(data) >= budget and self._may_cut():
                    sink.sendall(data[:budget])
                    break
                sink.sendall(data)
                budget = None if budget is None else max(budget - len(data), 0)
        for end in line:
            hang_up(end)

    def _may_cut(self) -> bool:
        with self._lock:
            if self.cuts == self.most_cuts:
                return False
            self.cuts += 1
            return True

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


def hang_up(line: socket.socket) -> None:
    """Break a connection on the spot, without a farewell."""
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.shutdown(socket.SHUT_RDWR)
    line.close()


def raw_post(url: str, body: bytes, **headers: str) -> socket.socket:
    """A request on a socket that nothing reads from yet."""
    host, port = url.removeprefix("http://").split(":")
    line = socket.create_connection((host, int(port)))
    fields = {"host": host, "content-length": str(len(body)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    line.sendall(b"POST /rollout HTTP/1.1\r\n" + head.encode() + b"\r\n" + body)
    return line

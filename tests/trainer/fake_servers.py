"""Rollout servers, whole but for the engine, on real sockets: to be killed and restarted."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from rollout_server.app import create_app
from rollout_server.engine import Completion, VersionSpan
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.errors import Overloaded
from shared.requests import SamplingSettings
from tests.conftest import free_port
from tests.rollout_server.support import FakeEngine, eventually

WORDS = 200
MORE_THAN_A_CLIENT_TRIES = 6
"""Refusals after which whoever asks has to go on asking; the client by itself has given up."""


@dataclass
class WordyEngine(FakeEngine):
    """Completions of random tokens: the same for one seed or else prompt, whatever the weights.

    Attributes:
        asked: seeds of the groups that were begun, in order.
        busy: how many of the next groups find no room.
        lag: by how many versions the weights that sample lie behind those that were loaded.
    """

    asked: list[int | None] = field(default_factory=list)
    busy: int = 0
    lag: int = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSettings, n: int, *_: Any
    ) -> list[Completion]:
        if self.busy > 0:
            self.busy -= 1
            raise Overloaded("no room", retry_after=0.01)
        self.asked.append(sampling.seed)
        await super().generate(prompt_ids, sampling, n)
        dice = random.Random(sampling.seed if sampling.seed is not None else sum(prompt_ids))
        return [self._say(dice, sampling.max_tokens) for _ in range(n)]

    def _say(self, dice: random.Random, limit: int) -> Completion:
        ids = [dice.randrange(WORDS) for _ in range(dice.randint(1, limit))]
        spans = (VersionSpan(max(self.version - self.lag, 1), 0, len(ids)),)
        return Completion(ids, [-5.0] * len(ids), "stop", spans)


class FakeServer:
    """One server, always at the same address.

    Args:
        model: directory with the tokenizer and the weights of version 0.
        scratch: where it stages what it is sent.
        engine_class: of its engines.
    """

    def __init__(
        self, model: Path, scratch: Path, engine_class: type[WordyEngine] = WordyEngine
    ) -> None:
        self.engine_class = engine_class
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = ServerSettings(model=str(model), staging_dir=scratch)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.engine = engine_class()

    def start(self) -> None:
        """Come up, with the weights of version 0 and no memory of leases."""
        self.engine = self.engine_class()
        app = create_app(self._settings, build_engine=lambda _: self.engine)
        config = uvicorn.Config(
            app, host="127.0.0.1", port=self.port, log_level="critical", access_log=False
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        with RolloutClient(self.url) as client:
            client.wait_ready(60)

    def kill(self) -> None:
        """Go down without finishing anything."""
        assert self._server is not None
        assert self._thread is not None
        self._server.force_exit = self._server.should_exit = True
        eventually(lambda: self._thread is not None and not self._thread.is_alive(), 30)


@contextlib.contextmanager
def fake_servers(
    model: Path, scratch: Path, count: int, engine_class: type[WordyEngine] = WordyEngine
) -> Iterator[list[FakeServer]]:
    """Some servers, started."""
    servers = [FakeServer(model, scratch / str(n), engine_class) for n in range(count)]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()

"""Many callers at once, over real sockets: turns, quotas, room in the queue, a loop that turns."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_server import http, rollouts, streams
from rollout_server.app import create_app
from rollout_server.engine import Completion, VersionSpan
from rollout_server.prompts import PromptEncoder
from rollout_server.routes import rollout as rollout_route
from rollout_server.settings import ServerSettings
from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import InvalidRequest, Overloaded
from shared.protocol import JSON, MSGPACK
from shared.requests import SamplingSettings
from tests.rollout_server.engines import PATIENCE_S
from tests.rollout_server.support import FakeEngine, eventually, post, samples_run, serving

CALLERS = {
    "big": ("big-token-big-token", ""),
    "small": ("small-token-small-token", ""),
    "limited": ("limited-token-limited", "max_queued_samples = 16\nmax_running_samples = 4\n"),
}


@dataclass
class HeldEngine(FakeEngine):
    """Holds every group back until it is let go, and knows which came when.

    Attributes:
        begun: the first id of each prompt, in the order in which they were given to the engine.
        loop_thread: on which it is asked.
    """

    begun: list[int] = field(default_factory=list)
    loop_thread: int = 0
    _held: bool = False
    _loop: asyncio.AbstractEventLoop | None = None
    _released: asyncio.Event | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSettings, n: int, *_: Any
    ) -> list[Completion]:
        self.loop_thread = threading.get_ident()
        self._loop, self._released = asyncio.get_running_loop(), self._released or asyncio.Event()
        self.begun.append(prompt_ids[0])
        self.running += n
        try:
            if self._held:
                await self._released.wait()
        finally:
            self.running -= n
        ids = [prompt_ids[0]] * sampling.max_tokens
        spans = (VersionSpan(self.version, 0, len(ids)),)
        return [Completion(ids, [-1.0] * len(ids), "length", spans)] * n

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[], None]]:
        """Hold from now on; yields what lets everything go."""
        assert self._loop is not None
        assert self._released is not None
        loop, released = self._loop, self._released
        self._held = True
        self.begun.clear()

        def let_go() -> None:
            self._held = False
            loop.call_soon_threadsafe(released.set)

        try:
            yield let_go
        finally:
            let_go()
            eventually(lambda: self.running == 0, 60)
            loop.call_soon_threadsafe(released.clear)


@dataclass(frozen=True)
class Busy:
    """A server with callers and a held engine."""

    url: str
    engine: HeldEngine

    def client(self, name: str) -> RolloutClient:
        return RolloutClient(self.url, token=CALLERS[name][0], timeout=PATIENCE_S)

    def gauge(self, name: str) -> float:
        """One of the server's figures."""
        headers = {"authorization": f"Bearer {CALLERS['big'][0]}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers).text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def post(self, name: str, count: int, **settings: Any) -> httpx.Response:
        """What our own client would not send twice, and a refusal just as it comes."""
        body = {"prompts": [[20, 7]] * count, "group_size": 2, "max_tokens": 3}
        timeout = settings.pop("timeout", PATIENCE_S)
        accept = MSGPACK if settings.get("packed") else JSON
        headers = {"authorization": f"Bearer {CALLERS[name][0]}"}
        return post(self.url, body | settings, headers=headers, timeout=timeout, accept=accept)

    @property
    def queued(self) -> float:
        """Samples that wait."""
        return self.gauge('tito_queued{unit="samples"}')


@contextlib.contextmanager
def busy(model: Path, folder: Path, **settings: Any) -> Iterator[Busy]:
    tokens = folder / "tokens.toml"
    tokens.write_text(
        "\n".join(
            f'[[token]]\nname = "{name}"\ntoken = "{token}"\nscopes = ["rollout"]\n{quota}'
            for name, (token, quota) in CALLERS.items()
        )
    )
    tokens.chmod(0o600)
    engine = HeldEngine()
    options = ServerSettings(
        model=str(model), staging_dir=folder / "staging", tokens_file=tokens, **settings
    )
    with serving(create_app(options, build_engine=lambda _: engine)) as url:
        server = Busy(url, engine)
        with server.client("big") as client:
            client.wait_ready(60)
        yield server


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """Two samples run at a time, and two hundred may wait."""
    folder = tmp_path_factory.mktemp("busy")
    limits = {"max_running_samples": 2, "max_queued_samples": 200, "max_queued_tokens": 4000}
    with busy(tiny_model, folder, **limits) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def rolled(server: Busy, name: str, prompt: int, count: int, **settings: Any) -> list[int]:
    """A rollout of equal prompts by one caller; the first tokens of its samples."""
    asked = {"group_size": 2, "max_tokens": 3, **settings}
    with server.client(name) as client:
        samples = client.rollout([[prompt, 7]] * count, **asked).samples
    return [int(sample.completion_ids[0]) for sample in samples]


def test_a_small_caller_takes_turns_with_a_big_one(server: Busy, pool: ThreadPoolExecutor) -> None:
    with server.engine.holding() as let_go:
        big = pool.submit(rolled, server, "big", 20, 60)
        eventually(lambda: server.queued == 118, 60)
        small = pool.submit(rolled, server, "small", 30, 4)
        eventually(lambda: server.queued == 126, 60)
        assert server.engine.begun == [20]
        let_go()
        assert small.result(60) == [30] * 8
        assert big.result(60) == [20] * 120
    assert server.engine.begun == [20] + [30, 20] * 4 + [20] * 55


def test_a_full_queue_says_when_to_come_again(server: Busy, pool: ThreadPoolExecutor) -> None:
    with server.engine.holding() as let_go:
        big = pool.submit(rolled, server, "big", 20, 100)
        eventually(lambda: server.queued == 198, 60)
        for stream in (False, True):
            answer = server.post("small", 4, stream=stream)
            assert answer.status_code == Overloaded.status
            error = answer.json()["error"]
            assert error["retry_after"] == int(answer.headers["retry-after"]) >= 1
            assert error["details"]["max_queued_samples"] == {"most": 200, "queued": 198}
            assert error["problems"] == [
                {"where": "max_queued_samples", "got": "8 samples", "allowed": "up to 2"}
            ]
        # Our own client comes again when it is told to.
        refused = server.gauge('tito_refused_total{caller="small"')
        small = pool.submit(rolled, server, "small", 30, 4)
        eventually(lambda: server.gauge('tito_refused_total{caller="small"') > refused, 60)
        let_go()
        assert small.result(60) == [30] * 8
        assert big.result(60) == [20] * 200


def test_what_never_fits_is_said_to_be_too_large(server: Busy) -> None:
    for count, settings, limit in (
        (101, {}, "max_queued_samples"),
        (100, {"max_tokens": 30}, "max_queued_tokens"),
        (1, {"group_size": 201}, "max_queued_samples"),
    ):
        answer = server.post("small", count, **settings)
        assert answer.status_code == InvalidRequest.status
        assert answer.json()["error"]["problems"][0]["where"] == limit
        assert "retry-after" not in answer.headers


def test_prompts_count_once_their_length_is_known(server: Busy) -> None:
    # 100 samples of 3 new tokens would fit; with 40 tokens of prompt each they never do.
    answer = server.post("small", 50, prompts=[[30] * 40] * 50)
    assert answer.status_code == InvalidRequest.status
    assert answer.json()["error"]["problems"][0]["got"] == f"{50 * 2 * 43} tokens"


def test_a_quota_binds_its_caller_alone(server: Busy, pool: ThreadPoolExecutor) -> None:
    with server.engine.holding() as let_go:
        limited = pool.submit(rolled, server, "limited", 40, 8)
        eventually(lambda: server.queued == 14, 60)
        answer = server.post("limited", 2)
        assert answer.status_code == Overloaded.status
        where = answer.json()["error"]["problems"][0]["where"]
        assert where == "max_queued_samples of 'limited'"
        assert server.post("limited", 1, group_size=5).status_code == InvalidRequest.status
        small = pool.submit(rolled, server, "small", 30, 10)
        eventually(lambda: server.queued == 34, 60)
        let_go()
        assert limited.result(60) == [40] * 16
        assert small.result(60) == [30] * 20


def test_who_hangs_up_leaves_the_queue(server: Busy, pool: ThreadPoolExecutor) -> None:
    with server.engine.holding() as let_go:
        with contextlib.suppress(httpx.ReadTimeout):
            server.post("big", 100, timeout=1.0)
        small = pool.submit(rolled, server, "small", 30, 4)
        eventually(lambda: server.queued == 6, 60)
        let_go()
        assert small.result(60) == [30] * 8
    assert server.engine.begun.count(20) <= 1


@pytest.fixture(scope="module")
def wide(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """Thousands of samples run at a time."""
    with busy(tiny_model, tmp_path_factory.mktemp("wide"), max_running_samples=4096) as server:
        yield server


def test_thousands_of_samples_in_flight_over_fifty_connections(wide: Busy) -> None:
    async def roll(client: AsyncRolloutClient, index: int) -> list[int]:
        prompts = [[index + 1, 7]] * 10
        rollout = await client.rollout(prompts, group_size=8, max_tokens=16)
        return [int(sample.completion_ids[0]) for sample in rollout.samples]

    async def everything() -> None:
        token = CALLERS["big"][0]
        async with AsyncRolloutClient(wide.url, token=token, timeout=PATIENCE_S) as client:
            with wide.engine.holding() as let_go:
                rolling = [asyncio.create_task(roll(client, index)) for index in range(50)]
                while wide.engine.running < 4000:  # noqa: ASYNC110 - it runs in another thread
                    await asyncio.sleep(0.01)
                async with httpx.AsyncClient() as other:
                    assert (await other.get(f"{wide.url}/healthz")).is_success
                assert not any(task.done() for task in rolling)
                let_go()
                for index, task in enumerate(rolling):
                    assert await task == [index + 1] * 80

    asyncio.run(asyncio.wait_for(everything(), PATIENCE_S))


@pytest.mark.parametrize("settings", [{"packed": True}, {"stream": True}, {}])
def test_nothing_that_takes_long_runs_on_the_loop(
    wide: Busy, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    seen: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return whole(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    encoding = "_encode_groups" if settings.get("stream") else "encode_rollout"
    watch(streams if settings.get("stream") else rollout_route, encoding)
    watch(http, "decode")
    watch(http, "validated")
    watch(PromptEncoder, "encode")
    watch(PromptEncoder, "decode")
    watch(rollouts, "_sample")
    prompts = ["1+1=", *[[5, 6] * 50] * 50]  # more bytes than are soon read
    assert wide.post("big", 8, prompts=prompts, text=True, **settings).is_success
    assert seen.keys() == {encoding, "decode", "validated", "encode", "_sample"}
    assert wide.engine.loop_thread not in set().union(*seen.values())


def test_a_small_request_overtakes_a_big_one_in_vllm(
    server_url: str, client: RolloutClient
) -> None:
    """More samples than the engine runs at once are asked for first, and others get in between."""
    settings: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "text": False}
    before = samples_run(server_url)
    with client.rollout_stream([[5, 6, 7]] * 250, group_size=8, **settings) as big:
        next(big)
        assert len(client.rollout([[8, 9]], group_size=8, **settings).samples) == 8
        # Both requests are anonymous, and take turns like those of two callers.
        assert samples_run(server_url) - before < 250 * 8

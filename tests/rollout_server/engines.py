"""What the tests of real engines share: servers in here, rollouts in flight, process ids."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_server.app import create_app
from rollout_server.engine import Adapter, Completion, Engine
from rollout_server.settings import ServerSettings
from rollout_server.vllm_engine import VLLMEngine
from shared.client import RolloutClient
from shared.protocol import Rollout, Sample
from shared.requests import SamplingSettings
from tests.rollout_server.support import (
    BF16_MAX_NATS,
    BF16_MEAN_NATS,
    Weights,
    counter,
    distance,
    eventually,
    serving,
)

PATIENCE_S = 600.0
"""How long a test waits for what a busy machine may take long over."""
_HEAD_START_S = 0.2
LONG_PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 4


class WatchedEngine(VLLMEngine):
    """vLLM itself, and a look at which adapters it holds and runs side by side.

    Attributes:
        together: for each moment at which a group began, the adapters of all groups under way;
            None stands for the base weights.
    """

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.together: list[frozenset[str | None]] = []
        self._names: dict[int, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way: list[str | None] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        n: int,
        adapter: Adapter | None = None,
    ) -> list[Completion]:
        self._loop = asyncio.get_running_loop()
        name = adapter.name if adapter else None
        if adapter:
            self._names[adapter.serial] = adapter.name
        self._under_way.append(name)
        self.together.append(frozenset(self._under_way))
        try:
            return await super().generate(prompt_ids, sampling, n, adapter)
        finally:
            self._under_way.remove(name)

    async def add_adapter(self, adapter: Adapter) -> None:
        self._names[adapter.serial] = adapter.name
        await super().add_adapter(adapter)

    def listed(self) -> set[str]:
        """Names of the adapters that the engine holds just now."""
        assert self._loop is not None
        serials = asyncio.run_coroutine_threadsafe(self._llm.list_loras(), self._loop)
        return {self._names[serial] for serial in serials.result(PATIENCE_S)}


@dataclass(frozen=True)
class Running:
    """An application in this process, on a real socket."""

    url: str
    client: RolloutClient


@contextlib.contextmanager
def running(
    settings: ServerSettings,
    build_engine: Callable[[ServerSettings], Engine],
    *,
    token: str | None = None,
) -> Iterator[Running]:
    """The application with an engine of the test's choice, once it is ready."""
    app = create_app(settings, build_engine=build_engine)
    with serving(app) as url, RolloutClient(url, token=token, timeout=PATIENCE_S) as client:
        client.wait_ready(PATIENCE_S)
        yield Running(url, client)


@contextlib.contextmanager
def in_flight(
    url: str, prompts: Sequence[list[int]], **settings: Any
) -> Iterator[list[Future[Rollout]]]:
    """One rollout for each prompt, every one a request of its own and under way already.

    They have had a moment to sample some tokens, unless that takes longer than a moment.
    """

    def roll(prompt: list[int]) -> Rollout:
        with RolloutClient(url, timeout=PATIENCE_S) as client:
            return client.rollout([prompt], **settings)

    before = requests_in_flight(url)
    pool = ThreadPoolExecutor(len(prompts))
    try:
        futures = [pool.submit(roll, prompt) for prompt in prompts]
        eventually(
            lambda: (
                requests_in_flight(url) >= before + len(prompts)
                or any(future.done() for future in futures)
            ),
            seconds=60,
        )
        time.sleep(_HEAD_START_S)
        yield futures
        pool.shutdown()
    finally:
        # A test that has failed need not wait: they end with the server at the latest.
        pool.shutdown(wait=False, cancel_futures=True)


def requests_in_flight(url: str) -> float:
    """Requests that the server works on, the one that asks included."""
    return counter(url, "tito_requests_in_flight")


def greedy(
    client: RolloutClient, prompt: list[int] = LONG_PROMPT, length: int = 10, **settings: Any
) -> list[int]:
    """The likeliest continuation, as the server sees it."""
    rollout = client.rollout(
        [prompt],
        group_size=1,
        max_tokens=length,
        temperature=0,
        purpose="eval",
        ignore_eos=True,
        **settings,
    )
    return [int(token) for token in rollout.samples[0].completion_ids]


def assert_tiles(sample: Sample) -> None:
    """Spans lie end to end, from the first token to the last, each of a later version."""
    ends = [0, *(span.end for span in sample.spans)]
    assert [span.start for span in sample.spans] == ends[:-1]
    assert ends[-1] == len(sample.completion_ids) == len(sample.logprobs)
    assert all(span.start < span.end for span in sample.spans)
    versions = [span.version for span in sample.spans]
    assert versions == sorted(set(versions))
    assert (sample.version, sample.digest) == (versions[0], sample.spans[0].digest)


def expected_logprobs(sample: Sample, weights: Weights) -> NDArray[np.float32]:
    """What the reference gives the sample's tokens under some weights."""
    return weights.logprobs(sample.prompt_ids.tolist(), sample.completion_ids.tolist())


def assert_made_by(
    sample: Sample, right: Callable[[str], Weights], others: Sequence[Weights] = ()
) -> None:
    """Every token has the log-probability that the weights named by its span give it.

    Args:
        right: the weights of a digest.
        others: weights that did not make the sample, unless a span names them; where they gave the
            same answers the test would prove nothing, so spans of 20 tokens must tell them apart.
    """
    errors: list[float] = []
    for span in sample.spans:
        made, maker = slice(span.start, span.end), right(span.digest)
        off = np.abs(sample.logprobs[made] - expected_logprobs(sample, maker)[made])
        where = f"tokens {span.start} to {span.end} of version {span.version}"
        assert off.max() < BF16_MAX_NATS, f"{where} are off by up to {off.max()} nats"
        errors.extend(off.tolist())
        for other in others:
            if other.digest != span.digest and span.end - span.start >= 20:
                far = distance(sample.logprobs[made], expected_logprobs(sample, other)[made])
                assert far > 5 * BF16_MEAN_NATS, f"{where} would suit other weights as well"
    mean = float(np.mean(errors))
    # The mean of a handful of tokens says nothing.
    assert len(errors) < 20 or mean < BF16_MEAN_NATS, f"off by {mean} nats on average"


@dataclass(frozen=True)
class Process:
    """A process as the kernel shows it; the number is not used again while a test runs."""

    pid: int

    @property
    def command(self) -> list[str]:
        """What it was started with, or what it calls itself."""
        return self._read("cmdline").rstrip("\0").split("\0")

    @property
    def is_running(self) -> bool:
        """Whether it has neither ended nor waits to be buried."""
        return self._status[:1] not in ([], ["Z"], ["X"])

    @property
    def parent(self) -> int:
        return int(self._status[1]) if self._status else 0

    @property
    def cpu_seconds(self) -> float:
        """What it has used so far, its children left out; 0 when it has ended."""
        user_and_system = map(int, self._status[11:13])
        return sum(user_and_system) / os.sysconf("SC_CLK_TCK")

    @property
    def _status(self) -> list[str]:
        # A name in brackets comes first, and may have brackets and blanks in it.
        return self._read("stat").rpartition(")")[2].split()

    def _read(self, name: str) -> str:
        try:
            return Path(f"/proc/{self.pid}/{name}").read_text(errors="replace")
        except OSError:
            return ""

    def kill(self) -> None:
        """End it on the spot."""
        os.kill(self.pid, signal.SIGKILL)

    def descendants(self) -> list[Process]:
        """Its children, their children, and so on."""
        everybody = [Process(int(path.name)) for path in Path("/proc").glob("[0-9]*")]
        family = {self.pid}
        for _ in range(8):  # generations
            family |= {process.pid for process in everybody if process.parent in family}
        return [process for process in everybody if process.pid in family - {self.pid}]


def server_process(url: str) -> Process:
    """The server that this process started on that address."""
    port = url.rpartition(":")[2]
    for process in Process(os.getpid()).descendants():
        if "rollout_server" in process.command and port in process.command:
            return process
    raise AssertionError(f"no child of this process serves {url}")


def engine_processes(server: Process) -> dict[str, Process]:
    """vLLM's processes below a server: ``core`` and ``worker``."""
    found = {}
    for process in server.descendants():
        for role, mark in (("core", "VLLM::EngineCore"), ("worker", "VLLM::Worker")):
            if mark in " ".join(process.command):
                found[role] = process
    return found


def staged_folders(root: Path) -> list[Path]:
    """Folders of publishes under way in a spool, or in the scratch spools below a directory."""
    return [item for area in root.rglob("staging") for item in area.iterdir()]


def committed(root: Path, policy: str) -> list[str]:
    """Names of the committed versions of a policy in a spool, or in those below a directory."""
    return sorted(folder.name for folder in root.rglob(f"policies/{policy}/v*"))

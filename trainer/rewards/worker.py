"""The process in which reward functions run. Started and, when need be, killed by the pool.

It reads pickled chunks of samples from its parent and answers with a stream of msgpack, sample by
sample: what a broken worker writes is decoded by the parent and must not run anything there.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import random
import resource
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import numpy as np

from trainer.errors import RewardError
from trainer.reward_parts import Item, Part
from trainer.rewards.load import RewardFunction, load_part
from trainer.rewards.outcome import (
    Failed,
    Outcome,
    Score,
    TimedOut,
    combine,
    failure,
    verdict,
)
from trainer.rewards.service import Service

READY, UNUSABLE, PROGRESS, DONE = range(4)
"""First element of every message to the parent; the others are told at :func:`decode`."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told first.

    Attributes:
        timeout_s: for one sample, all parts together; for each asynchronous part alone.
        memory_mb: address space beyond what the worker holds once its functions are loaded.
    """

    parts: tuple[Part, ...]
    timeout_s: float
    memory_mb: int


def main(channel: int, lifeline: int) -> None:
    """Serve chunks until the parent closes the channel."""
    _end_with_parent(lifeline)
    from_parent, to_parent = Connection(channel, writable=False), _Answers(channel)
    setup: Setup = from_parent.recv()
    try:
        worker = Worker(to_parent, setup)
    except RewardError as error:
        to_parent.say(UNUSABLE, str(error))
        return
    _limit(setup.memory_mb)
    to_parent.say(READY, worker.concurrent)
    while True:
        try:
            chunk = from_parent.recv()
        except EOFError:
            return
        worker.score(chunk)


class _Answers:
    """Messages to the parent."""

    def __init__(self, channel: int) -> None:
        self._socket = socket.socket(fileno=os.dup(channel))

    def say(self, *message: Any) -> None:
        self._socket.sendall(msgpack.packb(message))


class Worker:
    """The loaded functions, and the scoring of chunks with them.

    Attributes:
        concurrent: whether samples of a chunk are scored at the same time, which is so as soon as
            one part is asynchronous or a service.
    """

    def __init__(self, answers: _Answers, setup: Setup) -> None:
        self._answers, self._setup = answers, setup
        self._functions = [load_part(part) for part in setup.parts]
        self.concurrent = any(_is_asynchronous(function) for function in self._functions)

    def score(self, chunk: Sequence[Item]) -> None:
        """Send the outcome of every item, in order."""
        if self.concurrent:
            for index, parts in enumerate(self._score_together(chunk)):
                self._send(index, parts)
            return
        for index, item in enumerate(chunk):
            self._send(index, [_call(function, item) for function in self._functions])

    def _send(self, index: int, parts: Sequence[Outcome]) -> None:
        names, weights = zip(*((part.name, part.weight) for part in self._setup.parts), strict=True)
        outcome = combine(names, weights, parts)
        self._answers.say(DONE, index, *_encode(outcome))

    def _score_together(self, chunk: Sequence[Item]) -> list[tuple[Outcome, ...]]:
        """Synchronous parts first, one by one; then all asynchronous ones at once."""
        by_part: list[list[Outcome]] = [[] for _ in self._functions]
        for function, outcomes in zip(self._functions, by_part, strict=True):
            if not _is_asynchronous(function):
                for item in chunk:
                    outcomes.append(_call(function, item))
                    self._answers.say(PROGRESS)

        async def gather() -> None:
            waiting = [
                (
                    outcomes,
                    asyncio.create_task(_score_batch(function, chunk, self._setup.timeout_s)),
                )
                for function, outcomes in zip(self._functions, by_part, strict=True)
                if _is_asynchronous(function)
            ]
            for outcomes, task in waiting:
                outcomes.extend(await task)

        asyncio.run(gather())
        return list(zip(*by_part, strict=True))


def _is_asynchronous(function: RewardFunction | Service) -> bool:
    if isinstance(function, Service) or inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _call(function: RewardFunction | Service, item: Item) -> Outcome:
    assert not isinstance(function, Service)
    _seed(item)
    try:
        return verdict(function(**_arguments(item)))
    except (Exception, SystemExit) as error:  # a user's code: anything may come out of it
        return failure(error)


async def _score_batch(
    function: RewardFunction | Service, chunk: Sequence[Item], timeout_s: float
) -> list[Outcome]:
    if isinstance(function, Service):
        return await function.score(chunk, timeout_s)
    return await asyncio.gather(*(_await(function, item, timeout_s) for item in chunk))


async def _await(function: RewardFunction, item: Item, timeout_s: float) -> Outcome:
    timer = asyncio.timeout(timeout_s)
    try:
        async with timer:
            return verdict(await function(**_arguments(item)))
    except Exception as error:
        # A TimeoutError of the function's own is its failure, not this deadline.
        return timed_out(timeout_s) if timer.expired() else failure(error)


def timed_out(timeout_s: float) -> TimedOut:
    """The outcome of a sample whose time was over."""
    return TimedOut(f"no verdict within {timeout_s:g} s (reward.timeout_s)")


def _arguments(item: Item) -> dict[str, Any]:
    return {
        "prompt": item.prompt,
        "text": item.text,
        "reference": item.reference,
        "sample": item.sample,
    }


def _seed(item: Item) -> None:
    """A reward that draws random numbers draws the same for a sample, whichever worker has it."""
    prompt, completion = item.sample.prompt_ids, item.sample.completion_ids
    seed = zlib.crc32(completion.tobytes(), zlib.crc32(prompt.tobytes()))
    random.seed(seed)
    np.random.seed(seed)


def _encode(outcome: Outcome) -> tuple[str, Any, Any]:
    if isinstance(outcome, Score):
        return "score", outcome.value, outcome.parts
    return "timeout" if isinstance(outcome, TimedOut) else "error", outcome.reason, ()


def decode(message: Any) -> tuple[int, Any, Outcome | None]:
    """What a worker says.

    Returns:
        The kind of the message; with ``READY`` whether the worker is concurrent, with ``UNUSABLE``
        the reason, with ``DONE`` the place in the chunk; and with ``DONE`` the outcome.

    Raises:
        ValueError: it is not a message of a worker.
    """
    match message:
        case [0 | 1 as kind, detail]:
            return kind, detail, None
        case [2]:
            return PROGRESS, None, None
        case [3, int(index), "score", float(value), [*parts]]:
            return DONE, index, Score(value, tuple(parts))
        case [3, int(index), "timeout", str(reason), _]:
            return DONE, index, TimedOut(reason)
        case [3, int(index), "error", str(reason), _]:
            return DONE, index, Failed(reason)
    raise ValueError("not a message of a worker")


def _end_with_parent(lifeline: int) -> None:
    """Let the kernel end this process when the parent's end of a pipe closes, whatever runs here.

    ``PR_SET_PDEATHSIG`` would follow the thread that started the worker, not the parent.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _limit(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = held + (memory_mb << 20)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

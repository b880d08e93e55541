"""One rollout as work that connections attach to: what it has so far, and what it is known by."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from rollout_server.auth import Caller
from shared.codec import encode
from shared.errors import TitoError
from shared.protocol import MSGPACK, Group, Rollout
from shared.requests import RolloutRequest

_DELIVERY = {"stream", "have", "packed"}
"""Fields that may differ when a request is sent again: how it is answered, not what is run."""
_JOB_BYTES = 4096
_SAMPLE_BYTES = 512
"""About what each takes in memory besides arrays and text."""


class Name(NamedTuple):
    """What a job is known by.

    Attributes:
        caller: keys of different callers are different.
        key: as the caller gave it.
        fingerprint: of the request that it stands for.
    """

    caller: str
    key: str
    fingerprint: str


def name_of(caller: Caller, key: str, request: RolloutRequest) -> Name:
    """What a request with that key is known by. Takes a while for a large request."""
    content = encode(request.model_dump(exclude=_DELIVERY), MSGPACK)
    return Name(caller.name, key, hashlib.blake2b(content, digest_size=16).hexdigest())


class Job:
    """One rollout: running, finished or failed.

    Attributes:
        caller: who asked for it first.
        name: None unless the caller gave it a key.
        had: groups that the caller had before, and which are not sampled.
        heading: the answer without its groups, once sampling has begun.
        groups: finished so far, in the order in which they finished.
        missing: group ids of prompts that were not finished by the deadline.
        failure: why there is no complete answer.
        ended: nothing more comes.
        attached: how many connections wait for it.
        size: bytes that its groups take, about.
    """

    def __init__(self, caller: Caller, name: Name | None, had: Iterable[int]) -> None:
        self.caller = caller
        self.name = name
        self.had = frozenset(had)
        self.heading: Rollout | None = None
        self.groups: list[Group] = []
        self.missing: tuple[int, ...] = ()
        self.failure: TitoError | None = None
        self.ended = False
        self.attached = 0
        self.size = _JOB_BYTES
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def news(self) -> asyncio.Event:
        """Set at the next change. Take it before looking, and wait for it after."""
        return self._news

    def tell(self) -> None:
        """Wake whoever waits for news."""
        self._news.set()
        self._news = asyncio.Event()

    def begin(self, heading: Rollout) -> None:
        """Sampling begins."""
        self.heading = heading
        self.tell()

    def add(self, group: Group) -> None:
        """A group is finished."""
        self.groups.append(group)
        self.size += _size(group)
        self.tell()

    def stop(self, reason: TitoError) -> None:
        """Cancel what is still under way."""
        if self.task is not None and not self.task.done():
            self.failure = reason
            self.task.cancel()

    async def begun(self, seconds: float) -> None:
        """Wait until sampling has begun, but not longer than that.

        Raises:
            TitoError: it never will.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.heading is None and not self.ended:
                    await self.news.wait()
        if self.heading is None and self.failure is not None:
            raise self.failure

    async def result(self) -> Rollout:
        """The whole answer, with its groups in prompt order.

        Raises:
            TitoError: it could not be finished.
        """
        while not self.ended:
            await self.news.wait()
        if self.failure is not None:
            raise self.failure
        assert self.heading is not None
        groups = tuple(sorted(self.groups, key=lambda group: group.group_id))
        return replace(self.heading, groups=groups, missing=self.missing)


def _size(group: Group) -> int:
    return group.prompt_ids.nbytes + sum(
        _SAMPLE_BYTES + s.completion_ids.nbytes + s.logprobs.nbytes + sys.getsizeof(s.text)
        for s in group.samples
    )

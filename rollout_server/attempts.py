"""One attempt to publish: who makes it and how, how long its stages take, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from rollout_server.logs import event
from rollout_server.policies import Policy, Publish, PublishState
from shared import tracing
from shared.protocol import PauseMode, ReloadResult

log = logging.getLogger("tito.publishing")

Ended = Callable[[str, Publish], None]
"""Called with the policy's name and the record of a publish that has come to an end."""


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """How one publish is to be done, and by whom.

    Attributes:
        publisher: name shown in the policy's history.
        check: raises unless the publisher may write; asked before an upload is taken.
        commit: asks the same again, since a lease can be lost during an upload, and keeps the
            answer true while weights are loaded inside it.
        mode: what becomes of samples in flight.
        drain_seconds: how long ``drain`` may take.
    """

    publisher: str = "anonymous"
    check: Callable[[], None] = lambda: None
    commit: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    mode: PauseMode = PauseMode.KEEP
    drain_seconds: float = 60.0

    async def checked(self) -> None:
        """Ask ``check``, off the event loop: a lease that changes hands is waiting for the disk."""
        await asyncio.to_thread(self.check)

    @contextlib.asynccontextmanager
    async def committing(self) -> AsyncIterator[None]:
        """The context of ``commit``, entered and left off the event loop."""
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, self.commit())
            try:
                yield
            finally:
                await asyncio.to_thread(stack.close)


@contextlib.contextmanager
def stage(publish: Publish, name: str) -> Iterator[None]:
    """Time one stage of a publish."""
    start = time.perf_counter()
    try:
        with tracing.span(f"publish {name}"):
            yield
    finally:
        publish.timings[name] = time.perf_counter() - start


@contextlib.contextmanager
def attempt(policy: Policy, options: PublishOptions, ended: Ended) -> Iterator[Publish]:
    """Keep the record of one publish: whatever goes wrong, the history says why."""
    publish = policy.begin(options.publisher)
    try:
        yield publish
    except BaseException as error:
        if publish.state not in (PublishState.ROLLED_BACK, PublishState.LIVE):
            publish.state = PublishState.REJECTED
        publish.reason = str(error) or type(error).__name__
        log.warning("publish by %s %s: %s", publish.publisher, publish.state, publish.reason)
        raise
    finally:
        event(
            log,
            logging.INFO,
            "publish",
            policy=policy.name,
            version=publish.version,
            state=publish.state.value,
            publisher=publish.publisher,
            seconds=round(sum(publish.timings.values()), 3),
        )
        ended(policy.name, publish)


async def to_its_end(publish: Coroutine[Any, Any, ReloadResult]) -> ReloadResult:
    """Await a publish that goes on even if the caller is cancelled.

    A client that hangs up must leave neither torn weights nor a paused engine behind.
    """
    return await asyncio.shield(asyncio.create_task(publish))

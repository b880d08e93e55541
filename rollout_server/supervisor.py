"""Keeps an engine running: a dead one is replaced, and what waited for it runs again.

So is one that lives but must not be sampled: its weights are torn, or it does not resume. The new
engine gets the committed version, and checks it, before it serves anything. Requests that
were in flight are replayed from their start - none of their tokens had been handed out - or
answered 503 with Retry-After when their deadline is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollout_server.engine import Adapter, Completion, Engine, EngineDied, Scored
from shared.errors import EngineUnavailable
from shared.requests import SamplingSettings

log = logging.getLogger("tito.supervisor")

_WATCH_S = 0.5
_ATTEMPTS = 3
_RETRY_AFTER_S = 10.0

T = TypeVar("T")


class Supervisor:
    """Owns the engine. Not thread-safe: use it from one event loop.

    Args:
        build: constructs an engine; called in a thread, since it takes a while.
        recovery_seconds: how long a request in flight waits for a new engine.

    Attributes:
        restore: puts the committed version into a new engine.
    """

    def __init__(self, build: Callable[[], Engine], *, recovery_seconds: float) -> None:
        self._build = build
        self._recovery_seconds = recovery_seconds
        self._engine: Engine | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._given_up: asyncio.Future[None] | None = None
        self._lost: str | None = None
        self._held = False
        self._asleep: str | None = None
        self.vocab_size = 0
        self.restore: Callable[[Engine], Awaitable[None]] | None = None

    async def start(self) -> None:
        """Build the first engine, and watch it."""
        self._engine = await asyncio.to_thread(self._build)
        self._given_up = asyncio.get_running_loop().create_future()
        self.vocab_size = self._engine.vocab_size
        self._watcher = asyncio.create_task(self._watch())

    def current(self) -> Engine:
        """The running engine.

        Raises:
            EngineUnavailable: it is being replaced, or could not be.
        """
        if self._lost:
            raise EngineUnavailable(self._lost)
        if self._engine is None or self._engine.failure:
            self._recover()
            raise EngineUnavailable("the engine is restarting", retry_after=_RETRY_AFTER_S)
        if self._asleep:
            raise EngineUnavailable(self._asleep, retry_after=_RETRY_AFTER_S)
        return self._engine

    def hold(self, held: bool) -> None:
        """Keep the engine paused whoever resumes it, and its successor too; or no longer."""
        self._held = held
        if self._engine is not None:
            self._engine.held = held

    def runs(self, engine: Engine) -> bool:
        """Whether an engine has not been replaced."""
        return engine is self._engine

    def put_to_sleep(self, reason: str | None) -> None:
        """Answer that the engine is not there, with a reason, until there is none."""
        self._asleep = reason

    async def _unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """Await an engine's work; an engine that is replaced alive may never finish it."""
        assert self._given_up is not None
        task = asyncio.create_task(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._given_up}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDied("the engine is being replaced")
            return task.result()
        finally:
            task.cancel()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        n: int,
        adapter: Adapter | None = None,
    ) -> list[Completion]:
        """Sample n completions of one prompt, again on a new engine if this one dies meanwhile.

        Raises:
            EngineUnavailable: no engine came up within the recovery time.
            EngineFailure: the engine failed on this prompt, but lives.
        """
        return await self._replayed(
            lambda engine: engine.generate(prompt_ids, sampling, n, adapter)
        )

    async def score(self, ids: Sequence[int], adapter: Adapter | None = None) -> Scored:
        """Log-probabilities of given tokens; as :meth:`generate` in all else."""
        return await self._replayed(lambda engine: engine.score(ids, adapter))

    async def _replayed(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """Do work on the engine, from its start if that is replaced meanwhile."""
        try:
            async with asyncio.timeout(None) as deadline:
                while True:
                    engine = self._engine
                    try:
                        if engine is not None:
                            return await self._unless_given_up(work(engine))
                    except EngineDied:
                        log.warning("the engine died under a request, which will run again")
                    if deadline.when() is None:
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(now + self._recovery_seconds)
                    await self.replaced(engine)
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine died and was not replaced within {self._recovery_seconds} s",
                retry_after=_RETRY_AFTER_S,
            ) from None

    async def replaced(self, engine: Engine | None, why: str | None = None) -> None:
        """Wait until an engine has been replaced, and its successor holds the weights.

        Args:
            engine: it is dead, or must not be sampled.
            why: that is, unless the engine itself can tell.

        Raises:
            EngineUnavailable: that failed repeatedly; nothing is generated any more.
        """
        if engine is self._engine:  # else somebody has noticed before, and it is gone already
            self._recover(why)
        if self._recovery is not None:
            await asyncio.shield(self._recovery)
        if self._lost:
            raise EngineUnavailable(self._lost)

    async def close(self) -> None:
        """Stop watching, and stop the engine."""
        for task in (self._watcher, self._recovery):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    def _recover(self, why: str | None = None) -> None:
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._replace(why))

    async def _watch(self) -> None:
        """Notice a death even while nobody asks for anything."""
        while not self._lost:
            await asyncio.sleep(_WATCH_S)
            if self._engine is not None and self._engine.failure:
                self._recover()

    async def _replace(self, why: str | None) -> None:
        old, self._engine, self._asleep = self._engine, None, None
        why = why or f"it died: {old.failure if old else 'it never came up'}"
        log.error("the engine is replaced: %s", why)
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)
        if old is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(old.shutdown)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._engine = await self._fresh()
            except Exception as error:
                log.exception("attempt %d of %d to replace the engine failed", attempt, _ATTEMPTS)
                second = error
            else:
                self._given_up = asyncio.get_running_loop().create_future()
                self._recovery = None
                log.info("the engine was replaced")
                return
        self._lost = (
            f"the engine had to be replaced ({why}), and that failed {_ATTEMPTS} times: {second}; "
            "restart the server"
        )

    async def _fresh(self) -> Engine:
        engine = await asyncio.to_thread(self._build)
        engine.held = self._held
        try:
            if self.restore is not None:
                await self.restore(engine)
        except BaseException:
            await asyncio.to_thread(engine.shutdown)
            raise
        if engine.held and not self._held:  # let go of while the engine came up
            engine.held = False
            await engine.resume()
        return engine

"""Pauses and sleep that outlast a call, as vLLM's trainers ask for them: each has an owner.

Nobody else can end them but an admin, a publish in between does not resume what somebody else has
paused, and an engine that is replaced meanwhile comes up paused. A pause whose owner is not heard
of for a while ends by itself; sleep does not, since a trainer that uses the memory says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from rollout_server.auth import ADMIN, Caller
from rollout_server.engine import Engine, EngineDied
from rollout_server.service import Service, Startup
from rollout_server.vllm_control import control_of
from shared.errors import Conflict, EngineFailure, EngineUnavailable, InvalidRequest, Problem
from shared.protocol import PauseMode

log = logging.getLogger("tito.pauses")

WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
_ASLEEP = "the engine sleeps; POST /wake_up ends that"
_RETRY_AFTER_S = 10.0


@contextlib.contextmanager
def alive() -> Iterator[None]:
    """Say of an engine that dies under a call that another is on its way."""
    try:
        yield
    except EngineDied as error:
        raise EngineUnavailable(
            f"the engine died meanwhile and is being replaced: {error}", retry_after=_RETRY_AFTER_S
        ) from error


class Tenure:
    """What one caller has until it gives it back, or is silent for too long.

    Args:
        silence_s: how long that is.
        expire: called with the reason; takes it back if ``is_over`` still holds by then.

    Attributes:
        owner: name of the caller, if anybody has it.
        is_over: the owner was silent for too long.
    """

    def __init__(self, silence_s: float, expire: Callable[[str], Coroutine[Any, Any, None]]):
        self.owner: str | None = None
        self.is_over = False
        self._silence_s = silence_s
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None

    @property
    def ends_at(self) -> float | None:
        """When it ends if nothing is heard until then, by the event loop's clock."""
        return None if self._timer is None else self._timer.when()

    def require(self, caller: Caller, what: str) -> None:
        """Go on only if nobody else has it.

        Raises:
            Conflict: somebody has.
        """
        if self.owner not in (None, caller.name):
            raise Conflict(f"{what} by {self.owner!r}", details={"owner": self.owner})

    def keep(self, owner: str, *, for_good: bool = False) -> None:
        """The owner was heard of; for good if it need not be again."""
        self._stop()
        self.owner = owner
        if not for_good:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._silence_s, self._over)

    def end(self) -> None:
        """Nobody has it any more."""
        self._stop()
        self.owner = None

    def _stop(self) -> None:
        self.is_over = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        self.is_over = True
        reason = f"nothing was heard of {self.owner!r} for {self._silence_s} s"
        self._expiring = asyncio.get_running_loop().create_task(self._expire(reason))


@dataclass(slots=True)
class _Nap:
    """An engine that sleeps.

    Attributes:
        engine: which one.
        version: that was live when it fell asleep.
        lost: its weights are gone, not put aside.
        asleep: what of its memory is still to be woken.
    """

    engine: Engine
    version: int
    lost: bool
    asleep: set[str]


class Pauses:
    """Who has paused the engine, or put it to sleep.

    Args:
        startup: leads to the engine.
        silence_s: after which a pause ends by itself.
    """

    def __init__(self, startup: Startup, silence_s: float) -> None:
        self._startup = startup
        self._tenure = Tenure(silence_s, self._expired)
        self._nap: _Nap | None = None

    @property
    def is_paused(self) -> bool:
        """Whether somebody has paused the engine; publishes of a moment do not count."""
        return self._tenure.owner is not None

    def heard_of(self, caller: Caller) -> None:
        """A sign of life of a caller, who may have paused the engine."""
        if caller.name == self._tenure.owner and self._nap is None:
            self._tenure.keep(caller.name)

    async def pause(self, caller: Caller, mode: PauseMode) -> None:
        """Stop generating until the caller resumes.

        Raises:
            Conflict: somebody else has paused it.
        """
        async with self._turn(caller) as service:
            engine = service.supervisor.current()
            async with self._held(service, engine):
                await engine.pause(mode)
            self._tenure.keep(caller.name)

    async def resume(self, caller: Caller) -> None:
        """End the caller's pause; none is fine too.

        Raises:
            Conflict: it is somebody else's, or the engine sleeps.
        """
        async with self._turn(caller) as service:
            if self._nap and service.supervisor.runs(self._nap.engine):
                raise Conflict(_ASLEEP)
            await self._resume(service)

    async def sleep(self, caller: Caller, level: int, mode: PauseMode) -> None:
        """Stop generating and hand memory back: 1 puts weights aside, 2 drops them, 0 neither.

        Raises:
            Conflict: somebody else has paused the engine, or dropped weights could not come back.
        """
        async with self._turn(caller) as service:
            policy, lost = service.policies.default, level > 1
            if lost and not policy.files:
                raise Conflict("level 2 drops weights, and there is no checkpoint to restore")
            engine = service.supervisor.current()
            async with self._held(service, engine):
                await control_of(engine).sleep(level, mode)
            self._nap = _Nap(
                engine, policy.version, lost, {WEIGHTS, KV_CACHE} if level else {SCHEDULING}
            )
            self._tenure.keep(caller.name, for_good=True)
            if level:
                service.supervisor.put_to_sleep(_ASLEEP)

    async def wake_up(self, caller: Caller, tags: Collection[str]) -> bool:
        """Take memory again, all of it if no tags are given; generation goes on after the last.

        Weights that were dropped are those of the live version again before that.

        Raises:
            Conflict: somebody else has put the engine to sleep.
            EngineFailure: the weights did not come back; the engine was replaced.
        """
        async with self._turn(caller) as service:
            nap = self._nap
            if nap is not None and service.supervisor.runs(nap.engine):
                await self._wake(service, nap, _wanted(nap, tags))
                if nap.asleep:
                    return False
            await self._resume(service)
            return True

    async def _wake(self, service: Service, nap: _Nap, wanted: Collection[str]) -> None:
        control, policy = control_of(nap.engine), service.policies.default
        if WEIGHTS in wanted:
            await control.wake_up([WEIGHTS])
            nap.asleep.remove(WEIGHTS)
            service.supervisor.put_to_sleep(None)  # weights can be published from here on
        if KV_CACHE in wanted:
            # vLLM generates at once when this wakes, so the weights must be good by then.
            if nap.lost and policy.version == nap.version:
                await self._bring_back(service, nap.engine)
            await control.wake_up([KV_CACHE])
            nap.asleep.remove(KV_CACHE)
        if SCHEDULING in nap.asleep:
            await control.wake_up([SCHEDULING])
            nap.asleep.remove(SCHEDULING)

    async def _bring_back(self, service: Service, engine: Engine) -> None:
        try:
            await engine.load(service.policies.default.files)
        except Exception as error:
            why = f"its weights did not come back after it slept: {error}"
            await self._resume(service)
            await service.supervisor.replaced(engine, why)
            raise EngineFailure(f"the engine was replaced: {why}") from error

    @contextlib.asynccontextmanager
    async def _turn(self, caller: Caller) -> AsyncIterator[Service]:
        """Alone with the engine: no publish is being loaded, and nobody else has paused it."""
        service = self._startup.service
        async with service.publisher.applying:
            if not caller.allows(ADMIN):
                self._tenure.require(caller, "the engine was paused")
            with alive():
                yield service

    @contextlib.asynccontextmanager
    async def _held(self, service: Service, engine: Engine) -> AsyncIterator[None]:
        """Hold the engine, unless what is done inside fails."""
        was_paused = self.is_paused
        service.supervisor.hold(True)
        try:
            yield
        except BaseException:
            service.supervisor.hold(was_paused)
            with contextlib.suppress(EngineDied):
                await self._go_on(service, engine)
            raise

    async def _go_on(self, service: Service, engine: Engine) -> None:
        """Resume an engine that nobody holds any more; one that does not is replaced."""
        try:
            await engine.resume()
        except EngineDied:
            raise
        except Exception as error:
            await service.supervisor.replaced(engine, f"it does not resume after a pause: {error}")

    async def _resume(self, service: Service) -> None:
        self._nap = None
        self._tenure.end()
        service.supervisor.put_to_sleep(None)
        service.supervisor.hold(False)
        with contextlib.suppress(EngineUnavailable):  # one that comes up will not be paused
            await self._go_on(service, service.supervisor.current())

    async def _expired(self, reason: str) -> None:
        log.warning("the pause ends: %s", reason)
        service = self._startup.service
        async with service.publisher.applying:
            if self._tenure.is_over:
                with contextlib.suppress(EngineDied):
                    await self._resume(service)


def _wanted(nap: _Nap, tags: Collection[str]) -> Collection[str]:
    if unknown := set(tags) - {WEIGHTS, KV_CACHE, SCHEDULING}:
        problem = Problem("tags", ", ".join(sorted(unknown)), f"{WEIGHTS}, {KV_CACHE}")
        raise InvalidRequest("there is no such memory", problems=[problem])
    wanted = nap.asleep & set(tags) if tags else set(nap.asleep)
    if KV_CACHE in wanted and WEIGHTS in nap.asleep - wanted:
        problem = Problem("tags", KV_CACHE, f"{WEIGHTS} first, or both")
        raise InvalidRequest("the weights are still asleep", problems=[problem])
    return wanted

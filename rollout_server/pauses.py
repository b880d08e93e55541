"""Pauses and sleep that outlast a call, as vLLM's trainers ask for them: each has an owner.

Nobody else can end them but an admin, a publish in between does not resume what somebody else has
paused, and an engine that is replaced meanwhile comes up paused. A pause whose owner is not heard
of for a while ends by itself. Sleep does not, since a trainer that uses the memory says nothing,
unless it was asked for under a lease: then it ends when the lease does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass

from rollout_server.auth import ADMIN, Caller
from rollout_server.engine import Engine, EngineDied
from rollout_server.leases import Leases
from rollout_server.policies import Policies
from rollout_server.service import Service, Startup
from rollout_server.tenure import Tenure
from rollout_server.vllm_control import control_of
from shared.errors import Conflict, EngineFailure, EngineUnavailable, InvalidRequest, Problem
from shared.protocol import DEFAULT_POLICY, PauseMode

log = logging.getLogger("tito.pauses")

WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
_ASLEEP = "the engine sleeps; POST /wake_up ends that"
_RETRY_AFTER_S = 10.0
_LOOK_S = 0.5


@contextlib.contextmanager
def alive() -> Iterator[None]:
    """Say of an engine that dies under a call that another is on its way."""
    try:
        yield
    except EngineDied as error:
        raise EngineUnavailable(
            f"the engine died meanwhile and is being replaced: {error}", retry_after=_RETRY_AFTER_S
        ) from error


@dataclass(slots=True)
class _Nap:
    """An engine that sleeps.

    Attributes:
        engine: which one.
        version: that was live when it fell asleep.
        lost: its weights are gone, not put aside.
        asleep: what of its memory is still to be woken.
        fence: number of the lease with which sleep ends, if with one.
    """

    engine: Engine
    version: int
    lost: bool
    asleep: set[str]
    fence: int | None

    def is_all(self, lost: bool, fence: int | None) -> bool:
        """Whether it is just what is asked for once more, and nothing was woken since."""
        asked = ({WEIGHTS, KV_CACHE}, lost, fence)
        return (self.asleep, self.lost, self.fence) == asked


class Pauses:
    """Who has paused the engine, or put it to sleep.

    Args:
        startup: leads to the engine.
        leases: of the policies.
        silence_s: after which a pause ends by itself.
    """

    def __init__(self, startup: Startup, leases: Leases, silence_s: float) -> None:
        self._startup = startup
        self._leases = leases
        self._tenure = Tenure(silence_s, self._expired)
        self._nap: _Nap | None = None
        self._watching: asyncio.Task[None] | None = None

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
            async with self._held(service):
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

    async def sleep(
        self, caller: Caller, level: int, mode: PauseMode, fence: int | None = None
    ) -> None:
        """Stop generating and hand memory back: 1 puts weights aside, 2 drops them, 0 neither.

        Args:
            caller: becomes the owner.
            level: see above.
            mode: what becomes of samples in flight.
            fence: number of a lease of the caller's; sleep ends with it.

        Raises:
            Conflict: somebody else has paused the engine, dropped weights could not come back, or
                the lease has ended.
        """
        if level > 1:  # what is live must have a copy to come back from
            await self._startup.service.publisher.turns.settled()
        async with self._turn(caller) as service:
            if fence is not None:
                self._leases.check(DEFAULT_POLICY, fence, owner=caller.name)
            lost, nap = level > 1, self._nap
            if nap and level and service.supervisor.runs(nap.engine) and nap.is_all(lost, fence):
                return  # asked again, as vLLM allows
            if lost:
                _refuse_loss(service.policies)
            engine = service.supervisor.current()
            async with self._held(service):
                await self._fall_asleep(service, engine, level, mode)
            asleep = {WEIGHTS, KV_CACHE} if level else {SCHEDULING}
            nap = _Nap(engine, service.policies.default.version, lost, asleep, fence)
            self._nap = nap
            self._tenure.keep(caller.name, for_good=True)
            if level:
                service.supervisor.put_to_sleep(_ASLEEP)
            if fence is not None:
                self._watching = asyncio.create_task(self._end_with_lease(nap))

    async def _fall_asleep(
        self, service: Service, engine: Engine, level: int, mode: PauseMode
    ) -> None:
        try:
            await control_of(engine).sleep(level, mode)
        except EngineDied:
            raise
        except Exception as error:
            # Some of its memory may be gone already: it must not generate again.
            if level:
                await service.supervisor.replaced(engine, f"it did not fall asleep: {error}")
            raise

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
        try:
            await self._take_memory(service, nap, wanted)
        except EngineDied:
            raise
        except Exception as error:
            # Some of its memory is there and some is not: it must not generate, nor be asked again.
            why = f"it did not wake up: {error}"
            self._let_go(service)
            await service.supervisor.replaced(nap.engine, why)
            raise EngineFailure(f"the engine was replaced: {why}") from error

    async def _take_memory(self, service: Service, nap: _Nap, wanted: Collection[str]) -> None:
        control, policy = control_of(nap.engine), service.policies.default
        if WEIGHTS in wanted:
            await control.wake_up([WEIGHTS])
            nap.asleep.remove(WEIGHTS)
            service.supervisor.put_to_sleep(None)  # weights can be published from here on
        if KV_CACHE in wanted:
            # vLLM generates at once when this wakes, so the weights must be good by then.
            if nap.lost and policy.version == nap.version:
                await nap.engine.load(policy.files)
            await control.wake_up([KV_CACHE])
            nap.asleep.remove(KV_CACHE)
        if SCHEDULING in nap.asleep:
            await control.wake_up([SCHEDULING])
            nap.asleep.remove(SCHEDULING)

    async def _end_with_lease(self, nap: _Nap) -> None:
        """Wake the engine when the lease has ended under which it was put to sleep."""
        # A lease that runs out tells nobody.
        while self._nap is nap and self._is_leased(nap):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        service = self._startup.service
        async with service.publisher.applying:
            if self._nap is not nap:
                return
            log.warning("the engine wakes up: lease %s of %r ended", nap.fence, self._tenure.owner)
            try:
                if service.supervisor.runs(nap.engine):
                    await self._wake(service, nap, set(nap.asleep))
                await self._resume(service)
            except (EngineDied, EngineFailure, EngineUnavailable) as error:
                log.error("it did not: %s", error)
                self._let_go(service)

    def _is_leased(self, nap: _Nap) -> bool:
        lease = self._leases.current(DEFAULT_POLICY)
        return lease is not None and lease.fence == nap.fence

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
    async def _held(self, service: Service) -> AsyncIterator[None]:
        """Hold the engine, unless what is done inside fails."""
        was_paused = self.is_paused
        service.supervisor.hold(True)
        try:
            yield
        except BaseException:
            service.supervisor.hold(was_paused)
            with contextlib.suppress(EngineDied, EngineUnavailable):
                await self._go_on(service, service.supervisor.current())
            raise

    async def _go_on(self, service: Service, engine: Engine) -> None:
        """Resume an engine that nobody holds any more; one that does not is replaced."""
        try:
            await engine.resume()
        except EngineDied:
            raise
        except Exception as error:
            await service.supervisor.replaced(engine, f"it does not resume after a pause: {error}")

    def _let_go(self, service: Service) -> None:
        """Nobody has paused the engine any more; it stays as it is."""
        self._nap = None
        self._tenure.end()
        service.supervisor.put_to_sleep(None)
        service.supervisor.hold(False)

    async def _resume(self, service: Service) -> None:
        self._let_go(service)
        with contextlib.suppress(EngineUnavailable):  # one that comes up will not be paused
            await self._go_on(service, service.supervisor.current())

    async def _expired(self, reason: str) -> None:
        log.warning("the pause ends: %s", reason)
        service = self._startup.service
        async with service.publisher.applying:
            if self._tenure.is_over:
                with contextlib.suppress(EngineDied):
                    await self._resume(service)


def _refuse_loss(policies: Policies) -> None:
    """Raise Conflict if weights that are dropped could not come back."""
    if not (policies.default.files and policies.default.is_durable):
        raise Conflict("level 2 drops weights, and there is no checkpoint to restore")
    if adapters := [policy.name for policy in policies if policy.adapter]:
        raise Conflict(
            f"level 2 drops weights, those of LoRA policies {', '.join(adapters)} too: "
            "use level 1, or delete them"
        )


def _wanted(nap: _Nap, tags: Collection[str]) -> Collection[str]:
    if unknown := set(tags) - {WEIGHTS, KV_CACHE, SCHEDULING}:
        problem = Problem("tags", ", ".join(sorted(unknown)), f"{WEIGHTS}, {KV_CACHE}")
        raise InvalidRequest("there is no such memory", problems=[problem])
    wanted = nap.asleep & set(tags) if tags else set(nap.asleep)
    if KV_CACHE in wanted and WEIGHTS in nap.asleep - wanted:
        problem = Problem("tags", KV_CACHE, f"{WEIGHTS} first, or both")
        raise InvalidRequest("the weights are still asleep", problems=[problem])
    return wanted

"""vLLM's weight updates as publishes: received into a file, verified, loaded, stamped, or nothing.

    /start_weight_update   the caller becomes the policy's one writer, and a staging folder is made
    /update_weights        the workers receive tensors into a file there; the live model stays as is
    /finish_weight_update  the file is published like any upload: verified, loaded under a pause,
                           compared with what is live, given the next version and its digest

A trainer that fails or falls silent has changed nothing: the file is dropped and the lease given
back. Workers that hang while they receive can only be replaced; the new ones hold the last
committed version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollout_server.attempts import PublishOptions
from rollout_server.auth import Caller
from rollout_server.engine import Engine
from rollout_server.leases import Leases
from rollout_server.pauses import alive
from rollout_server.service import Service, Startup
from rollout_server.tenure import Tenure
from rollout_server.vllm_control import Control, UpdateInfo, control_of
from shared.errors import Conflict, EngineFailure, Forbidden
from shared.protocol import DEFAULT_POLICY, ReloadResult

log = logging.getLogger("tito.updates")

_FILE = "received.safetensors"
_PICKLED = "ipc_handles_pickled"
_HOLDER = "vllm-routes"


@dataclass(slots=True)
class _Update:
    """An update under way.

    Attributes:
        engine: whose workers receive it.
        folder: where they write.
        fence: number of the lease that it is published under.
        renewed: the lease was acquired for this update, and is renewed and released with it.
        busy: a call is being worked on.
        receiving: the workers still have its file open.
        ending: what is left of it is being removed.
    """

    engine: Engine
    folder: Path
    fence: int
    renewed: bool
    busy: bool = False
    receiving: bool = True
    ending: bool = False


class ForeignUpdates:
    """Takes weights from trainers that were written for ``vllm serve``; one update at a time.

    Args:
        startup: leads to the engine and its publisher.
        leases: of the policies.
        silence_s: how long a call may take, and how long a trainer may be silent between two.
    """

    def __init__(self, startup: Startup, leases: Leases, silence_s: float) -> None:
        self._startup = startup
        self._leases = leases
        self._silence_s = min(silence_s, leases.max_ttl_s)
        self._tenure = Tenure(self._silence_s, self._expired)
        self._update: _Update | None = None

    async def connect(self, caller: Caller, info: dict[str, Any]) -> None:
        """Connect the workers with a trainer, which does the same on its side meanwhile.

        Raises:
            Conflict: an update is under way, or the server was started for none.
            EngineFailure: that failed, or took too long; then the engine was replaced.
        """
        service, engine, control = self._ready()
        if self._update is not None:
            raise self._busy()
        log.info("%r connects the workers", caller.name)
        await self._within(service, engine, "connection", control.init_transfer(info))

    async def start(self, caller: Caller, fence: int | None) -> None:
        """Begin an update.

        Args:
            caller: becomes the one writer of the policy.
            fence: number of the lease that it has; without one, a lease is acquired for it.

        Raises:
            Conflict: somebody else sends weights, or holds the lease.
        """
        service, engine, control = self._ready()
        if self._update is not None:
            raise self._busy()
        self._tenure.keep(caller.name)
        folder, header_bytes = service.publisher.make_room()
        update = self._update = _Update(engine, folder, fence or 0, fence is None, busy=True)
        async with self._or_none(update):
            if fence is None:
                update.fence = await asyncio.to_thread(self._acquire, caller)
            await self._options(caller, update).checked()
            most = service.settings.max_upload_bytes
            begin = control.begin_receiving(folder / _FILE, header_bytes, most)
            await self._within(service, engine, "start", begin)

    async def receive(self, caller: Caller, info: UpdateInfo) -> None:
        """Receive the tensors that ``info`` announces, as the workers' backend does.

        Raises:
            Forbidden: it carries a pickle.
            Conflict: the caller has begun no update, or its engine was replaced.
            EngineFailure: the workers refused, or it took too long; the update has ended.
        """
        _refuse_pickles(info)
        async with self._turn(caller) as update:
            service, _, control = self._ready()
            await self._within(service, update.engine, "update", control.receive(info))

    async def finish(self, caller: Caller) -> ReloadResult:
        """Publish what has arrived.

        Raises:
            Conflict, WeightsRejected: nothing has changed; the update has ended.
            EngineFailure: the load failed; the message says what is live.
        """
        async with self._turn(caller) as update:
            service, engine, control = self._ready()
            await self._within(service, engine, "end", control.end_receiving())
            update.receiving = False
            options = self._options(caller, update)
            result = await service.publisher.publish_folder(update.folder, options=options)
        await self._end(update)
        return result

    def heard_of(self, caller: Caller) -> None:
        """A sign of life of a caller, who may be sending weights."""
        if caller.name == self._tenure.owner:
            self._tenure.keep(caller.name)

    def _ready(self) -> tuple[Service, Engine, Control]:
        service = self._startup.service
        service.check_ready()
        if service.settings.weight_transfer is None:
            raise Conflict("the server was started without --weight-transfer, e.g. nccl")
        engine = service.supervisor.current()
        return service, engine, control_of(engine)

    def _busy(self) -> Conflict:
        owner = self._tenure.owner
        return Conflict(
            f"{owner!r} is sending weights",
            retry_after=self._silence_s,
            details={"owner": owner},
        )

    def _acquire(self, caller: Caller) -> int:
        ttl, owner = self._leases.max_ttl_s, caller.name
        return self._leases.acquire(DEFAULT_POLICY, _HOLDER, ttl, owner=owner).fence

    def _options(self, caller: Caller, update: _Update) -> PublishOptions:
        claim: dict[str, Any] = {"fence": update.fence, "owner": caller.name}
        return PublishOptions(
            publisher=caller.name,
            check=partial(self._leases.check, DEFAULT_POLICY, **claim),
            commit=partial(self._leases.commit, DEFAULT_POLICY, **claim),
        )

    @contextlib.asynccontextmanager
    async def _turn(self, caller: Caller) -> AsyncIterator[_Update]:
        """One call of the caller's update, which ends if the call fails."""
        update = self._update
        if update is None or self._tenure.owner != caller.name:
            raise Conflict(f"{caller.name!r} has begun no update: POST /start_weight_update first")
        if update.busy:
            raise self._busy()
        update.busy = True
        async with self._or_none(update):
            if not self._startup.service.supervisor.runs(update.engine):
                raise Conflict("the engine was replaced, and what it had received is gone")
            if update.renewed:
                renew = partial(self._leases.renew, DEFAULT_POLICY, owner=caller.name)
                await asyncio.to_thread(renew, update.fence)
            yield update

    @contextlib.asynccontextmanager
    async def _or_none(self, update: _Update) -> AsyncIterator[None]:
        try:
            with alive():
                yield
        except BaseException as error:
            log.warning("an update of weights by %r ends: %s", self._tenure.owner, error)
            await asyncio.shield(self._end(update))
            raise
        update.busy = False
        if self._tenure.owner is not None:
            self._tenure.keep(self._tenure.owner)

    async def _within(
        self, service: Service, engine: Engine, what: str, call: Coroutine[Any, Any, None]
    ) -> None:
        """Await the workers; if that takes too long they hang, for their peer has gone."""
        try:
            async with asyncio.timeout(self._silence_s):
                await call
        except TimeoutError:
            why = f"a trainer's {what} did not end within {self._silence_s} s"
            await service.supervisor.replaced(engine, why)
            raise EngineFailure(f"{why}; the engine was replaced") from None

    async def _end(self, update: _Update) -> None:
        """Leave nothing behind of an update, finished or not."""
        if self._update is not update or update.ending:
            return
        # It is the update until nothing is left: a next one would have its file abandoned.
        update.ending = update.busy = True
        try:
            await self._clear(update, self._tenure.owner or "")
        finally:
            self._update = None
            self._tenure.end()

    async def _clear(self, update: _Update, owner: str) -> None:
        service = self._startup.service
        await service.publisher.discard(update.folder)
        if update.receiving and service.supervisor.runs(update.engine):
            with contextlib.suppress(Exception):  # one that is dying has forgotten it anyway
                await control_of(update.engine).abandon_receiving()
        if update.renewed and update.fence:
            with contextlib.suppress(Conflict, Forbidden):  # it has run out, or was revoked
                await asyncio.to_thread(
                    self._leases.release, DEFAULT_POLICY, update.fence, owner=owner
                )

    async def _expired(self, reason: str) -> None:
        update = self._update
        if update is not None and self._tenure.is_over and not update.busy:
            log.warning("an update of weights ends unfinished: %s", reason)
            await self._end(update)


def _refuse_pickles(info: UpdateInfo) -> None:
    parts = info if isinstance(info, list) else [info]
    if any(_PICKLED in part for part in parts):
        raise Forbidden(f"{_PICKLED} is a pickle, which runs whatever code its sender likes")

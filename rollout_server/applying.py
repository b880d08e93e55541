"""Making a verified checkpoint the live one: the only part of a publish that stops generation.

A load that fails is followed by a load of the last good weights, in a new engine if this one takes
them no more, before a single token is generated. When that fails too, nothing is generated again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from rollout_server.attempts import PublishOptions, stage
from rollout_server.checkpoint_file import CANONICAL_FILE
from rollout_server.checkpoints import Verified
from rollout_server.engine import Engine, EngineDied
from rollout_server.numbering import Numbering
from rollout_server.policies import Policy, Publish, PublishState
from rollout_server.spool import Spool, record_now
from rollout_server.supervisor import Supervisor
from rollout_server.upload_copies import UploadCopies
from rollout_server.worker_links import WorkerLinks
from shared import tracing
from shared.errors import Conflict, EngineFailure, EngineUnavailable, TitoError
from shared.protocol import PauseMode, ReloadResult

log = logging.getLogger("tito.publishing")

_RESUME_ATTEMPTS = 2


class WeightSwitch:
    """Switches the engine from one version of the full weights to another.

    Args:
        supervisor: runs the engine.
        policy: whose versions they are.
        spool: where versions are committed.
        base: the engine's own checkpoint.

    Attributes:
        numbers: of its versions.
    """

    def __init__(
        self, supervisor: Supervisor, policy: Policy, spool: Spool, base: Verified
    ) -> None:
        self._supervisor = supervisor
        self._policy = policy
        self._spool = spool
        self._base = base
        self.numbers = Numbering(policy, spool)
        self._copies = UploadCopies()
        self._clearing: asyncio.Task[None] | None = None

    async def apply(
        self, publish: Publish, folder: Path, verified: Verified, options: PublishOptions
    ) -> ReloadResult:
        """Copy to the devices, pause, load, check, stamp, commit, resume. One at a time.

        Args:
            publish: its record.
            folder: the staging folder that becomes the version's.
            verified: the checkpoint in it.
            options: say what becomes of samples in flight.

        Raises:
            Conflict, EngineUnavailable: nothing has changed.
            EngineFailure: the load failed; the message says what is live now.
        """
        # One engine from here on: if it is replaced meanwhile, this one raises EngineDied.
        engine, version = self._supervisor.current(), self.numbers.next()

        async with self._copies.copied(publish, engine, verified) as copies:

            async def load() -> None:
                with stage(publish, "load"):
                    await _load(engine, copies, verified, version)
                with stage(publish, "commit"):
                    files = await self._commit(publish, folder, version, verified)
                await self._policy.advance(publish, version, verified.digest, files=files)

            await self._while_paused(publish, engine, options, load)
        await self._clear(self._spool.retire(self._policy.name, version))
        return ReloadResult(version, verified.digest, publish.timings)

    async def apply_staged(
        self, publish: Publish, links: WorkerLinks, digest: str, options: PublishOptions
    ) -> None:
        """Pause, load what the workers hold already, check, stamp, resume; :meth:`settle` commits.

        Args:
            publish: its record.
            links: to the workers.
            digest: of what they hold.
            options: say what becomes of samples in flight.

        Raises:
            Conflict, EngineUnavailable: nothing has changed.
            EngineFailure: the load failed; the message says what is live now.
        """
        engine = self._supervisor.current()
        if engine is not links.engine:
            raise Conflict("the engine was replaced, and what it had received is gone")
        await self.numbers.reserve()
        version = self.numbers.next()
        publish.state = PublishState.APPLYING
        if options.mode is PauseMode.DRAIN:  # which may have to be called off
            with stage(publish, "pause"):
                await self._pause(engine, options)
        async with self._undone_if_it_fails(publish, engine):
            await self._switch(publish, links, version, digest, options.mode)
        await self._policy.advance(publish, version, digest, durable=False)

    async def _switch(
        self, publish: Publish, links: WorkerLinks, version: int, digest: str, mode: PauseMode
    ) -> None:
        # Tokens of the new version may be here before this returns.
        self._policy.announce(version, digest)
        mode = PauseMode.KEEP if mode is PauseMode.DRAIN else mode
        with tracing.span("publish switch"):
            seconds = await links.switch(mode, version)
        for name, spent in seconds.items():
            publish.timings[name] = publish.timings.get(name, 0.0) + spent

    async def settle(self, publish: Publish, links: WorkerLinks, applying: asyncio.Lock) -> None:
        """Copy to the spool what :meth:`apply_staged` has made live, while generation goes on.

        Until it returns nothing else may be loaded. A version that cannot be copied stays live,
        and a failure later on leads back to the one before. One whose bytes are not those that
        were verified does so now.
        """
        policy, version, digest = self._policy, publish.version, publish.digest
        assert version is not None
        assert digest is not None
        # What makes the publish live ends meanwhile, and is answered before the disk is busy.
        folder = await asyncio.to_thread(self._spool.stage)
        try:
            with stage(publish, "copy"):
                path = folder / CANONICAL_FILE
                await asyncio.to_thread(self._spool.recycle, path)
                found = await links.spill(path)
                if found != digest:
                    async with applying:
                        await self._withdraw(publish, links.engine, found)
                    return
                await asyncio.to_thread(self._spool.prepare, folder)
                files = await self._commit(publish, folder, version, Verified((path,), digest))
        except Exception as error:
            publish.reason = f"there is no copy of it: {error}"
            log.error("version %d is not durable: %s", version, error)
            return
        finally:
            await asyncio.to_thread(self._spool.discard, folder)
        if policy.version == version:
            policy.made_durable(version, files)
            await self._clear(self._spool.retire(policy.name, version))

    async def _withdraw(self, publish: Publish, engine: Engine, found: str) -> None:
        """Bring the last good weights back: the live ones may not be those that were verified."""
        reason = f"the trainer wrote into the buffer during a publish; its digest is now {found}"
        log.error("version %d is withdrawn: %s", self._policy.version, reason)
        await engine.pause(PauseMode.KEEP)
        await self._restored(engine, RuntimeError(reason))
        publish.reason = reason

    async def _commit(
        self, publish: Publish, folder: Path, version: int, verified: Verified
    ) -> tuple[Path, ...]:
        """Make a staging folder a version's; where its files are from then on."""
        record = record_now(version, verified.digest, self._base.digest, publish.publisher)
        target = await asyncio.to_thread(self._spool.commit, folder, self._policy.name, record)
        return tuple(target / file.name for file in verified.files)

    async def _while_paused(
        self,
        publish: Publish,
        engine: Engine,
        options: PublishOptions,
        load: Callable[[], Awaitable[None]],
    ) -> None:
        """Load while nothing is generated; if that fails, restore before anything is again."""
        publish.state = PublishState.APPLYING
        with stage(publish, "pause"):
            await self._pause(engine, options)
        async with self._undone_if_it_fails(publish, engine):
            await load()
        with stage(publish, "resume"):
            await self._resume(engine)

    @contextlib.asynccontextmanager
    async def _undone_if_it_fails(self, publish: Publish, engine: Engine) -> AsyncIterator[None]:
        """Restore the last good weights if what is inside raises, before it is told."""
        try:
            yield
        except Exception as error:
            publish.state = PublishState.ROLLED_BACK
            raise await self._restored(engine, error) from error

    async def _clear(self, retired: list[Path]) -> None:
        """Remove versions that are not kept, after the answer but before another retires."""
        if self._clearing is not None:
            await asyncio.wait({self._clearing})
        self._clearing = asyncio.create_task(asyncio.to_thread(self._spool.clear, retired))

    async def _pause(self, engine: Engine, options: PublishOptions) -> None:
        limit = options.drain_seconds if options.mode is PauseMode.DRAIN else None
        try:
            async with asyncio.timeout(limit):
                await engine.pause(options.mode)
        except TimeoutError:
            await self._resume(engine)
            raise Conflict(
                f"samples in flight did not finish within {limit} s; nothing has changed. Allow "
                "more drain_seconds, or publish with mode keep or abort"
            ) from None
        except EngineDied as error:
            raise EngineUnavailable(f"the engine died; nothing has changed: {error}") from error
        except Exception as error:
            await self._resume(engine)
            raise EngineFailure(
                f"the engine did not pause; nothing has changed: {error}"
            ) from error

    async def _resume(self, engine: Engine) -> None:
        why = None
        for _ in range(_RESUME_ATTEMPTS):
            try:
                await engine.resume()
            except EngineDied:
                break
            except Exception as error:
                why = f"it does not resume after a pause for a publish: {error}"
            else:
                return
        # The next engine comes up with the version that is committed.
        await self._supervisor.replaced(engine, why)

    async def restore(self, engine: Engine) -> None:
        """Put the committed version into an engine that holds another, and label its tokens."""
        policy = self._policy
        await policy.go_back()
        await engine.pause(PauseMode.KEEP)
        if policy.version or policy.files != self._base.files:
            await engine.load(policy.files)
        await engine.stamp(policy.version)
        await engine.resume()

    async def _restored(self, engine: Engine, error: Exception) -> TitoError:
        """Put the last good weights back; the error that the publisher should see.

        First into the engine that there is, then into a new one. If that fails too, the supervisor
        has closed: nothing is answered any more, rather than answered wrongly.
        """
        version = await self._policy.go_back()
        try:
            if isinstance(error, EngineDied):
                await self._supervisor.replaced(engine)
            elif (second := await self._restore_in_place(engine)) is not None:
                why = f"a load failed, {error}, and then the restore, {second}"
                await self._supervisor.replaced(engine, why)
        except EngineUnavailable as closed:
            return EngineFailure(
                f"the load failed, and version {version} could not be restored: {closed}"
            )
        return EngineFailure(f"the load failed: {error}; version {version} is live again")

    async def _restore_in_place(self, engine: Engine) -> Exception | None:
        """What went wrong when the live version was put back into an engine that failed a load."""
        try:
            await engine.load(self._policy.files)
            await engine.stamp(self._policy.version)
            await engine.resume()
        except Exception as error:
            return error
        return None


async def _load(
    engine: Engine, copies: WorkerLinks | None, verified: Verified, version: int
) -> None:
    """Load an upload from its copies, if there are any and they are good, else from its files."""
    if copies is not None:
        try:
            await _load_buffers(copies, version)
        except EngineFailure as error:
            log.warning("a load from copies failed, and files are loaded: %s", error)
        else:
            return
    await engine.load(verified.files)
    await engine.stamp(version)


async def _load_buffers(links: WorkerLinks, version: int) -> None:
    # Nothing is generated meanwhile, so that neither has to wait for the other.
    work = links.load(), links.engine.stamp(version)
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result

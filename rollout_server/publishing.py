"""Publishing full weights: staged, verified, applied, live - or nothing at all.

    staging -> staged -> verified -> applying -> live -> superseded
                 |           |           |
                 `-----------+- rejected `- rolled back

Upload and verification run while generation goes on. Only load, check and stamp happen under
pause, and they run to their end even if the client has gone. A failure before the load leaves
everything as it was. A failure in it restores the last good weights before a single token is
generated, if need be in a new engine; when that fails too, the service closes rather than answer
wrongly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_server import staging
from rollout_server.arrivals import CANONICAL_FILE, Arrival, CheckpointArrival, DeltaArrival
from rollout_server.checkpoints import (
    Checkpoint,
    Manifest,
    Verified,
    check_tensors,
    checkpoint_files,
    verify,
)
from rollout_server.deltas import apply_delta
from rollout_server.engine import Engine, EngineDied
from rollout_server.policies import Policies, Policy, Publish, PublishState
from rollout_server.spool import Spool, record_now
from rollout_server.supervisor import Supervisor
from shared.errors import Conflict, EngineFailure, EngineUnavailable, TitoError
from shared.protocol import PauseMode, ReloadResult
from shared.weights import encode_header

log = logging.getLogger("tito.publishing")

_RESUME_ATTEMPTS = 2
_SPARE_HEADER_BYTES = 64 << 10

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


@contextlib.contextmanager
def stage(publish: Publish, name: str) -> Iterator[None]:
    """Time one stage of a publish."""
    start = time.perf_counter()
    try:
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
        ended(policy.name, publish)


class Publisher:
    """Publishes full weights. Uploads may overlap; loads happen one at a time.

    Args:
        supervisor: runs the engine in which they are loaded.
        policies: ``default`` is whose next version they become.
        manifest: what a complete checkpoint holds.
        spool: where they are staged and committed.
        base: digest of the engine's own checkpoint, and the files it consists of.
        limits: what may be uploaded, and from where.
        slots: uploads under way, shared with the adapters'.
        applying: held while weights change, shared with the adapters' publisher.
        ended: told of every publish that has come to an end.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        policies: Policies,
        manifest: Manifest,
        spool: Spool,
        *,
        base: Verified,
        limits: staging.UploadLimits,
        slots: staging.UploadSlots,
        applying: asyncio.Lock,
        ended: Ended = lambda _, __: None,
    ) -> None:
        self._supervisor = supervisor
        self._policies = policies
        self._policy = policies.default
        self._manifest = manifest
        self._spool = spool
        self._base = base
        self._limits = limits
        self._slots = slots
        self._ended = ended
        self.applying = applying
        self._clearing: asyncio.Task[None] | None = None

    async def publish_stream(
        self,
        chunks: AsyncIterator[bytes],
        *,
        announced: str | None,
        trailer: bool,
        options: PublishOptions,
    ) -> ReloadResult:
        """Publish a safetensors file that arrives in pieces.

        Args:
            chunks: the file, followed by its digest as 32 hex characters if ``trailer``.
            announced: the digest, if it was known beforehand.
            options: see there.

        Raises:
            MalformedBody, BodyTooLarge, WeightsRejected, InsufficientStorage, Conflict, Overloaded:
                nothing has changed.
            EngineFailure: the load failed; the message says what is live now.
        """

        def begin(folder: Path) -> Arrival:
            return CheckpointArrival(
                folder,
                self._manifest,
                announced=announced,
                trailer=trailer,
                max_bytes=self._limits.max_bytes,
            )

        return await self._upload(chunks, begin, options)

    async def publish_delta(
        self, chunks: AsyncIterator[bytes], *, options: PublishOptions
    ) -> ReloadResult:
        """Publish the difference to the live version.

        Raises:
            Conflict: it was made from another version; ``details`` has the live one.
        """

        def begin(folder: Path) -> Arrival:
            return DeltaArrival(folder / "sent.delta", self._require_live, self._apply_delta)

        return await self._upload(chunks, begin, options)

    def _apply_delta(self, delta: Path, base: str) -> Verified:
        out = delta.with_name(CANONICAL_FILE)
        with Checkpoint(self._policy.files) as live:
            digest = apply_delta(delta, live, self._manifest, out)
        delta.unlink()
        return Verified((out,), digest, base)

    async def publish_path(
        self, path: Path, *, announced: str | None, options: PublishOptions
    ) -> ReloadResult:
        """Publish a checkpoint from a directory that the operator allowed.

        Raises:
            Forbidden: the path, links resolved, is outside every allowed directory.
            InvalidRequest: there is no checkpoint.
        """
        files = await asyncio.to_thread(staging.find_checkpoint, path, self._limits)
        return await self._from_files(files, announced, options)

    def make_room(self) -> tuple[Path, int]:
        """A staging folder for :meth:`publish_folder`, and how long a header in it may be."""
        # Other dtypes than those served, and tied tensors, take some more.
        header = len(encode_header(self._manifest.required.values()))
        return self._spool.stage(), 2 * header + _SPARE_HEADER_BYTES

    async def discard(self, folder: Path) -> None:
        """Remove a staging folder that will not be published, if it is still there."""
        await asyncio.to_thread(self._spool.discard, folder)

    async def publish_folder(self, folder: Path, *, options: PublishOptions) -> ReloadResult:
        """Publish a checkpoint that lies in a staging folder of the spool; the folder is used up.

        Raises:
            WeightsRejected, Conflict: nothing has changed.
            EngineFailure: the load failed; the message says what is live now.
        """
        with attempt(self._policy, options, self._ended) as publish:
            return await to_its_end(
                self._publish(publish, folder, lambda: self._verify_copies(folder, None), options)
            )

    async def reset(self, options: PublishOptions) -> ReloadResult:
        """Publish the engine's own checkpoint again, as a new version."""
        if not self._base.files:
            raise Conflict("the engine was started without a checkpoint; there is no base")
        return await self._from_files(list(self._base.files), None, options)

    async def _upload(
        self,
        chunks: AsyncIterator[bytes],
        begin: Callable[[Path], Arrival],
        options: PublishOptions,
    ) -> ReloadResult:
        options.check()
        with attempt(self._policy, options, self._ended) as publish, self._slots.taken():
            folder = self._spool.stage()
            try:
                arrival = begin(folder)
                with stage(publish, "upload"), contextlib.ExitStack() as on_failure:
                    on_failure.callback(arrival.close)
                    await staging.hand_on(chunks, arrival.take, self._limits.max_bytes)
                    on_failure.pop_all()
            except BaseException:
                await asyncio.to_thread(self._spool.discard, folder)
                raise

            def check() -> Verified:
                with contextlib.closing(arrival):
                    return arrival.verified()

            return await to_its_end(self._publish(publish, folder, check, options))

    async def _from_files(
        self, files: list[Path], announced: str | None, options: PublishOptions
    ) -> ReloadResult:
        options.check()
        with attempt(self._policy, options, self._ended) as publish, self._slots.taken():
            folder = self._spool.stage()

            def check() -> Verified:
                staging.copy_in(files, folder)
                return self._verify_copies(folder, announced)

            return await to_its_end(self._publish(publish, folder, check, options))

    def _verify_copies(self, folder: Path, announced: str | None) -> Verified:
        files = checkpoint_files(folder)
        with Checkpoint(files) as sent:
            checks = check_tensors(sent, self._manifest)
            verified = verify(sent, self._manifest, announced, folder / CANONICAL_FILE, checks)
        for superseded in set(files) - set(verified.files):
            superseded.unlink()
        return verified

    def _require_live(self, digest: str) -> None:
        live = self._policy
        if digest != live.digest:
            raise Conflict(
                f"the delta was made from {digest}, but version {live.version} is {live.digest}",
                details={"version": live.version, "digest": live.digest},
            )

    async def _publish(
        self,
        publish: Publish,
        folder: Path,
        check: Callable[[], Verified],
        options: PublishOptions,
    ) -> ReloadResult:
        try:
            publish.state = PublishState.STAGED
            with stage(publish, "verify"), staging.storage_errors():
                verified = await asyncio.to_thread(check)
                await asyncio.to_thread(self._spool.prepare, folder)
            publish.state, publish.digest = PublishState.VERIFIED, verified.digest
            async with self.applying:
                with options.commit():
                    self._check_applicable(verified)
                    return await self._apply(publish, folder, verified, options)
        finally:
            await asyncio.to_thread(self._spool.discard, folder)

    def _check_applicable(self, verified: Verified) -> None:
        """Ask again, now that nobody else can publish, what was true when the upload began."""
        self._supervisor.current()
        if verified.base is not None:
            self._require_live(verified.base)
        if adapters := [policy.name for policy in self._policies if policy.adapter]:
            raise Conflict(
                f"LoRA policies {', '.join(adapters)} belong to the weights that are live; "
                "delete them before other full weights are published"
            )

    async def _apply(
        self, publish: Publish, folder: Path, verified: Verified, options: PublishOptions
    ) -> ReloadResult:
        policy, publish.state = self._policy, PublishState.APPLYING
        version = max(policy.version, self._spool.newest_number(policy.name)) + 1
        # One engine from here on: if it is replaced meanwhile, this one raises EngineDied.
        engine = self._supervisor.current()
        with stage(publish, "pause"):
            await _pause(engine, options)
        try:
            with stage(publish, "load"):
                await engine.load(verified.files)
                await engine.stamp(version)
            with stage(publish, "commit"):
                record = record_now(version, verified.digest, self._base.digest, publish.publisher)
                target = self._spool.commit(folder, policy.name, record)
        except Exception as error:
            publish.state = PublishState.ROLLED_BACK
            raise await self._restored(engine, error) from error
        files = tuple(target / file.name for file in verified.files)
        await policy.advance(publish, version, verified.digest, files=files)
        with stage(publish, "resume"):
            await self._resume(engine)
        await self._clear(self._spool.retire(policy.name, version))
        return ReloadResult(version, verified.digest, publish.timings)

    async def _clear(self, retired: list[Path]) -> None:
        """Remove versions that are not kept, after the answer but before another retires."""
        if self._clearing is not None:
            await asyncio.wait({self._clearing})
        self._clearing = asyncio.create_task(asyncio.to_thread(self._spool.clear, retired))

    async def _resume(self, engine: Engine) -> None:
        why = None
        for _ in range(_RESUME_ATTEMPTS):
            try:
                await engine.resume()
            except EngineDied:
                break
            except Exception as error:
                why = f"it does not resume after a publish: {error}"
            else:
                return
        # The version is committed, so the next engine comes up with it.
        await self._supervisor.replaced(engine, why)

    async def restore(self, engine: Engine) -> None:
        """Put the committed version into an engine that holds another, and label its tokens."""
        policy = self._policy
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
        version = self._policy.version
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


async def _pause(engine: Engine, options: PublishOptions) -> None:
    limit = options.drain_seconds if options.mode is PauseMode.DRAIN else None
    try:
        async with asyncio.timeout(limit):
            await engine.pause(options.mode)
    except TimeoutError:
        await engine.resume()
        raise Conflict(
            f"samples in flight did not finish within {limit} s; nothing has changed. Allow more "
            "drain_seconds, or publish with mode keep or abort"
        ) from None
    except EngineDied as error:
        raise EngineUnavailable(f"the engine died; nothing has changed: {error}") from error
    except Exception as error:
        await engine.resume()
        raise EngineFailure(f"the engine did not pause; nothing has changed: {error}") from error


async def to_its_end(publish: Coroutine[Any, Any, ReloadResult]) -> ReloadResult:
    """Await a publish that goes on even if the caller is cancelled.

    A client that hangs up must leave neither torn weights nor a paused engine behind.
    """
    return await asyncio.shield(asyncio.create_task(publish))

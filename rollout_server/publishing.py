"""Publishing full weights: staged, verified, applied, live - or nothing at all.

    staging -> staged -> verified -> applying -> live -> superseded
                 |           |           |
                 `-----------+- rejected `- rolled back

Upload and verification run while generation goes on. Only load, check and stamp happen under
pause, and they run to their end even if the client has gone. A failure before the load leaves
everything as it was. A failure in it restores the last good weights before a single token is
generated; when that fails too, the publisher closes and the service stops answering rather than
answer wrongly.
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
from rollout_server.checkpoints import Checkpoint, Manifest, Verified, checkpoint_files, verify
from rollout_server.deltas import apply_delta, read_base
from rollout_server.engine import Engine, EngineDied
from rollout_server.policies import Policies, Policy, Publish, PublishState
from rollout_server.spool import Spool, record_now
from rollout_server.supervisor import Supervisor
from shared.errors import Conflict, EngineFailure, EngineUnavailable, TitoError
from shared.protocol import PauseMode, ReloadResult

log = logging.getLogger("tito.publishing")

_RESUME_ATTEMPTS = 2

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
        if publish.state is not PublishState.ROLLED_BACK:
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
        self.closed: str | None = None
        self._supervisor = supervisor
        self._policies = policies
        self._policy = policies.default
        self._manifest = manifest
        self._spool = spool
        self._base = base
        self._limits = limits
        self._slots = slots
        self._ended = ended
        self._applying = applying

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

        def check(folder: Path) -> Verified:
            (sent,) = checkpoint_files(folder)
            return self._verify(folder, staging.cut_trailer(sent) if trailer else announced)

        return await self._upload(chunks, "sent.safetensors", check, options)

    async def publish_delta(
        self, chunks: AsyncIterator[bytes], *, options: PublishOptions
    ) -> ReloadResult:
        """Publish the difference to the live version.

        Raises:
            Conflict: it was made from another version; ``details`` has the live one.
        """

        def check(folder: Path) -> Verified:
            delta, out = folder / "sent.delta", folder / "canonical.safetensors"
            base = read_base(delta)
            self._require_live(base)
            with Checkpoint(self._policy.files) as live, staging.storage_errors():
                digest = apply_delta(delta, live, self._manifest, out)
            delta.unlink()
            return Verified((out,), digest, base)

        return await self._upload(chunks, "sent.delta", check, options)

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

    async def reset(self, options: PublishOptions) -> ReloadResult:
        """Publish the engine's own checkpoint again, as a new version."""
        if not self._base.files:
            raise Conflict("the engine was started without a checkpoint; there is no base")
        return await self._from_files(list(self._base.files), None, options)

    async def _upload(
        self,
        chunks: AsyncIterator[bytes],
        name: str,
        check: Callable[[Path], Verified],
        options: PublishOptions,
    ) -> ReloadResult:
        options.check()
        with attempt(self._policy, options, self._ended) as publish, self._slots.taken():
            folder = self._spool.stage()
            try:
                with stage(publish, "upload"):
                    await staging.receive(chunks, folder / name, self._limits.max_bytes)
            except BaseException:
                self._spool.discard(folder)
                raise
            return await to_its_end(self._publish(publish, folder, check, options))

    async def _from_files(
        self, files: list[Path], announced: str | None, options: PublishOptions
    ) -> ReloadResult:
        options.check()
        with attempt(self._policy, options, self._ended) as publish, self._slots.taken():
            folder = self._spool.stage()

            def check(folder: Path) -> Verified:
                staging.copy_in(files, folder)
                return self._verify(folder, announced)

            return await to_its_end(self._publish(publish, folder, check, options))

    def _verify(self, folder: Path, announced: str | None) -> Verified:
        files = checkpoint_files(folder)
        with Checkpoint(files) as sent, staging.storage_errors():
            verified = verify(sent, self._manifest, announced, folder / "canonical.safetensors")
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
        check: Callable[[Path], Verified],
        options: PublishOptions,
    ) -> ReloadResult:
        try:
            publish.state = PublishState.STAGED
            with stage(publish, "verify"):
                verified = await asyncio.to_thread(check, folder)
                await asyncio.to_thread(self._spool.prepare, folder)
            publish.state, publish.digest = PublishState.VERIFIED, verified.digest
            async with self._applying:
                with options.commit():
                    self._check_applicable(verified)
                    return await self._apply(publish, folder, verified, options)
        finally:
            self._spool.discard(folder)

    def _check_applicable(self, verified: Verified) -> None:
        """Ask again, now that nobody else can publish, what was true when the upload began."""
        if self.closed:
            raise EngineUnavailable(self.closed)
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
        await asyncio.to_thread(self._spool.retire, policy.name, version)
        return ReloadResult(version, verified.digest, publish.timings)

    async def _resume(self, engine: Engine) -> None:
        for _ in range(_RESUME_ATTEMPTS):
            try:
                return await engine.resume()
            except EngineDied:
                # The version is committed, so the next engine comes up with it.
                return await self._supervisor.replaced(engine)
            except Exception as error:
                reason = f"the engine does not resume after a publish: {error}; restart the server"
        self.closed = reason
        self._supervisor.close_for(reason)
        raise EngineUnavailable(reason)

    async def restore(self, engine: Engine) -> None:
        """Put the committed version into an engine that holds another, and label its tokens."""
        policy = self._policy
        await engine.pause(PauseMode.KEEP)
        if policy.version or policy.files != self._base.files:
            await engine.load(policy.files)
        await engine.stamp(policy.version)
        await engine.resume()

    async def _restored(self, engine: Engine, error: Exception) -> TitoError:
        """Put the last good weights back, or close; the error that the publisher should see."""
        version = self._policy.version
        try:
            if isinstance(error, EngineDied):
                await self._supervisor.replaced(engine)
            else:
                await engine.load(self._policy.files)
                await engine.stamp(version)
                await engine.resume()
        except Exception as second:
            self.closed = (
                f"a load failed ({error}) and version {version} could not be restored ({second}); "
                "restart the server"
            )
            self._supervisor.close_for(self.closed)
            return EngineFailure(self.closed)
        return EngineFailure(f"the load failed: {error}; version {version} is live again")


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

"""Publishing full weights: staged, verified, applied, live - or nothing at all.

    staging -> staged -> verified -> applying -> live -> superseded
                 |           |           |
                 `-----------+- rejected `- rolled back

Upload and verification run while generation goes on, and so does a copy to the GPUs where there is
room for one. Only load, check and stamp happen under pause, and they run to their end even if the
client has gone. A failure before the load leaves everything as it was. A failure in it restores the
last good weights before a single token is generated, if need be in a new engine; when that fails
too, the service closes rather than answer wrongly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rollout_server import staging
from rollout_server.applying import WeightSwitch
from rollout_server.arrivals import (
    SENT_FILE,
    Arrival,
    CheckpointArrival,
    DeltaArrival,
)
from rollout_server.attempts import Ended, PublishOptions, attempt, stage, to_its_end
from rollout_server.channel_publishing import ChannelPublisher, Turns
from rollout_server.checkpoint_file import CANONICAL_FILE, CheckpointFile
from rollout_server.checkpoints import (
    Checkpoint,
    Manifest,
    Verified,
    check_tensors,
    checkpoint_files,
    verify,
)
from rollout_server.deltas import apply_delta
from rollout_server.policies import Policies, Publish, PublishState
from rollout_server.sinks import Pour
from rollout_server.spool import Spool
from rollout_server.supervisor import Supervisor
from shared.errors import Conflict, TitoError
from shared.protocol import ReloadResult
from shared.weights import encode_header

_SPARE_HEADER_BYTES = 64 << 10


class _Closable(Protocol):
    def close(self) -> None: ...


A = TypeVar("A", bound=_Closable)


async def _poured(pour: Pour, arrival: Arrival) -> Callable[[], Verified]:
    await pour(arrival)
    return arrival.verified


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

    Attributes:
        applying, manifest: see above.
        turns: who loads weights.
        by_channel: publishes what comes into the workers' memory.
        restore: puts the committed version into an engine that holds another.
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
        self.manifest = manifest
        self._spool = spool
        self._base = base
        self._limits = limits
        self._slots = slots
        self._ended = ended
        self.applying = applying
        self.turns = Turns(applying)
        self._switch = WeightSwitch(supervisor, policies.default, spool, base)
        self.by_channel = ChannelPublisher(
            policies.default, self._switch, self.turns, lambda: self._check_applicable(None), ended
        )
        self.restore = self._switch.restore

    async def publish_stream(
        self,
        pour: Pour,
        *,
        announced: str | None,
        trailer: bool,
        options: PublishOptions,
    ) -> ReloadResult:
        """Publish a safetensors file that is uploaded.

        Args:
            pour: brings the file, followed by its digest as 32 hex characters if ``trailer``.
            announced: the digest, if it was known beforehand.
            options: see there.

        Raises:
            MalformedBody, BodyTooLarge, WeightsRejected, InsufficientStorage, Conflict, Overloaded:
                nothing has changed.
            EngineFailure: the load failed; the message says what is live now.
        """

        def begin(folder: Path) -> CheckpointArrival:
            return CheckpointArrival(
                folder / SENT_FILE,
                self._spool.open_over,
                self.manifest,
                announced=announced,
                trailer=trailer,
                max_bytes=self._limits.max_bytes,
            )

        return await self._upload(begin, partial(_poured, pour), options)

    async def publish_parts(
        self,
        head: bytes,
        brought: Callable[[CheckpointFile], Awaitable[str | None]],
        *,
        options: PublishOptions,
    ) -> ReloadResult:
        """Publish a safetensors file that comes in parts.

        Args:
            head: its first bytes, to the end of its header.
            brought: waits until all of the rest is there; the digest, if the sender tells it.

        Raises:
            TitoError: as :meth:`publish_stream` does.
        """

        def begin(folder: Path) -> CheckpointFile:
            open_file, most = self._spool.open_over, self._limits.max_bytes
            return CheckpointFile(folder / SENT_FILE, open_file, self.manifest, head, most)

        async def bring(file: CheckpointFile) -> Callable[[], Verified]:
            return partial(file.verified, await brought(file))

        return await self._upload(begin, bring, options)

    async def publish_delta(self, pour: Pour, *, options: PublishOptions) -> ReloadResult:
        """Publish the difference to the live version.

        Raises:
            Conflict: it was made from another version; ``details`` has the live one.
        """

        def begin(folder: Path) -> DeltaArrival:
            file = folder / "sent.delta"
            return DeltaArrival(file, self._limits, self._require_live, self._apply_delta)

        return await self._upload(begin, partial(_poured, pour), options)

    def _apply_delta(self, delta: Path, base: str) -> Verified:
        out = delta.with_name(CANONICAL_FILE)
        self._spool.recycle(out)
        try:
            with self._spool.reading(), Checkpoint(self._policy.files) as live:
                digest = apply_delta(delta, live, self.manifest, out)
        except TitoError:
            self._require_live(base)  # else its file may have been written over meanwhile
            raise
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
        """A staging folder for :meth:`publish_folder`, and how long a header in it may be.

        Raises:
            InsufficientStorage: there is no room for a folder.
        """
        # Other dtypes than those served, and tied tensors, take some more.
        header = len(encode_header(self.manifest.required.values()))
        with staging.storage_errors():
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
        begin: Callable[[Path], A],
        bring: Callable[[A], Awaitable[Callable[[], Verified]]],
        options: PublishOptions,
    ) -> ReloadResult:
        """Publish what comes into a staging folder.

        Args:
            begin: makes room for it there.
            bring: waits until it is there; what it returns says what it is.
        """
        await options.checked()
        with attempt(self._policy, options, self._ended) as publish, self._slots.taken():
            with staging.storage_errors():
                folder = self._spool.stage()
            try:
                with staging.storage_errors():
                    arrival = begin(folder)
                with stage(publish, "upload"), contextlib.ExitStack() as on_failure:
                    on_failure.callback(arrival.close)
                    with staging.storage_errors():
                        verified = await bring(arrival)
                    on_failure.pop_all()
            except BaseException:
                await asyncio.to_thread(self._spool.discard, folder)
                raise

            def check() -> Verified:
                with contextlib.closing(arrival):
                    return verified()

            return await to_its_end(self._publish(publish, folder, check, options))

    async def _from_files(
        self, files: list[Path], announced: str | None, options: PublishOptions
    ) -> ReloadResult:
        await options.checked()
        with attempt(self._policy, options, self._ended) as publish, self._slots.taken():
            with staging.storage_errors():
                folder = self._spool.stage()

            def check() -> Verified:
                staging.copy_in(files, folder)
                return self._verify_copies(folder, announced)

            return await to_its_end(self._publish(publish, folder, check, options))

    def _verify_copies(self, folder: Path, announced: str | None) -> Verified:
        files = checkpoint_files(folder)
        with Checkpoint(files) as sent:
            checks = check_tensors(sent, self.manifest)
            verified = verify(sent, self.manifest, announced, folder / CANONICAL_FILE, checks)
        for superseded in set(files) - set(verified.files):
            superseded.unlink()
        return verified

    def _require_live(self, digest: str) -> None:
        live = self._policy
        if digest == live.digest and not live.is_durable:
            raise Conflict(
                f"there is no copy of version {live.version} to which a delta could be applied",
                details={"version": live.version, "digest": live.digest},
            )
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
            await self.turns.settled()  # a delta is applied to the file of what is live
            with stage(publish, "verify"), staging.storage_errors():
                verified = await asyncio.to_thread(check)
                await asyncio.to_thread(self._spool.prepare, folder)
            publish.state, publish.digest = PublishState.VERIFIED, verified.digest
            async with self.turns.taken(options):
                self._check_applicable(verified.base)
                return await self._switch.apply(publish, folder, verified, options)
        finally:
            await asyncio.to_thread(self._spool.discard, folder)

    def _check_applicable(self, base: str | None) -> None:
        """Ask again, now that nobody else can publish, what was true when the upload began."""
        self._supervisor.current()
        if base is not None:
            self._require_live(base)
        if adapters := [policy.name for policy in self._policies if policy.adapter]:
            raise Conflict(
                f"LoRA policies {', '.join(adapters)} belong to the weights that are live; "
                "delete them before other full weights are published"
            )

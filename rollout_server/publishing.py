"""Publishing weights: staged, verified, applied, live - or nothing at all.

Upload and verification run while generation goes on. Only the load and the stamp happen under
pause, and they run to their end even if the client has gone. When the load fails, the last good
weights are restored before a single token is generated; when that fails too, the publisher closes
and the service stops answering rather than answer wrongly.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

from rollout_server.checkpoints import Checkpoint, Manifest, Verified, checkpoint_files, verify
from rollout_server.engine import Engine
from rollout_server.policies import Policy
from shared.errors import (
    BodyTooLarge,
    EngineFailure,
    EngineUnavailable,
    Forbidden,
    InvalidRequest,
    MalformedBody,
    Problem,
)
from shared.protocol import ReloadResult
from shared.weights import TRAILER_BYTES

_WRITE_BYTES = 4 << 20


class Timings:
    """Seconds spent in each named stage, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start


class Publisher:
    """Takes checkpoints for one policy. Uploads may overlap; loads happen one at a time.

    Args:
        engine: where they are loaded.
        policy: whose next version they become.
        manifest: what a complete checkpoint holds.
        staging_dir: exists, and belongs to this publisher alone.
        allowed_dirs: resolved directories from which paths may be read.
        max_bytes: largest upload.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        manifest: Manifest,
        *,
        staging_dir: Path,
        allowed_dirs: list[Path],
        max_bytes: int,
    ) -> None:
        self.policy = policy
        self.closed: str | None = None
        self._engine = engine
        self._manifest = manifest
        self._staging_dir = staging_dir
        self._allowed_dirs = allowed_dirs
        self._max_bytes = max_bytes
        self._applying = asyncio.Lock()
        self._serial = itertools.count()

    async def publish_stream(
        self, chunks: AsyncIterator[bytes], *, announced: str | None, trailer: bool
    ) -> ReloadResult:
        """Publish a safetensors file that arrives in pieces.

        Args:
            chunks: the file, followed by its digest as 32 hex characters if ``trailer``.
            announced: the digest, if it was known beforehand.

        Raises:
            MalformedBody, BodyTooLarge, WeightsRejected: nothing has changed.
            EngineFailure: the load failed; the message says what is live now.
        """
        timings, folder = Timings(), self._new_folder()
        sent = folder / "sent.safetensors"
        try:
            with timings.stage("upload"):
                await self._receive(chunks, sent)
        except BaseException:
            shutil.rmtree(folder)
            raise
        return await _to_its_end(self._publish(folder, announced, trailer, timings))

    async def publish_path(self, path: Path, *, announced: str | None) -> ReloadResult:
        """Publish a checkpoint from a directory that the operator allowed.

        Raises:
            Forbidden: the path, links resolved, is outside every allowed directory.
            InvalidRequest: there is no checkpoint.
        """
        timings = Timings()
        files = await asyncio.to_thread(self._find, path)
        folder = self._new_folder()
        with timings.stage("upload"):
            # The owner may overwrite these files at any time, and a restore will need them.
            await asyncio.to_thread(_copy, files, folder)
        return await _to_its_end(self._publish(folder, announced, False, timings))

    def _new_folder(self) -> Path:
        folder = self._staging_dir / f"{next(self._serial):08d}"
        folder.mkdir()
        return folder

    async def _receive(self, chunks: AsyncIterator[bytes], path: Path) -> None:
        received, pending = 0, bytearray()
        with path.open("wb", buffering=0) as file:
            async for chunk in chunks:
                received += len(chunk)
                if received > self._max_bytes:
                    raise BodyTooLarge(f"the upload exceeds {self._max_bytes} bytes")
                pending += chunk
                if len(pending) >= _WRITE_BYTES:
                    await asyncio.to_thread(file.write, pending)
                    pending = bytearray()
            await asyncio.to_thread(file.write, pending)

    def _find(self, path: Path) -> list[Path]:
        files = [file.resolve() for file in checkpoint_files(path.resolve())]
        for file in files or [path.resolve()]:
            if not any(file.is_relative_to(allowed) for allowed in self._allowed_dirs):
                allowed = ", ".join(map(str, self._allowed_dirs)) or "none (see --reload-dirs)"
                raise Forbidden(f"{path} is outside the directories allowed: {allowed}")
        if not files:
            problem = Problem("path", str(path), "a .safetensors file or a directory of them")
            raise InvalidRequest("there is no checkpoint", problems=[problem])
        return files

    async def _publish(
        self, folder: Path, announced: str | None, trailer: bool, timings: Timings
    ) -> ReloadResult:
        try:
            with timings.stage("verify"):
                verified = await asyncio.to_thread(self._verify, folder, announced, trailer)
            return await self._apply(verified, timings)
        finally:
            if folder not in {file.parent for file in self.policy.files}:
                shutil.rmtree(folder)

    def _verify(self, folder: Path, announced: str | None, trailer: bool) -> Verified:
        files = checkpoint_files(folder)
        if trailer:
            announced = _cut_trailer(files[0])
        with Checkpoint(files) as sent:
            verified = verify(sent, self._manifest, announced, folder / "canonical.safetensors")
        for superseded in set(files) - set(verified.files):
            superseded.unlink()
        return verified

    async def _apply(self, verified: Verified, timings: Timings) -> ReloadResult:
        async with self._applying:
            if self.closed:
                raise EngineUnavailable(self.closed)
            with timings.stage("pause"):
                await self._engine.pause()
            try:
                with timings.stage("load"):
                    await self._engine.load(verified.files)
                    await self._engine.stamp(self.policy.version + 1)
            except Exception as error:
                raise await self._restored(error) from error
            previous = self.policy.files
            self.policy.advance(verified.files, verified.digest)
            with timings.stage("resume"):
                await self._engine.resume()
            self._forget(previous)
            return ReloadResult(self.policy.version, self.policy.digest, timings.seconds)

    async def _restored(self, error: Exception) -> EngineFailure:
        """Put the last good weights back, or close; the error that the publisher should see."""
        version = self.policy.version
        try:
            await self._engine.load(self.policy.files)
            await self._engine.stamp(version)
            await self._engine.resume()
        except Exception as second:
            self.closed = (
                f"a load failed ({error}) and version {version} could not be restored ({second}); "
                "restart the server"
            )
            return EngineFailure(self.closed)
        return EngineFailure(f"the load failed: {error}; version {version} is live again")

    def _forget(self, files: tuple[Path, ...]) -> None:
        for folder in {file.parent for file in files}:
            if folder.parent == self._staging_dir:
                shutil.rmtree(folder)


async def _to_its_end(publish: Coroutine[Any, Any, ReloadResult]) -> ReloadResult:
    # A client that hangs up must leave neither torn weights nor a paused engine behind.
    return await asyncio.shield(asyncio.create_task(publish))


def _copy(files: list[Path], folder: Path) -> None:
    for index, file in enumerate(files):
        shutil.copyfile(file, folder / f"sent-{index:05d}.safetensors")


def _cut_trailer(path: Path) -> str:
    """Remove the digest that follows a safetensors file, and return it."""
    with path.open("r+b") as file:
        size = file.seek(0, 2) - TRAILER_BYTES
        file.seek(max(size, 0))
        trailer = file.read()
        file.truncate(max(size, 0))
    if len(trailer) < TRAILER_BYTES or not trailer.isalnum():
        raise MalformedBody("the upload does not end with a digest of 32 hex characters")
    return trailer.decode()

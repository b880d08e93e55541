"""Checkpoints that come in several requests at once: one connection is slower than memory.

    begin -> runs of tensors, side by side, again if one broke off -> finish -> published, or not
      `-> given up: by its sender, by a later writer, or because nothing came any more

From its beginning to its end each is one publish, with one record in the policy's history.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from typing import Any

from rollout_server import staging
from rollout_server.attempts import PublishOptions
from rollout_server.checkpoint_file import CheckpointFile
from rollout_server.publishing import Publisher
from rollout_server.sinks import Pour
from shared.errors import (
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    MalformedBody,
    NotFound,
    Overloaded,
    Problem,
    TitoError,
)
from shared.protocol import ReloadResult

MAX_PARTS = max(2, min(8, os.cpu_count() or 1))
"""Requests that bring one upload at a time; each keeps a thread busy."""
_PART_RETRY_S = 1.0
_MISSING_SHOWN = 5


class PartedUpload:
    """One of them.

    Args:
        owner: name of the caller whose it is.
        options: how it will be published.
        idle: seconds for which nothing may be under way.

    Attributes:
        id: a name that nobody can guess.
        owner, options: see above.
        begun: done when parts may come.
        publishing: its publish; set by whoever begins it.
    """

    publishing: asyncio.Task[ReloadResult]

    def __init__(self, owner: str, options: PublishOptions, idle: float) -> None:
        loop = asyncio.get_running_loop()
        self.id, self.owner, self.options = secrets.token_hex(16), owner, options
        self.begun: asyncio.Future[CheckpointFile] = loop.create_future()
        self._all_here: asyncio.Future[str | None] = loop.create_future()
        self._runs: set[asyncio.Future[None]] = set()
        self._idle = idle
        self._rest()

    @property
    def _file(self) -> CheckpointFile:
        return self.begun.result()

    async def brought(self, file: CheckpointFile) -> str | None:
        """Wait until all of it is there, or it has ended, and nobody writes to it any more.

        Returns:
            Its digest, if the sender tells.

        Raises:
            TitoError: it was given up.
        """
        self.begun.set_result(file)
        try:
            return await self._all_here
        finally:
            self._timer.cancel()
            for run in self._runs:
                run.cancel()
            if self._runs:
                await asyncio.wait(self._runs)

    async def take(self, start: int, nbytes: int, pour: Pour) -> int:
        """Bring in the tensors that begin at ``start`` and have so many bytes.

        Args:
            pour: brings their bytes.

        Returns:
            Bytes of tensors that are still missing.

        Raises:
            InvalidRequest, MalformedBody, InsufficientStorage: the others may come all the same.
            Conflict: somebody brings one of them already, or the upload has ended.
            Overloaded: too many requests do so at a time.
        """
        self._check_going_on()
        if len(self._runs) >= MAX_PARTS:
            raise Overloaded(
                f"{MAX_PARTS} requests bring this upload already", retry_after=_PART_RETRY_S
            )
        run = self._file.run(start, start + nbytes)
        pouring = asyncio.ensure_future(pour(run))
        self._runs.add(pouring)
        self._timer.cancel()
        try:
            with staging.storage_errors():
                await pouring
        except asyncio.CancelledError:
            self._check_going_on()
            raise
        finally:
            run.close()
            self._runs.discard(pouring)
            if not self._runs and not self._all_here.done():
                self._rest()
        return sum(item.spec.nbytes for item in self._file.missing)

    def _rest(self) -> None:
        """Nothing is under way; that may stay so for a while."""
        why = MalformedBody(f"the upload is cut short: nothing of it came for {self._idle:g} s")
        self._timer = asyncio.get_running_loop().call_later(self._idle, self.give_up, why)

    def _check_going_on(self) -> None:
        if not self._all_here.done():
            return
        reason = self._all_here.exception()
        raise Conflict(f"the upload has ended: {reason}" if reason else "it is being published")

    async def finish(self, digest: str | None) -> ReloadResult:
        """Publish it; that goes on even if the caller is cancelled.

        Args:
            digest: of the tensors as they were sent, if the sender tells.

        Raises:
            InvalidRequest: some are missing, and may still come.
            Conflict: some are on their way, or the upload has ended.
            TitoError: see :meth:`Publisher.publish_stream`.
        """
        self._check_going_on()
        if self._runs:
            raise Conflict(f"parts of the upload are still on their way: {len(self._runs)}")
        if missing := self._file.missing:
            problems = [
                Problem(item.spec.name, "nothing", f"bytes {item.start} to {item.end}")
                for item in missing[:_MISSING_SHOWN]
            ]
            raise InvalidRequest(f"{len(missing)} tensors are missing", problems=problems)
        self._all_here.set_result(digest)
        return await asyncio.shield(self.publishing)

    def give_up(self, reason: TitoError) -> None:
        """End it unpublished, unless it is being published."""
        if not self._all_here.done():
            self._all_here.set_exception(reason)


class PartedUploads:
    """Those under way.

    Args:
        publisher: publishes them.
        idle: seconds for which nothing of one may be under way.
    """

    def __init__(self, publisher: Publisher, idle: float) -> None:
        self._publisher, self._idle = publisher, idle
        self._uploads: dict[str, PartedUpload] = {}

    async def begin(self, head: bytes, owner: str, options: PublishOptions) -> PartedUpload:
        """Begin one.

        Args:
            head: the file's first bytes, to the end of its header.
            owner: name of the caller.
            options: how it is to be published.

        Raises:
            MalformedBody, WeightsRejected, BodyTooLarge: there is no use in the rest.
            Conflict, InsufficientStorage, Overloaded: not now.
        """
        await self._end_stale()
        upload = PartedUpload(owner, options, self._idle)
        upload.publishing = asyncio.create_task(
            self._publisher.publish_parts(head, upload.brought, options=options)
        )
        upload.publishing.add_done_callback(self._forgetting(upload))
        self._uploads[upload.id] = upload
        either: set[asyncio.Future[Any]] = {upload.publishing, upload.begun}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if upload.publishing.done():
            upload.publishing.result()
        return upload

    async def _end_stale(self) -> None:
        """Those whose writer has lost the lease would keep others from beginning."""
        for upload in list(self._uploads.values()):
            try:
                await upload.options.checked()
            except TitoError as error:
                upload.give_up(error)

    def _forgetting(self, upload: PartedUpload) -> Callable[[asyncio.Task[ReloadResult]], None]:
        def forget(publishing: asyncio.Task[ReloadResult]) -> None:
            del self._uploads[upload.id]
            if not publishing.cancelled():
                publishing.exception()  # whoever waits for it is told; perhaps nobody does

        return forget

    def find(self, id: str, owner: str) -> PartedUpload:
        """One of a caller's.

        Raises:
            NotFound: the caller has none of this name, or none any more.
        """
        upload = self._uploads.get(id)
        if upload is None or upload.owner != owner:
            raise NotFound("there is no such upload, or it has ended; begin another")
        return upload

    async def close(self) -> None:
        """End all that are not being published."""
        uploads = list(self._uploads.values())
        for upload in uploads:
            upload.give_up(EngineUnavailable("the server is closing"))
        if uploads:
            await asyncio.wait({upload.publishing for upload in uploads})

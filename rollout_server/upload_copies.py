"""Copies of verified uploads on the workers' devices, made while generation goes on.

A copy is a convenience: without one an upload is loaded from its files. So nothing that goes wrong
here fails a publish.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from rollout_server.attempts import stage
from rollout_server.checkpoints import Verified
from rollout_server.engine import Engine
from rollout_server.policies import Publish
from rollout_server.worker_links import WorkerLinks, Workers

log = logging.getLogger("tito.publishing")

_GRACE_S = 10.0
_READ_BYTES_PER_S = 100e6
_RELEASE_S = 10.0


class UploadCopies:
    """Makes them, one at a time."""

    def __init__(self) -> None:
        self._asked: tuple[Engine, bool] | None = None
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def copied(
        self, publish: Publish, engine: Engine, verified: Verified
    ) -> AsyncIterator[WorkerLinks | None]:
        """Links to the copies of a checkpoint, or None; the memory is free again afterwards."""
        if not await self._can(engine):
            yield None
            return
        with stage(publish, "stage"):
            links = await self._copied(engine, verified)
        try:
            yield links
        finally:
            await _release(links)

    async def _can(self, engine: Engine) -> bool:
        """Whether the workers of an engine can do so at all; each engine is asked once."""
        if not isinstance(engine, Workers):
            return False
        if self._asked is None or self._asked[0] is not engine:
            try:
                answers = await engine.call_workers("tito_copies_uploads")
            except Exception as error:
                log.warning("whether uploads can be copied beforehand is not known: %s", error)
                return False
            self._asked = engine, all(answers)
        return self._asked[1]

    async def _copied(self, engine: Engine, verified: Verified) -> WorkerLinks | None:
        links = None
        try:
            nbytes = _size(verified.files)
            links = await WorkerLinks.for_upload(engine, f"upload-{next(self._numbers)}", nbytes)
            seconds = _GRACE_S + nbytes / _READ_BYTES_PER_S
            digest = await links.read(verified.files, seconds)
        except Exception as error:
            log.info("an upload is loaded from the host's memory: %s", error)
        else:
            if digest == verified.digest:
                return links
            log.error("the copy of %s on the device is %s", verified.digest, digest)
        await _release(links)
        return None


def _size(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


async def _release(links: WorkerLinks | None) -> None:
    """Free the memory before anybody else asks for it; closed links have done so."""
    if links is None or links.is_closed:
        return
    try:
        await links.release(_RELEASE_S)
    except Exception as error:
        log.warning("whether the memory of an upload is free is not known: %s", error)

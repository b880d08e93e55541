"""The server's hold on a buffer in every worker, be it a channel's or an upload's: sockets.

Calls of the engine wait for its current step; these do not, and a transfer in flight holds up
nothing. Closing the sockets ends whatever the workers do for the buffer, and frees its memory.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rollout_server.engine import Engine
from shared.channel import Kind, Memory, Rendezvous
from shared.errors import Conflict, EngineFailure
from shared.protocol import PauseMode
from shared.weights import TensorSpec

_GRACE_S = 5.0
_SPILL_S = 60.0
_SPILL_BYTES_PER_S = 20e6  # slower than any disk that a server would be given
_MAX_ANSWER_BYTES = 64 << 20


@runtime_checkable
class Workers(Protocol):
    """An engine whose workers can be called by the names of their methods."""

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """What each of them returns.

        Raises:
            EngineFailure: one of them raised.
        """
        ...

    async def switch(self, mode: PauseMode, buffer: str, version: int) -> dict[str, float]:
        """Pause, load what every worker's buffer of a name holds, stamp, and resume unless held.

        Args:
            mode: ``keep`` or ``abort``.
            buffer, version: see above.

        Returns:
            Seconds of ``pause``, ``load`` and ``resume``, by the engine's clock.

        Raises:
            EngineFailure: a worker refused; the engine is paused, and its weights may be torn.
        """
        ...


class _Link:
    """To one worker. One command at a time."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.rank, self._reader, self._writer = rank, reader, writer
        self._one_at_a_time = asyncio.Lock()

    async def ask(self, command: dict[str, Any]) -> Any:
        try:
            async with self._one_at_a_time:
                self._writer.write(json.dumps(command).encode() + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
        except OSError as error:
            raise EngineFailure(f"worker {self.rank} has gone: {error}") from None
        if not line.endswith(b"\n"):  # nothing, or the beginning of an answer
            raise EngineFailure(f"worker {self.rank} has gone, or its channel was closed")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailure(f"worker {self.rank}: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        self._writer.close()


class WorkerLinks:
    """A channel's ends in all workers of an engine, or an upload's copies there.

    Attributes:
        engine: whose workers they are.
        memory: of each worker, for a trainer of the same host.
        rendezvous: for any other, in a channel of kind ``nccl``.
        is_closed: nothing can be asked any more.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        links: Sequence[_Link],
        nbytes: int,
        memory: Sequence[Memory] = (),
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._spill_seconds = _SPILL_S + nbytes / _SPILL_BYTES_PER_S
        self.engine, self._name, self._links = engine, name, links
        self.memory, self.rendezvous = tuple(memory), rendezvous
        self.is_closed = False

    @property
    def kind(self) -> Kind:
        """Of a channel: how the trainer reaches the workers."""
        return "ipc" if self.rendezvous is None else "nccl"

    @classmethod
    async def open(
        cls, engine: Engine, channel: str, kind: Kind, specs: Sequence[TensorSpec], interface: str
    ) -> WorkerLinks:
        """Make every worker allocate a buffer and listen.

        Raises:
            Conflict: the engine has no workers that could.
            EngineFailure: one of them refused; it may lack the memory.
        """
        secret = secrets.token_hex(16)
        tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]
        described, links = await _opened(
            engine,
            "tito_channel_open",
            channel=channel,
            kind=kind,
            tensors=tensors,
            interface=interface,
            secret=secret,
        )
        nbytes = sum(spec.nbytes for spec in specs)
        memory = [Memory(**end["memory"]) for end in described if "memory" in end]
        rendezvous = None
        if kind == "nccl":
            rendezvous = Rendezvous(
                size=1 + len(links),
                unique_id=described[0].get("unique_id", ""),
                addresses=tuple((interface, end["port"]) for end in described if "port" in end),
                secret=secret,
            )
        return cls(engine, channel, links, nbytes, memory, rendezvous)

    @classmethod
    async def for_upload(cls, engine: Engine, upload: str, nbytes: int) -> WorkerLinks:
        """Make every worker ready to copy an upload of so many bytes to its device.

        Raises:
            Conflict, EngineFailure: as for :meth:`open`.
        """
        _, links = await _opened(engine, "tito_upload_open", upload=upload)
        return cls(engine, upload, links, nbytes)

    async def join(self, seconds: float) -> None:
        """Let the workers meet the trainer.

        Raises:
            EngineFailure: they did not, in time.
        """
        assert self.rendezvous is not None
        rendezvous = asdict(self.rendezvous)
        await self._all(
            [
                {"do": "join", "rank": 1 + link.rank, "rendezvous": rendezvous, "seconds": seconds}
                for link in self._links
            ],
            seconds,
        )

    async def receive(self, seconds: float) -> None:
        """Let the workers receive what the trainer broadcasts.

        Raises:
            EngineFailure: not all of it came, in time.
        """
        await self._all([{"do": "receive", "seconds": seconds}] * len(self._links), seconds)

    async def verify(self, seconds: float) -> tuple[str, list[str]]:
        """Digest of the tensors, and names of those with values that are not finite.

        Raises:
            EngineFailure: workers differ, or one of them failed.
        """
        reports = await self._all([{"do": "verify"}] * len(self._links), seconds)
        if any(report != reports[0] for report in reports):
            raise EngineFailure("the workers have received different tensors")
        return reports[0]["digest"], reports[0]["not_finite"]

    async def spill(self, path: Path) -> str:
        """Copy the tensors to a file; the digest of what was written.

        Nothing else is loaded meanwhile, so a disk that hangs must not keep everybody waiting.

        Raises:
            EngineFailure: that failed, or took too long; the links are closed then.
        """
        try:
            async with asyncio.timeout(self._spill_seconds):
                digest: str = await self._links[0].ask({"do": "spill", "path": str(path)})
        except TimeoutError:
            self.close()
            raise EngineFailure(f"it was not written in {self._spill_seconds:.0f} s") from None
        return digest

    async def read(self, paths: Sequence[Path], seconds: float) -> str:
        """Let the workers copy safetensors files to their devices; the digest of the copies.

        Raises:
            EngineFailure: they differ, one of them has no room, or it took too long.
        """
        names = [str(path) for path in paths]
        digests = await self._all([{"do": "read", "paths": names}] * len(self._links), seconds)
        if any(digest != digests[0] for digest in digests):
            raise EngineFailure("the workers have read different tensors")
        return str(digests[0])

    async def release(self, seconds: float) -> None:
        """Free the memory of the copies, and close the links; returns when it is free.

        Raises:
            EngineFailure: a worker has gone, or the links are closed.
        """
        await self._all([{"do": "release"}] * len(self._links), seconds)
        self.close()

    async def load(self) -> list[Any]:
        """Load what the buffers hold into every worker's model. Only while paused.

        Raises:
            EngineFailure: the workers refused; their weights may be torn.
        """
        assert isinstance(self.engine, Workers)
        return await self.engine.call_workers("tito_buffer_load", name=self._name)

    async def switch(self, mode: PauseMode, version: int) -> dict[str, float]:
        """Pause, load what the buffers hold, stamp, resume: see :meth:`Workers.switch`."""
        assert isinstance(self.engine, Workers)
        return await self.engine.switch(mode, self._name, version)

    def close(self) -> None:
        """Give up whatever the workers do for the buffers, and free their memory."""
        self.is_closed = True
        for link in self._links:
            link.close()

    async def _all(self, commands: list[dict[str, Any]], seconds: float) -> list[Any]:
        """Ask every worker at once; afterwards none works on, or the links are closed."""
        asked = [link.ask(command) for link, command in zip(self._links, commands, strict=True)]
        try:
            async with asyncio.timeout(seconds + _GRACE_S):
                return await asyncio.gather(*asked)
        except TimeoutError:
            self.close()
            what = commands[0]["do"]
            raise EngineFailure(f"{what} did not end within {seconds} s") from None
        except BaseException:
            self.close()
            raise


async def _opened(
    engine: Engine, method: str, **arguments: Any
) -> tuple[list[dict[str, Any]], list[_Link]]:
    """Let every worker listen at a socket; what they say of themselves, and links to them."""
    if not isinstance(engine, Workers):
        raise Conflict("this engine takes no channels")
    # Not in the spool: the name of a socket may be no longer than 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tito-"))
    try:
        described = await engine.call_workers(method, folder=str(folder), **arguments)
        described.sort(key=lambda end: int(end["rank"]))
        links = [await _connected(folder, end["rank"]) for end in described]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return described, links


async def _connected(folder: Path, rank: int) -> _Link:
    reader, writer = await asyncio.open_unix_connection(folder / str(rank), limit=_MAX_ANSWER_BYTES)
    return _Link(rank, reader, writer)

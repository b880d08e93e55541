"""Uploads on their way in: what can be checked is checked before the rest has arrived.

An arrival is a sink: its bytes go into a staged file as they come, in threads but one at a time. A
checkpoint that does not fit the model and a delta to another version are refused at their headers;
tensors are hashed and looked at as soon as they are whole, so that hardly anything is left to be
verified when the last byte is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from rollout_server.checkpoint_file import CheckpointFile, OpenFile, TensorRun
from rollout_server.checkpoints import Manifest, Verified
from rollout_server.sinks import Sink
from rollout_server.staged_files import WrittenFile
from rollout_server.staging import UploadLimits
from rollout_server.tensor_check import TensorCheck
from shared.delta_reader import OPENING_BYTES, parse_base
from shared.errors import BodyTooLarge, MalformedBody
from shared.weights import PREFIX_BYTES, TRAILER_BYTES, header_length

SENT_FILE = "sent.safetensors"
_HEAD_BYTES = 128 << 10  # room for most headers; they tell whether there is use in the rest


class Arrival(Sink, Protocol):
    """An upload of full weights, of whatever kind.

    What it raises when bytes come is MalformedBody, WeightsRejected, Conflict or BodyTooLarge: the
    rest need not be sent.
    """

    def verified(self) -> Verified:
        """Now that all bytes are there: the checkpoint that they lead to.

        Raises:
            MalformedBody, WeightsRejected, Conflict: they lead to none.
        """
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


class CheckpointArrival:
    """A safetensors file, perhaps followed by its digest as 32 hex characters.

    Args:
        path, open_file, manifest, max_bytes: see :class:`CheckpointFile`.
        announced: digest of the tensors as they are sent, if it was given beforehand.
        trailer: whether it comes afterwards.
    """

    def __init__(
        self,
        path: Path,
        open_file: OpenFile,
        manifest: Manifest,
        *,
        announced: str | None,
        trailer: bool,
        max_bytes: int,
    ) -> None:
        self._begin = partial(CheckpointFile, path, open_file, manifest, max_bytes=max_bytes)
        self._announced = announced
        self._trailer_bytes = TRAILER_BYTES if trailer else 0
        self._file: CheckpointFile | None = None
        self._run: TensorRun | None = None
        self._head, self._tail = bytearray(_HEAD_BYTES), bytearray(self._trailer_bytes + 1)
        self._headed = self._tailed = 0

    def room(self) -> memoryview:
        if self._file is None:
            return memoryview(self._head)[self._headed :]
        if self._run is not None and self._run.left:
            return self._run.room()
        return memoryview(self._tail)[self._tailed :]

    def filled(self, count: int) -> None:
        if self._file is None:
            self._headed += count
            if (end := self._header_end()) <= self._headed:
                self._open(end)
        elif self._run is not None and self._run.left:
            self._run.filled(count)
        else:
            self._tailed += count
            if self._tailed > self._trailer_bytes:
                raise MalformedBody(f"the checkpoint goes on after byte {self._file.end}, its end")

    def _header_end(self) -> int:
        """Where it is; at least one byte ahead where that is not known."""
        if self._headed < PREFIX_BYTES:
            return PREFIX_BYTES
        end = PREFIX_BYTES + header_length(bytes(self._head[:PREFIX_BYTES]))
        if len(self._head) < end:
            self._head = self._head.ljust(end, b"\0")
        return end

    def _open(self, start: int) -> None:
        """Now that all of the header is there, and perhaps what has come with it."""
        self._file = file = self._begin(head=bytes(self._head[:start]))
        if start < file.end:
            self._run = file.run(start, file.end)
        content = memoryview(self._head)[start : self._headed]
        while content:
            room = self.room()[: len(content)]
            room[:] = content[: len(room)]
            content = content[len(room) :]
            self.filled(len(room))

    @property
    def checks(self) -> Mapping[str, TensorCheck]:
        """Of the tensors that are whole, by name."""
        return {} if self._file is None else self._file.checks

    def verified(self) -> Verified:
        left = 0 if self._run is None else self._run.left
        if self._file is None or left:
            header_length(bytes(self._head[: min(self._headed, PREFIX_BYTES)]))
            end = self._file.end if self._file else 0
            raise MalformedBody(
                f"the checkpoint is cut short: it is {end - left or self._headed} bytes; "
                f"its header says {end or 'more'}"
            )
        return self._file.verified(self._digest() if self._trailer_bytes else self._announced)

    def _digest(self) -> str:
        digest = bytes(self._tail[: self._tailed])
        if len(digest) < self._trailer_bytes or not digest.isalnum():
            raise MalformedBody("the upload does not end with a digest of 32 hex characters")
        return digest.decode()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class FileSink:
    """A file of a size that is known when it ends.

    Args:
        path: where it is written.
        limits: say how long it may be.
    """

    def __init__(self, path: Path, limits: UploadLimits) -> None:
        self._file = WrittenFile(path)
        self._max_bytes = limits.max_bytes
        self._content = self._file.part(0, self._max_bytes)
        self._size = 0

    def room(self) -> memoryview:
        return self._content.room(self._max_bytes + 1)

    def filled(self, count: int) -> None:
        self._size += count
        if self._size > self._max_bytes:
            raise BodyTooLarge(f"the upload exceeds {self._max_bytes} bytes")
        self.look_at(self._content.filled(count))

    def look_at(self, piece: memoryview) -> None:
        """See what comes on its way."""

    def close(self) -> None:
        """Let go of it."""
        self._file.close()


class DeltaArrival(FileSink):
    """A delta to the live version.

    Args:
        path: where it is staged.
        limits: say how long it may be.
        check_base: raises Conflict unless the version of this digest is live.
        apply: turns the staged file, which changes the version of this digest, into a checkpoint.
    """

    def __init__(
        self,
        path: Path,
        limits: UploadLimits,
        check_base: Callable[[str], None],
        apply: Callable[[Path, str], Verified],
    ) -> None:
        super().__init__(path, limits)
        self._path = path
        self._check_base = check_base
        self._apply = apply
        self._opening = b""
        self._base: str | None = None

    def room(self) -> memoryview:
        return super().room()[: _HEAD_BYTES if self._base is None else None]

    def look_at(self, piece: memoryview) -> None:
        if len(self._opening) < OPENING_BYTES:
            self._opening += piece[:OPENING_BYTES]
        if self._base is None and len(self._opening) >= OPENING_BYTES:
            self._read_base()

    def _read_base(self) -> str:
        self._base = parse_base(memoryview(self._opening))
        self._check_base(self._base)
        return self._base

    def verified(self) -> Verified:
        return self._apply(self._path, self._base or self._read_base())

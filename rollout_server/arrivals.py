"""Uploads on their way in: what can be checked is checked before the rest has arrived.

An arrival is a sink: its bytes go into a staged file as they come, in threads but one at a time. A
checkpoint that does not fit the model and a delta to another version are refused at their headers;
tensors are hashed and looked at as soon as they are whole, so that hardly anything is left to be
verified when the last byte is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rollout_server.checkpoints import (
    Checkpoint,
    Manifest,
    Verified,
    reject_unfit,
    verify,
)
from rollout_server.sinks import Sink
from rollout_server.staged_files import StagedFile, WrittenFile
from rollout_server.staging import UploadLimits
from rollout_server.tensor_check import TensorCheck, TensorLook
from shared.delta_reader import OPENING_BYTES, parse_base
from shared.errors import BodyTooLarge, MalformedBody
from shared.weights import PREFIX_BYTES, TRAILER_BYTES, TensorRange, header_length, parse_header

SENT_FILE = "sent.safetensors"
CANONICAL_FILE = "canonical.safetensors"
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
        path: where it is staged.
        open_file: opens the file there that will have so many bytes.
        manifest: what the model needs.
        announced: digest of the tensors as they are sent, if it was given beforehand.
        trailer: whether it comes afterwards.
        max_bytes: largest file.
    """

    def __init__(
        self,
        path: Path,
        open_file: Callable[[Path, int], StagedFile],
        manifest: Manifest,
        *,
        announced: str | None,
        trailer: bool,
        max_bytes: int,
    ) -> None:
        self._path, self._open_file = path, open_file
        self._manifest = manifest
        self._announced = announced
        self._trailer_bytes = TRAILER_BYTES if trailer else 0
        self._max_bytes = max_bytes
        self._file: StagedFile | None = None
        self._head, self._tail = bytearray(_HEAD_BYTES), bytearray(self._trailer_bytes + 1)
        self._headed = self._tailed = 0
        self._position = self._end = 0
        self._ahead: deque[TensorRange] = deque()
        self._look: TensorLook | None = None
        self._checks: dict[str, TensorCheck] = {}

    def room(self) -> memoryview:
        if self._file is None:
            return memoryview(self._head)[self._headed :]
        if self._position < self._end:
            return self._file.room(self._end - self._position)
        return memoryview(self._tail)[self._tailed :]

    def filled(self, count: int) -> None:
        if self._file is None:
            self._headed += count
            if self._begins():
                self._put(memoryview(self._head)[: self._headed])
        elif self._position < self._end:
            self._look_at(self._file.filled(count))
        else:
            self._tailed += count
            if self._tailed > self._trailer_bytes:
                raise MalformedBody(f"the checkpoint goes on after byte {self._end}, its end")

    def _begins(self) -> bool:
        """Whether the header is here, in which case it fits the model."""
        if self._headed < PREFIX_BYTES:
            return False
        end = PREFIX_BYTES + header_length(bytes(self._head[:PREFIX_BYTES]))
        if self._headed < end:
            if len(self._head) < end:
                self._head = self._head.ljust(end, b"\0")
            return False
        self._ahead.extend(ranges := parse_header(bytes(self._head[PREFIX_BYTES:end])))
        reject_unfit({item.spec.name: item.spec for item in ranges}, self._manifest)
        self._end = max((item.end for item in ranges), default=end)
        if self._end > self._max_bytes:
            raise BodyTooLarge(f"the upload exceeds {self._max_bytes} bytes")
        self._file = self._open_file(self._path, self._end)
        return True

    def _put(self, content: memoryview) -> None:
        """Bring the header where it belongs, and what has come with it."""
        while content:
            room = self.room()[: len(content)]
            room[:] = content[: len(room)]
            content = content[len(room) :]
            self.filled(len(room))

    def _look_at(self, piece: memoryview) -> None:
        start, self._position = self._position, self._position + len(piece)
        while self._ahead and self._ahead[0].start <= self._position:
            item = self._ahead[0]
            if self._look is None:
                served = self._manifest.served_dtype(item.spec.name)
                self._look = TensorLook(item.spec, served)
            self._look.update(piece[max(item.start - start, 0) : item.end - start])
            if item.end > self._position:
                return
            self._checks[item.spec.name] = self._look.result()
            self._look = None
            self._ahead.popleft()

    def verified(self) -> Verified:
        if self._file is None or self._position < self._end:
            header_length(bytes(self._head[: min(self._headed, PREFIX_BYTES)]))
            raise MalformedBody(
                f"the checkpoint is cut short: it is {self._position or self._headed} bytes; "
                f"its header says {self._end or 'more'}"
            )
        self._file.end()
        announced = self._digest() if self._trailer_bytes else self._announced
        canonical = self._path.with_name(CANONICAL_FILE)
        with Checkpoint([self._path]) as sent:
            verified = verify(sent, self._manifest, announced, canonical, self._checks)
        if self._path not in verified.files:
            self._path.unlink()
        return verified

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
        self._size = 0

    def room(self) -> memoryview:
        return self._file.room(self._max_bytes + 1)

    def filled(self, count: int) -> None:
        self._size += count
        if self._size > self._max_bytes:
            raise BodyTooLarge(f"the upload exceeds {self._max_bytes} bytes")
        self.look_at(self._file.filled(count))

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

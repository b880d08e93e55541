"""Uploads on their way in: what can be checked is checked before the rest has arrived.

An arrival takes batches of bytes, in threads but one at a time, and writes them to its folder. A
checkpoint that does not fit the model and a delta to another version are refused at their headers;
tensors are hashed and looked at as soon as they are whole, so that hardly anything is left to be
verified when the last byte is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from rollout_server.checkpoints import (
    Checkpoint,
    Manifest,
    Verified,
    reject_unfit,
    verify,
)
from rollout_server.staging import Piece, open_over, write_all
from rollout_server.tensor_check import TensorCheck, TensorLook
from shared.delta_reader import OPENING_BYTES, parse_base
from shared.errors import BodyTooLarge, MalformedBody
from shared.weights import PREFIX_BYTES, TRAILER_BYTES, TensorRange, header_length, parse_header

SENT_FILE = "sent.safetensors"
CANONICAL_FILE = "canonical.safetensors"


class Arrival(Protocol):
    """An upload of full weights, of whatever kind."""

    def take(self, pieces: Sequence[Piece]) -> None:
        """Take the next bytes.

        Raises:
            MalformedBody, WeightsRejected, Conflict, BodyTooLarge: the rest need not be sent.
        """
        ...

    def verified(self) -> Verified:
        """Now that all bytes were taken: the checkpoint that they lead to.

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
        folder: where it is staged.
        manifest: what the model needs.
        announced: digest of the tensors as they are sent, if it was given beforehand.
        trailer: whether it comes afterwards.
        max_bytes: largest file.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        announced: str | None,
        trailer: bool,
        max_bytes: int,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._announced = announced
        self._trailer_bytes = TRAILER_BYTES if trailer else 0
        self._max_bytes = max_bytes
        self._file = open_over(folder / SENT_FILE)
        self._head, self._tail = bytearray(), b""
        self._position = self._end = 0
        self._ahead: deque[TensorRange] = deque()
        self._look: TensorLook | None = None
        self._checks: dict[str, TensorCheck] = {}

    def take(self, pieces: Sequence[Piece]) -> None:
        if not self._end:
            for piece in pieces:
                self._head += piece
            if not self._begins():
                return
            pieces = [bytes(self._head)]
        content = self._cut(pieces)
        write_all(self._file.fileno(), content)
        for piece in content:
            self._look_at(piece)

    def _begins(self) -> bool:
        """Whether the header is here, in which case it fits the model."""
        if len(self._head) < PREFIX_BYTES:
            return False
        end = PREFIX_BYTES + header_length(bytes(self._head[:PREFIX_BYTES]))
        if len(self._head) < end:
            return False
        self._ahead.extend(ranges := parse_header(bytes(self._head[PREFIX_BYTES:end])))
        reject_unfit({item.spec.name: item.spec for item in ranges}, self._manifest)
        self._end = max((item.end for item in ranges), default=end)
        if self._end > self._max_bytes:
            raise BodyTooLarge(f"the upload exceeds {self._max_bytes} bytes")
        return True

    def _cut(self, pieces: Sequence[Piece]) -> list[Piece]:
        """What of the pieces belongs to the file; the rest is its digest."""
        content, room = list[Piece](), self._end - self._position
        for piece in pieces:
            content.append(piece[:room])
            self._tail += piece[room:]
            room -= len(content[-1])
        if len(self._tail) > self._trailer_bytes:
            raise MalformedBody(f"the checkpoint goes on after byte {self._end}, its end")
        return content

    def _look_at(self, piece: Piece) -> None:
        start, self._position = self._position, self._position + len(piece)
        while self._ahead and self._ahead[0].start <= self._position:
            item = self._ahead[0]
            if self._look is None:
                served = self._manifest.served_dtype(item.spec.name)
                self._look = TensorLook(item.spec, served)
            self._look.update(memoryview(piece)[max(item.start - start, 0) : item.end - start])
            if item.end > self._position:
                return
            self._checks[item.spec.name] = self._look.result()
            self._look = None
            self._ahead.popleft()

    def verified(self) -> Verified:
        if not self._end or self._position < self._end:
            header_length(bytes(self._head[:PREFIX_BYTES]))
            raise MalformedBody(
                f"the checkpoint is cut short: it is {self._position or len(self._head)} bytes; "
                f"its header says {self._end or 'more'}"
            )
        self._file.truncate(self._end)  # it may have been a longer file before
        announced = self._digest() if self._trailer_bytes else self._announced
        canonical = self._folder / CANONICAL_FILE
        file = self._folder / SENT_FILE
        with Checkpoint([file]) as sent:
            verified = verify(sent, self._manifest, announced, canonical, self._checks)
        if file not in verified.files:
            file.unlink()
        return verified

    def _digest(self) -> str:
        if len(self._tail) < self._trailer_bytes or not self._tail.isalnum():
            raise MalformedBody("the upload does not end with a digest of 32 hex characters")
        return self._tail.decode()

    def close(self) -> None:
        self._file.close()


class DeltaArrival:
    """A delta to the live version.

    Args:
        file: where it is staged.
        check_base: raises Conflict unless the version of this digest is live.
        apply: turns the staged file, which changes the version of this digest, into a checkpoint.
    """

    def __init__(
        self,
        file: Path,
        check_base: Callable[[str], None],
        apply: Callable[[Path, str], Verified],
    ) -> None:
        self._path = file
        self._check_base = check_base
        self._apply = apply
        self._file: IO[bytes] = file.open("wb", buffering=0)
        self._opening = b""
        self._base: str | None = None

    def take(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if len(self._opening) < OPENING_BYTES:
                self._opening += piece[:OPENING_BYTES]
        if self._base is None and len(self._opening) >= OPENING_BYTES:
            self._read_base()
        write_all(self._file.fileno(), pieces)

    def _read_base(self) -> str:
        self._base = parse_base(memoryview(self._opening))
        self._check_base(self._base)
        return self._base

    def verified(self) -> Verified:
        return self._apply(self._path, self._base or self._read_base())

    def close(self) -> None:
        self._file.close()

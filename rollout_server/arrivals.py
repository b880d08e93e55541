"""Uploads on their way in: what can be checked is checked before the rest has arrived.

An arrival takes batches of bytes, in threads but one at a time, and writes them to its folder. A
checkpoint that does not fit the model and a delta to another version are refused at their headers;
tensors are hashed and looked at as soon as they are whole, so that hardly anything is left to be
verified when the last byte is in.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from rollout_server.checkpoints import (
    Checkpoint,
    Manifest,
    TensorCheck,
    Verified,
    check_tensor,
    reject_unfit,
    verify,
)
from rollout_server.staging import write_all
from shared.delta_reader import OPENING_BYTES, parse_base
from shared.errors import BodyTooLarge, MalformedBody
from shared.weights import PREFIX_BYTES, TRAILER_BYTES, TensorRange, header_length, parse_header

SENT_FILE = "sent.safetensors"
CANONICAL_FILE = "canonical.safetensors"


class Arrival(Protocol):
    """An upload of full weights, of whatever kind."""

    def take(self, pieces: Sequence[bytes]) -> None:
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
        self._file: IO[bytes] = (folder / SENT_FILE).open("wb", buffering=0)
        self._head = bytearray()
        self._tail = b""
        self._sent: Checkpoint | None = None
        self._position = self._end = 0
        self._ahead: deque[TensorRange] = deque()
        self._checks: dict[str, TensorCheck] = {}

    def take(self, pieces: Sequence[bytes]) -> None:
        if self._sent is None:
            for piece in pieces:
                self._head += piece
            pieces = [bytes(self._head)] if self._begin() else []
        self._write(pieces)
        while self._sent and self._ahead and self._ahead[0].end <= self._position:
            name = self._ahead.popleft().spec.name
            self._checks[name] = check_tensor(self._sent, name, self._manifest)

    def _begin(self) -> bool:
        """Whether the header is here, and then fits."""
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
        # At its final size from the start, so that tensors can be mapped as they are completed.
        self._file.truncate(self._end)
        os.pwrite(self._file.fileno(), self._head[:end], 0)
        self._sent = Checkpoint([self._folder / SENT_FILE])
        return True

    def _write(self, pieces: Sequence[bytes]) -> None:
        content: list[bytes] = []
        for piece in pieces:
            room = self._end - self._position
            self._tail += piece[room:]
            if len(self._tail) > self._trailer_bytes:
                raise MalformedBody(f"the checkpoint goes on after byte {self._end}, its end")
            content.append(piece[:room])
            self._position += min(room, len(piece))
        write_all(self._file.fileno(), content)

    def verified(self) -> Verified:
        if self._sent is None or self._position < self._end:
            header_length(bytes(self._head[:PREFIX_BYTES]))
            raise MalformedBody(
                f"the checkpoint is cut short: it is {self._position or len(self._head)} bytes; "
                f"its header says {self._end or 'more'}"
            )
        announced = self._digest() if self._trailer_bytes else self._announced
        canonical = self._folder / CANONICAL_FILE
        verified = verify(self._sent, self._manifest, announced, canonical, self._checks)
        if verified.files == (canonical,):
            (self._folder / SENT_FILE).unlink()
        return verified

    def _digest(self) -> str:
        if len(self._tail) < self._trailer_bytes or not self._tail.isalnum():
            raise MalformedBody("the upload does not end with a digest of 32 hex characters")
        return self._tail.decode()

    def close(self) -> None:
        if self._sent is not None:
            self._sent.close()
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

    def take(self, pieces: Sequence[bytes]) -> None:
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

"""Bringing bytes into a staging folder: from the network, or from directories that are allowed."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_server.checkpoints import checkpoint_files
from shared.errors import (
    BodyTooLarge,
    Forbidden,
    InsufficientStorage,
    InvalidRequest,
    MalformedBody,
    Overloaded,
    Problem,
)
from shared.weights import TRAILER_BYTES

_SHOWN_CHARS = 200
_BUSY_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What publishers may bring in.

    Attributes:
        allowed_dirs: resolved directories from which paths may be read.
        max_bytes: largest upload.
        max_uploads: uploads under way at once.
    """

    allowed_dirs: list[Path]
    max_bytes: int
    max_uploads: int


class UploadSlots:
    """Counts the uploads under way, of whatever policy."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take one of the slots.

        Raises:
            Overloaded: there is none left.
        """
        if not self._left:
            raise Overloaded("too many uploads are under way", retry_after=_BUSY_RETRY_S)
        self._left -= 1
        try:
            yield
        finally:
            self._left += 1


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Turn a full disk into an answer.

    Raises:
        InsufficientStorage: in place of the operating system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InsufficientStorage(
            "the staging area is full; nothing has changed. Free space there, or choose another "
            "place with --staging-dir or --spool-dir"
        ) from error


def open_over(path: Path) -> io.FileIO:
    """A file to be written from its start, over what is there already; truncate it in the end."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb")


def write_all(descriptor: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write pieces one after the other; at most as many as one system call takes."""
    left = deque(memoryview(piece) for piece in pieces)
    while left:
        # A write may be short just before the disk is full.
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if left:
            left[0] = left[0][count:]


def write_at(descriptor: int, piece: memoryview, start: int) -> None:
    """Write a piece at its place in a file."""
    while piece:
        # A write may be short just before the disk is full.
        count = os.pwrite(descriptor, piece, start)
        piece, start = piece[count:], start + count


def cut_trailer(path: Path) -> str:
    """Remove the digest that follows a safetensors file, and return it.

    Raises:
        MalformedBody: there is none.
    """
    with path.open("r+b") as file:
        size = max(file.seek(0, 2) - TRAILER_BYTES, 0)
        file.seek(size)
        trailer = file.read()
        file.truncate(size)
    if len(trailer) < TRAILER_BYTES or not trailer.isalnum():
        raise MalformedBody("the upload does not end with a digest of 32 hex characters")
    return trailer.decode()


def find_checkpoint(path: Path, limits: UploadLimits) -> list[Path]:
    """The safetensors files at a path, links resolved.

    Raises:
        Forbidden: one of them lies outside every allowed directory.
        InvalidRequest: there are none.
        BodyTooLarge: they are larger than an upload may be.
    """
    try:
        files = [file.resolve() for file in checkpoint_files(path.resolve())]
        outside = [f for f in files or [path.resolve()] if not _is_allowed(f, limits.allowed_dirs)]
        size = sum(file.stat().st_size for file in files)
    except (OSError, ValueError, RuntimeError) as error:  # no path at all, or a loop of links
        problem = Problem("path", repr(str(path)[:_SHOWN_CHARS]), "a path that exists")
        raise InvalidRequest(f"the path cannot be read: {error}", problems=[problem]) from None
    if outside:
        listed = ", ".join(map(str, limits.allowed_dirs)) or "none (see --reload-dirs)"
        raise Forbidden(f"{path} is outside the directories allowed: {listed}")
    if not files:
        problem = Problem("path", str(path), "a .safetensors file or a directory of them")
        raise InvalidRequest("there is no checkpoint", problems=[problem])
    if size > limits.max_bytes:
        raise BodyTooLarge(f"the checkpoint is {size} bytes; allowed: {limits.max_bytes}")
    return files


def allowed_file(path: Path, limits: UploadLimits) -> Path:
    """A plain file at a path, links resolved.

    Raises:
        Forbidden: it lies outside every allowed directory.
        InvalidRequest: there is none.
    """
    try:
        resolved = path.resolve()
        is_file = resolved.is_file()
    except (OSError, RuntimeError) as error:  # a loop of links, for instance
        problem = Problem(str(path), str(error), "a file")
        raise InvalidRequest("a file cannot be read", problems=[problem]) from None
    if not _is_allowed(resolved, limits.allowed_dirs):
        raise Forbidden(f"{path} is outside the directories allowed")
    if not is_file:
        raise InvalidRequest("a file is missing", problems=[Problem(str(path), "none", "a file")])
    return resolved


def _is_allowed(file: Path, directories: list[Path]) -> bool:
    return any(file.is_relative_to(directory) for directory in directories)


def copy_in(files: list[Path], folder: Path) -> None:
    """Copy checkpoint files into a staging folder, under names of ours.

    Their owner may overwrite the originals at any time, and a restore will need these bytes.

    Raises:
        Forbidden, InvalidRequest, InsufficientStorage: see :func:`copy_file`.
    """
    for index, file in enumerate(files):
        copy_file(file, folder / f"sent-{index:05d}.safetensors")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file that a caller has named.

    Raises:
        Forbidden: this process may not read it.
        InvalidRequest: it cannot be read for another reason; it may have gone meanwhile.
        InsufficientStorage: the disk is full.
    """
    try:
        source.open("rb").close()
    except PermissionError:
        raise Forbidden(f"{source} may not be read by the server's user") from None
    except OSError as error:
        problem = Problem(str(source), str(error.strerror), "a file")
        raise InvalidRequest("a file cannot be read", problems=[problem]) from None
    with storage_errors():
        shutil.copyfile(source, target)

"""Files that uploads are written to: through memory where they lie in memory, else by the system.

Writing to a file in memory takes the kernel longer than copying the bytes. So such a file is mapped
into this process, and stays mapped when it is committed, retired and written over: its pages are
there already, and nothing but the copy is left. A mapping goes when its file has gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path
from typing import Protocol

from rollout_server.sinks import ROOM_BYTES
from rollout_server.staging import open_over, write_at

_STEP_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class FilePart(Protocol):
    """A part of a file that is filled from its start on, by one thread at a time."""

    def room(self, most: int) -> memoryview:
        """Where the next bytes shall be: some, up to ``most``.

        Raises:
            OSError: the disk is full.
        """
        ...

    def filled(self, count: int) -> memoryview:
        """So many are there; what they are, until the next room is asked for.

        Raises:
            OSError: the disk is full.
        """
        ...


class StagedFile(Protocol):
    """A file that is filled in parts, which threads may do side by side."""

    def part(self, start: int, end: int) -> FilePart:
        """What lies in ``[start, end)``."""
        ...

    def end(self, size: int) -> None:
        """All of so many bytes is there; the file may have been a longer one before."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class WrittenFile:
    """A file of any file system.

    Args:
        path: where it is, or will be.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_over(path)

    def part(self, start: int, end: int) -> FilePart:  # noqa: ARG002 - it takes what comes
        return _WrittenPart(self._file.fileno(), start)

    def end(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


class _WrittenPart:
    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._position = descriptor, start
        self._buffer = memoryview(bytearray(ROOM_BYTES))

    def room(self, most: int) -> memoryview:
        return self._buffer[:most]

    def filled(self, count: int) -> memoryview:
        piece = self._buffer[:count]
        write_at(self._descriptor, piece, self._position)
        self._position += count
        return piece


class _Mapping:
    """A file's memory in this process.

    Args:
        descriptor: of the file; closed with this.

    Attributes:
        ready: bytes, from the start on, that the file had and that were mapped when it was begun.
    """

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        self._content: mmap.mmap | None = None
        self.ready = 0

    def begin(self, size: int) -> memoryview:
        """The memory of a file that will have so many bytes."""
        now = os.fstat(self._file).st_size
        self.ready = min(self.ready, now)
        if self._content is None or len(self._content) < size:
            os.ftruncate(self._file, max(size, now))
            self._content = mmap.mmap(self._file, size)  # the old one goes with its views
            self.ready = 0
        return memoryview(self._content)[:size]

    def make_ready(self, start: int, end: int) -> None:
        """Give the file memory here; without it, a write would be the end of this process.

        Raises:
            OSError: there is none.
        """
        assert self._content is not None
        start -= start % mmap.PAGESIZE
        os.posix_fallocate(self._file, start, end - start)
        with contextlib.suppress(OSError):  # else each page is mapped when it is written to
            self._content.madvise(_MADV_POPULATE_WRITE, start, end - start)

    def end(self, size: int) -> None:
        """All of the file has been filled; let it end here."""
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)
        self.ready = size

    def has_gone(self) -> bool:
        """Whether nothing names the file any more."""
        return not os.fstat(self._file).st_nlink

    def close(self) -> None:
        self._content = None  # unmapped when the last view of it is gone
        os.close(self._file)


class MappedFile:
    """A file in memory.

    Args:
        mapping: of it.
        size: that it will have.

    Attributes:
        mapping: see above.
        content: of the file; empty once it is closed, so that no part keeps the memory.
    """

    def __init__(self, mapping: _Mapping, size: int) -> None:
        self.mapping, self.content = mapping, mapping.begin(size)

    def part(self, start: int, end: int) -> FilePart:
        return _MappedPart(self, start, end)

    def end(self, size: int) -> None:
        self.mapping.end(size)

    def close(self) -> None:
        self.content = memoryview(b"")


class _MappedPart:
    def __init__(self, file: MappedFile, start: int, end: int) -> None:
        self._file, self._position, self._end = file, start, end
        self._ready = max(start, file.mapping.ready)

    def room(self, most: int) -> memoryview:
        end = min(self._position + min(most, ROOM_BYTES), self._end)
        if end > self._ready:
            ready = min(max(end, self._ready + _STEP_BYTES), self._end)
            self._file.mapping.make_ready(self._ready, ready)
            self._ready = ready
        return self._file.content[self._position : end]

    def filled(self, count: int) -> memoryview:
        start, self._position = self._position, self._position + count
        return self._file.content[start : self._position]


class MappedFiles:
    """Opens the files of a folder, and keeps those mapped that lie in memory.

    Args:
        folder: on whose file system they are.

    Attributes:
        is_in_memory: whether that is in memory.
    """

    def __init__(self, folder: Path) -> None:
        self.is_in_memory = _is_in_memory(folder)
        self._mappings: dict[int, _Mapping] = {}
        self._using = threading.Lock()

    def open(self, path: Path, size: int) -> StagedFile:
        """A file to be written from its start on, over what is there already.

        Args:
            path: nobody else writes to it.
            size: that it will have.
        """
        if not self.is_in_memory or not size:
            return WrittenFile(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        inode = os.fstat(descriptor).st_ino
        with self._using:
            if inode in self._mappings:
                os.close(descriptor)
            else:
                self._mappings[inode] = _Mapping(descriptor)
            return MappedFile(self._mappings[inode], size)

    def release(self) -> None:
        """Give the memory back of files that have been removed."""
        with self._using:
            gone = {inode for inode, mapping in self._mappings.items() if mapping.has_gone()}
            for inode in gone:
                self._mappings.pop(inode).close()

    def close(self) -> None:
        """Give all back."""
        with self._using:
            while self._mappings:
                self._mappings.popitem()[1].close()


def _is_in_memory(folder: Path) -> bool:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == number:
                return line.partition(" - ")[2].startswith("tmpfs ")
    return False

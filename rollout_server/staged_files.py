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
from rollout_server.staging import open_over, write_all

_STEP_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class StagedFile(Protocol):
    """A file that is filled from its start on."""

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

    def end(self) -> None:
        """The file ends here; it may have been a longer one before."""
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
        self._buffer = memoryview(bytearray(ROOM_BYTES))

    def room(self, most: int) -> memoryview:
        return self._buffer[:most]

    def filled(self, count: int) -> memoryview:
        write_all(self._file.fileno(), [self._buffer[:count]])
        return self._buffer[:count]

    def end(self) -> None:
        self._file.truncate()

    def close(self) -> None:
        self._file.close()


class _Mapping:
    """A file's memory in this process.

    Args:
        descriptor: of the file; closed with this.

    Attributes:
        ready: bytes, from the start on, that the file has and that are mapped.
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

    def make_ready(self, end: int) -> None:
        """Give the file memory up to here; without it, a write would be the end of this process.

        Raises:
            OSError: there is none.
        """
        assert self._content is not None
        end = min(max(end, self.ready + _STEP_BYTES), len(self._content))
        start = self.ready - self.ready % mmap.PAGESIZE
        os.posix_fallocate(self._file, start, end - start)
        with contextlib.suppress(OSError):  # else each page is mapped when it is written to
            self._content.madvise(_MADV_POPULATE_WRITE, start, end - start)
        self.ready = end

    def truncate(self, size: int) -> None:
        """Let the file end here."""
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)
        self.ready = min(self.ready, size)

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
    """

    def __init__(self, mapping: _Mapping, size: int) -> None:
        self._mapping, self._content = mapping, mapping.begin(size)
        self._position = 0

    def room(self, most: int) -> memoryview:
        end = min(self._position + min(most, ROOM_BYTES), len(self._content))
        if end > self._mapping.ready:
            self._mapping.make_ready(end)
        return self._content[self._position : end]

    def filled(self, count: int) -> memoryview:
        start, self._position = self._position, self._position + count
        return self._content[start : self._position]

    def end(self) -> None:
        self._mapping.truncate(self._position)

    def close(self) -> None:
        self._content = memoryview(b"")


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

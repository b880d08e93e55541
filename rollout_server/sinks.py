"""Where uploads are put: sinks say into which memory the next bytes shall go.

So a socket can be read straight into a staged file, and what has just come is looked at while it is
still in the processor's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

ROOM_BYTES = 512 << 10
"""What a sink takes at once: worth a look at it, and small enough for the cache."""
_BATCH_BYTES = 1 << 20


class Sink(Protocol):
    """Takes the bytes of an upload, in threads but one call at a time."""

    def room(self) -> memoryview:
        """Where the next bytes shall be; at least one."""
        ...

    def filled(self, count: int) -> None:
        """So many bytes, from its start on, are in the room that was given last.

        Raises:
            TitoError: the rest need not be sent.
            OSError: there is no place for it.
        """
        ...


Pour = Callable[[Sink], Coroutine[Any, Any, None]]
"""Brings all of an upload into a sink."""


class Filler:
    """Fills the rooms of a sink, each to its end before the next.

    Args:
        sink: see there.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._space = memoryview(b"")
        self._count = 0

    def space(self) -> memoryview:
        """Where the next bytes shall be."""
        if not self._space:
            self._space = self._sink.room()
        return self._space

    def advance(self, count: int) -> None:
        """So many of them are there."""
        self._space, self._count = self._space[count:], self._count + count
        if not self._space:
            self.end()

    def put(self, piece: bytes | memoryview) -> None:
        """Copy bytes that are somewhere else."""
        rest = memoryview(piece)
        while rest:
            space = self.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            self.advance(count)

    def put_all(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Copy several."""
        for piece in pieces:
            self.put(piece)

    def end(self) -> None:
        """Hand over what a room has that is not full."""
        count, self._count, self._space = self._count, 0, memoryview(b"")
        if count:
            self._sink.filled(count)


async def fill(chunks: AsyncIterator[bytes | memoryview], sink: Sink) -> None:
    """Bring an upload that comes in chunks into a sink, in threads; the next arrive meanwhile.

    Args:
        chunks: as they come from the network.
        sink: not called any more when this returns or raises.
    """
    filler, size, batch = Filler(sink), 0, list[bytes | memoryview]()
    filling = asyncio.ensure_future(asyncio.sleep(0))
    try:
        async for chunk in chunks:
            size += len(chunk)
            batch.append(chunk)
            if size >= _BATCH_BYTES:
                await filling
                filling = asyncio.ensure_future(asyncio.to_thread(filler.put_all, batch))
                size, batch = 0, []
        await filling
        await asyncio.to_thread(filler.put_all, batch)
        await asyncio.to_thread(filler.end)
    finally:
        await asyncio.wait({filling})

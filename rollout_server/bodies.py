"""Large request bodies, read past the HTTP parser into a few buffers that are used again and again.

uvicorn reads at most 256 KiB at a time, copies each piece several times and wakes the application
for it. Here the connection's transport is given another protocol for as long as a body lasts: the
kernel writes straight into buffers of a size that is worth a system call on the way to the disk.
Afterwards the connection goes on as if its parser had seen the body.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from shared.errors import MalformedBody

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from rollout_server.connections import Connection

EXTENSION = "tito.body"
"""Where a :class:`LargeBody` lies among the extensions of an ASGI scope."""
LARGE_BYTES = 256 << 10
"""From this size on, a body is worth it."""
MIN_BYTES_PER_S = 16 << 10
_BUFFER_BYTES = 4 << 20
_BUFFERS = 4
_FIRST_BYTES = 128 << 10  # sooner than the others: it may tell that there is no use in them


class LargeBody(asyncio.BufferedProtocol):
    """The body of one request, of a size that is known.

    Args:
        connection: on which it comes.
        cycle: uvicorn's view of the request.
        size: bytes of the body.

    Attributes:
        left: bytes that have not come yet.
    """

    def __init__(self, connection: Connection, cycle: RequestResponseCycle, size: int) -> None:
        self._connection = connection
        self._cycle = cycle
        self.left = size
        self._free: deque[memoryview] = deque()
        self._buffer: memoryview | None = None
        self._buffers = self._filled = self._goal = 0
        self._full: deque[memoryview] = deque()
        self._came = asyncio.Event()
        self._is_lost = self._is_unwanted = False

    async def chunks(self, silence: float) -> AsyncGenerator[bytes | memoryview, None]:
        """The body in pieces; each stays as it is until three more have been asked for.

        Args:
            silence: see :func:`refuse_slow`.

        Raises:
            ClientDisconnect: the caller hung up before its end.
            MalformedBody: it comes too slowly.
        """
        async with _within(silence):
            message = await self._cycle.receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        if message["more_body"]:
            # At once, or the parser will see more of it.
            self._take_over(_FIRST_BYTES - len(message["body"]))
        yield message["body"]
        held = deque[memoryview]()
        while self.left or self._full:
            await self._next(silence)
            held.append(self._full.popleft())
            yield held[-1]
            if len(held) > 2:
                self._reuse(held.popleft())

    def _take_over(self, first: int) -> None:
        if self._connection.transport.is_closing():
            raise ClientDisconnect
        self._begin_buffer()
        if first > 0:
            self._goal = min(first, self._goal)
        self._connection.flow.pause_reading()
        self._connection.transport.set_protocol(self)
        self._connection.flow.resume_reading()  # uvloop asks only now in which way to read

    def _begin_buffer(self) -> None:
        """Take a buffer that is free, or make one; if there are enough of them, wait."""
        if not self._free and self._buffers < _BUFFERS:
            self._buffers += 1
            self._free.append(memoryview(bytearray(min(_BUFFER_BYTES, self.left))))
        self._buffer = self._free.popleft() if self._free else None
        self._filled, self._goal = 0, len(self._buffer or b"")
        if self._buffer is None:
            self._connection.flow.pause_reading()

    async def _next(self, silence: float) -> None:
        while not self._full:
            if self._is_lost:
                raise ClientDisconnect
            before = self.left
            self._came.clear()
            try:
                async with asyncio.timeout(silence):
                    await self._came.wait()
            except TimeoutError:
                refuse_slow(before - self.left, silence)

    def _reuse(self, chunk: memoryview) -> None:
        self._free.append(memoryview(chunk.obj))
        if self._buffer is None and self.left:
            self._begin_buffer()
            self._connection.flow.resume_reading()

    def abandon(self) -> None:
        """Nobody wants the rest; it is thrown away as it comes."""
        self._is_unwanted = True
        if self._buffer is None:
            self._free.append(memoryview(bytearray(_FIRST_BYTES)))
            self._begin_buffer()

    def parsed(self, count: int) -> None:
        """The parser has seen some of it."""
        self.left -= count

    # Of asyncio's protocols.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - a hint
        assert self._buffer is not None, "nothing is read while no buffer is free"
        return self._buffer[self._filled : min(self._goal, self._filled + self.left)]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        self.left -= nbytes
        if self._is_unwanted:
            self._filled = 0
            self._connection.expect_more()
        elif self._filled == self._goal or not self.left:
            self._hand_over()
        if not self.left:
            self._connection.flow.pause_reading()
            self._connection.body_ended()
            self._connection.flow.resume_reading()

    def _hand_over(self) -> None:
        assert self._buffer is not None
        self._full.append(self._buffer[: self._filled])
        self._came.set()
        if self.left:
            self._begin_buffer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._came.set()
        self._connection.connection_lost(exc)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


async def paced(chunks: AsyncGenerator[bytes, None], silence: float) -> AsyncGenerator[bytes, None]:
    """The same chunks, unless they come too slowly.

    Args:
        silence: see :func:`refuse_slow`.

    Raises:
        MalformedBody: they do.
    """
    clock = asyncio.get_running_loop().time
    count, waited = 0, 0.0
    while True:
        start = clock()
        async with _within(silence):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        count, waited = count + len(chunk), waited + clock() - start
        if waited > silence:
            refuse_slow(count, waited)
            count, waited = 0, 0.0
        yield chunk


@contextlib.asynccontextmanager
async def _within(silence: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(silence):
            yield
    except TimeoutError:
        refuse_slow(0, silence)


def refuse_slow(count: int, seconds: float) -> None:
    """Give a caller up whose machine has gone, or who holds a place with one byte now and then.

    Args:
        count: bytes that came while they were waited for.
        seconds: how long that was, ``--body-silence`` or more.

    Raises:
        MalformedBody: they are too few.
    """
    if not count:
        raise MalformedBody(f"the body is cut short: nothing of it came for {seconds:g} s")
    if count < seconds * MIN_BYTES_PER_S:
        raise MalformedBody(
            f"the body comes too slowly: {count} bytes in {seconds:.3g} s; "
            f"allowed: at least {MIN_BYTES_PER_S} bytes a second"
        )

"""Large request bodies, received past the HTTP parser and outside the event loop.

uvicorn reads at most 256 KiB at a time, copies each piece several times and wakes the application
for it. Here a thread takes the connection's socket for as long as an upload lasts, and the kernel
writes straight into the memory where the bytes are to stay. Afterwards the connection goes on as if
its parser had seen the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from rollout_server.sinks import Filler, Sink
from shared.errors import MalformedBody

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from rollout_server.connections import Connection

EXTENSION = "tito.body"
"""Where a :class:`LargeBody` lies among the extensions of an ASGI scope."""
LARGE_BYTES = 256 << 10
"""From this size on, a body is worth it."""
MIN_BYTES_PER_S = 16 << 10
_LOOK_S = 0.5  # so often a thread looks whether anybody still wants what it waits for
_SCRAP_BYTES = 128 << 10


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
        self._is_past_parser = self._is_given_up = False
        self._scrap = memoryview(b"")

    async def pour(self, sink: Sink, silence: float) -> None:
        """Bring the body into a sink, in a thread of its own: a slow caller may hold it for long.

        Args:
            sink: called in that thread; not any more when this returns or raises.
            silence: see :func:`refuse_slow`.

        Raises:
            ClientDisconnect: the caller hung up before its end.
            MalformedBody: it comes too slowly.
        """
        async with _within(silence):
            message = await self._cycle.receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        # At once, or the parser will see more of it.
        line = self._take_over() if message["more_body"] else None
        filler, pool = Filler(sink), ThreadPoolExecutor(1, "tito-body")
        with line or contextlib.nullcontext():
            work = partial(self._receive, line, message["body"], filler, Pace(silence))
            received = asyncio.get_running_loop().run_in_executor(pool, work)
            try:
                await asyncio.shield(received)
            finally:
                self._is_given_up = True
                await asyncio.wait({received})
                received.exception()  # it is told already, or nobody waits for it any more
                pool.shutdown(wait=False)
        if line is not None:
            self._go_on()

    def _take_over(self) -> socket.socket:
        transport = self._connection.transport
        if transport.is_closing():
            raise ClientDisconnect
        self._is_past_parser = True
        self._connection.flow.pause_reading()
        line = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        line.settimeout(_LOOK_S)  # it does not block anyway, and the event loop's must not
        return line

    def _receive(
        self, line: socket.socket | None, first: bytes, filler: Filler, pace: Pace
    ) -> None:
        filler.put(first)
        while line is not None and self.left:
            start = time.monotonic()
            count = _received(line, filler.space()[: self.left])
            self.left -= count
            if self._is_given_up:
                return
            pace.waited(time.monotonic() - start, count)
            filler.advance(count)
        filler.end()

    def _go_on(self) -> None:
        self._connection.body_ended()
        self._connection.flow.resume_reading()

    def abandon(self) -> None:
        """Nobody wants the rest; it is thrown away as it comes."""
        if self._is_past_parser and self.left and not self._connection.transport.is_closing():
            self._scrap = memoryview(bytearray(_SCRAP_BYTES))
            self._connection.transport.set_protocol(self)
            self._connection.flow.resume_reading()  # uvloop asks only now in which way to read

    def parsed(self, count: int) -> None:
        """The parser has seen some of it."""
        self.left -= count

    # Of asyncio's protocols, while it is thrown away.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - a hint
        return self._scrap[: self.left]

    def buffer_updated(self, nbytes: int) -> None:
        self.left -= nbytes
        self._connection.expect_more()
        if not self.left:
            self._connection.flow.pause_reading()
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


def _received(line: socket.socket, space: memoryview) -> int:
    """Bytes that have come; none if there were none for a moment.

    Raises:
        ClientDisconnect: none will come.
    """
    try:
        count = line.recv_into(space)
    except TimeoutError:
        return 0
    except ConnectionError:
        raise ClientDisconnect from None
    if not count:
        raise ClientDisconnect
    return count


class Pace:
    """How fast a body comes, while it is waited for.

    Args:
        silence: see :func:`refuse_slow`.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._seconds, self._count = 0.0, 0

    def waited(self, seconds: float, count: int) -> None:
        """So many bytes came in so long.

        Raises:
            MalformedBody: it comes too slowly.
        """
        self._seconds, self._count = self._seconds + seconds, self._count + count
        if self._seconds > self._silence:
            refuse_slow(self._count, self._seconds)
            self._seconds, self._count = 0.0, 0


async def paced(chunks: AsyncGenerator[bytes, None], silence: float) -> AsyncGenerator[bytes, None]:
    """The same chunks, unless they come too slowly.

    Args:
        silence: see :func:`refuse_slow`.

    Raises:
        MalformedBody: they do.
    """
    clock, pace = asyncio.get_running_loop().time, Pace(silence)
    while True:
        start = clock()
        async with _within(silence):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        pace.waited(clock() - start, len(chunk))
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
        raise MalformedBody(
            f"the body is cut short: nothing of it came for {round(seconds, 1):g} s"
        )
    if count < seconds * MIN_BYTES_PER_S:
        raise MalformedBody(
            f"the body comes too slowly: {count} bytes in {seconds:.3g} s; "
            f"allowed: at least {MIN_BYTES_PER_S} bytes a second"
        )

"""HTTP connections on which nobody can make the server keep bytes that belong to no body.

uvicorn takes request lines, headers and trailers of any length, and waits for them for ever, from
callers who have shown no token yet.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout_server.bodies import EXTENSION, LARGE_BYTES, LargeBody

KEEP_ALIVE_S = 75
"""Idle connections live so long: longer than clients and proxies keep them, or a request that is
sent just when the server closes its connection is lost."""
MAX_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """One connection; a head that is too long or does not come is the end of it."""

    _between = 0
    """Bytes since the last end of a head or piece of a body."""
    _in_head = True
    _large: LargeBody | None = None
    """What is not over of a large body."""
    _refusal: str | None = None
    """What is wrong with a head that the parser has nothing against."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.expect_more()

    def data_received(self, data: bytes) -> None:
        self._between += len(data)
        super().data_received(data)
        if self._between > MAX_HEAD_BYTES:
            self.send_400_response(f"A head has at most {MAX_HEAD_BYTES} bytes.")
        elif self._between and self._in_head and (not self.cycle or self.cycle.response_complete):
            self.expect_more()

    def expect_more(self) -> None:
        """Close the connection if nothing comes for as long as idle ones live."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def send_400_response(self, msg: str) -> None:
        """Answer what uvicorn's parser, or this class, refuses, and close the connection."""
        super().send_400_response(self._refusal or msg)

    def on_headers_complete(self) -> None:
        self._between, self._in_head = 0, False
        self._refuse_upgrade()
        super().on_headers_complete()
        encrypted = self.transport.get_extra_info("sslcontext") is not None
        if (size := self._announced_length()) >= LARGE_BYTES and not encrypted:
            self._large = LargeBody(self, self.cycle, size)
            self.scope["extensions"] = {EXTENSION: self._large}  # type: ignore[dict-item]

    def _refuse_upgrade(self) -> None:
        """Raise if the parser takes what follows for another protocol, and not for the body."""
        has_body = self._announced_length() or any(
            n == b"transfer-encoding" for n, _ in self.headers
        )
        if self.parser.should_upgrade() and has_body:
            self._refusal = "This is HTTP/1.1; a request with a body must not ask for an upgrade."
            raise ValueError(self._refusal)

    def _announced_length(self) -> int:
        headers = dict(self.headers)
        if b"transfer-encoding" in headers:
            return 0
        return int(headers.get(b"content-length", 0))  # else the parser has refused it

    def on_body(self, body: bytes) -> None:
        self._between = 0
        if self._large is not None:
            self._large.parsed(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._between, self._in_head, self._large = 0, True, None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._large is not None and self.cycle.response_complete:  # not an earlier request's
            self._large.abandon()
        super().on_response_complete()

    def body_ended(self) -> None:
        """A large body has been read to its end, of which the parser knows nothing."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._between, self._in_head, self._large = 0, True, None
        self.cycle.more_body = False
        self.cycle.message_event.set()
        self.transport.set_protocol(self)

"""HTTP connections on which nobody can make the server keep bytes that belong to no body.

uvicorn takes request lines, headers and trailers of any length, and waits for them for ever, from
callers who have shown no token yet.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

KEEP_ALIVE_S = 75
"""Idle connections live so long: longer than clients and proxies keep them, or a request that is
sent just when the server closes its connection is lost."""
MAX_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """One connection; a head that is too long or does not come is the end of it."""

    _between = 0
    """Bytes since the last end of a head or piece of a body."""
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_more()

    def data_received(self, data: bytes) -> None:
        self._between += len(data)
        super().data_received(data)
        if self._between > MAX_HEAD_BYTES:
            self.send_400_response(f"A head has at most {MAX_HEAD_BYTES} bytes.")
        elif self._between and self._in_head and (not self.cycle or self.cycle.response_complete):
            self._expect_more()

    def _expect_more(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def on_headers_complete(self) -> None:
        self._between, self._in_head = 0, False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._between = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._between, self._in_head = 0, True
        super().on_message_complete()

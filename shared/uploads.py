"""How checkpoints are sent: straight from the tensors' memory, and no further than is of use.

httpx copies every piece of a body, and reads no answer before all of it has been sent. Over plain
HTTP a body in pieces goes through a socket of its own instead; everything else goes through httpx.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import selectors
import socket
from collections.abc import Iterable, Mapping
from urllib.request import getproxies, proxy_bypass

import httpx

from shared.exchange import PIECES

Pieces = Iterable[bytes | memoryview]


def transport_to(url: str) -> Uploads | None:
    """A transport for a blocking client, or None where the environment names a proxy."""
    return None if _is_proxied(url) else Uploads(httpx.HTTPTransport())


def async_transport_to(url: str, limits: httpx.Limits) -> AsyncUploads | None:
    """The same for an asynchronous client."""
    return None if _is_proxied(url) else AsyncUploads(httpx.AsyncHTTPTransport(limits=limits))


def _is_proxied(url: str) -> bool:
    proxies = getproxies()
    return bool(proxies.get("http") or proxies.get("all")) and not proxy_bypass(httpx.URL(url).host)


class Uploads(httpx.BaseTransport):
    """Sends bodies in pieces by itself.

    Args:
        others: takes all other requests.
    """

    def __init__(self, others: httpx.BaseTransport) -> None:
        self._others = others

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        pieces = _pieces_of(request)
        if pieces is None:
            return self._others.handle_request(request)
        return _Upload(request).send(pieces)

    def close(self) -> None:
        """Close the connections."""
        self._others.close()


class AsyncUploads(httpx.AsyncBaseTransport):
    """The same, in threads: copying and hashing must not hold up the event loop."""

    def __init__(self, others: httpx.AsyncBaseTransport) -> None:
        self._others = others

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        pieces = _pieces_of(request)
        if pieces is None:
            return await self._others.handle_async_request(request)
        import asyncio  # takes longer to import than all the rest

        upload = _Upload(request)
        try:
            return await asyncio.to_thread(upload.send, pieces)
        finally:
            upload.give_up()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._others.aclose()


def _pieces_of(request: httpx.Request) -> Pieces | None:
    """The body, if it is one for a socket of its own."""
    plain = request.url.scheme == "http" and "content-length" in request.headers
    return request.extensions.get(PIECES) if plain else None


class _Upload:
    """One request, on a connection of its own."""

    def __init__(self, request: httpx.Request) -> None:
        self._request = request
        self._seconds: Mapping[str, float | None] = request.extensions.get("timeout", {})
        self._line: socket.socket | None = None

    def send(self, pieces: Pieces) -> httpx.Response:
        """Send it, and read the answer, which may come before its end.

        Raises:
            httpx.RequestError: there is none.
        """
        with self._connected() as self._line:
            self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._line.setblocking(False)
            with selectors.DefaultSelector() as selector:
                selector.register(self._line, selectors.EVENT_READ | selectors.EVENT_WRITE)
                for piece in itertools.chain([_head(self._request)], pieces):
                    if not self._sent(selector, memoryview(piece)):
                        break
            return self._answer(self._line)

    def give_up(self) -> None:
        """Nobody waits for it any more, if it has not ended."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)

    def _connected(self) -> socket.socket:
        address = self._request.url.host, self._request.url.port or 80
        try:
            return socket.create_connection(address, self._seconds.get("connect"))
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error

    def _sent(self, selector: selectors.BaseSelector, rest: memoryview) -> bool:
        """Send some bytes; False if there is something to be read instead."""
        assert self._line is not None
        while rest:
            ready = selector.select(self._seconds.get("write"))
            if not ready:
                raise httpx.WriteTimeout("nothing was taken for too long")
            if ready[0][1] & selectors.EVENT_READ:
                return False
            try:
                rest = rest[self._line.send(rest) :]
            except OSError:  # it has gone, but may have said why
                return False
        return True

    def _answer(self, line: socket.socket) -> httpx.Response:
        line.settimeout(self._seconds.get("read"))
        answer = http.client.HTTPResponse(line, method=self._request.method)
        try:
            with answer:
                answer.begin()
                body = httpx.ByteStream(answer.read())
                return httpx.Response(answer.status, headers=answer.getheaders(), stream=body)
        except TimeoutError as error:
            raise httpx.ReadTimeout("no answer came") from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        except http.client.HTTPException as error:
            raise httpx.RemoteProtocolError(f"not an answer: {error!r}") from error


def _head(request: httpx.Request) -> bytes:
    fields = [b"%s: %s" % (name, value) for name, value in request.headers.raw]
    start = b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)
    if any(b"\r" in line or b"\n" in line for line in (start, *fields)):
        raise httpx.LocalProtocolError("a header has a line break in it")
    return b"\r\n".join([start, *fields, b"", b""])

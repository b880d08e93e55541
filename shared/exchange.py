"""What the clients have in common: addressing, reading answers, and sending again.

A request is sent again only when that can do no harm: no connection was made, the server answered
that it did not start, or the request has a key under which the server knows what it did.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from shared.codec import decode, media_type
from shared.errors import (
    EngineUnavailable,
    InvalidRequest,
    MalformedBody,
    Overloaded,
    Problem,
    ServerUnreachable,
    TitoError,
    from_wire,
)
from shared.protocol import FRAMES, MSGPACK

if TYPE_CHECKING:
    import httpx

DELAYS_S = (0.25, 0.5, 1.0)
PIECES = "tito.pieces"
"""The extension of a request that has its body in pieces."""
POLL_S = 0.25
_MAX_DELAY_S = 60.0
_TOKEN = re.compile(r"[!-~]+")
_USERINFO = re.compile(r"//[^/]*@")


class Exchange:
    """What both clients share: how requests are addressed and answers are read."""

    def __init__(self, url: str, token: str | None, timeout: float | None) -> None:
        import httpx

        # Errors name the address, but no token in it: http://any:TOKEN@host.
        self.url = _USERINFO.sub("//", url.rstrip("/"))
        headers = {"accept": MSGPACK}
        if token is not None:
            headers["authorization"] = f"Bearer {_sendable(token)}"
        self.options: dict[str, Any] = {
            "base_url": url.rstrip("/"),
            "headers": headers,
            "timeout": httpx.Timeout(timeout, connect=10.0),
        }

    def read(self, response: httpx.Response) -> Any:
        """The decoded body of a success.

        Raises:
            TitoError: what the body of an error describes.
            MalformedBody: the body of a success cannot be read.
            ServerUnreachable: an error, and not of this protocol.
        """
        content_type = media_type(response.headers.get("content-type", ""))
        try:
            document = decode(response.content, content_type)
        except TitoError as error:
            if response.is_success:
                raise MalformedBody(f"{self.url}: {error}") from None
            document = response.text
        if response.is_success:
            return document
        raise from_wire(document, status=response.status_code)

    def is_stream(self, response: httpx.Response) -> bool:
        """Whether frames follow."""
        content_type = media_type(response.headers.get("content-type", ""))
        return response.is_success and content_type == FRAMES

    def refuse(self, response: httpx.Response) -> NoReturn:
        """Raise what an answer says that should have been a stream."""
        self.read(response)
        raise MalformedBody(f"{self.url}: a stream was asked for, and a document came")

    @contextlib.contextmanager
    def reaching(self) -> Iterator[None]:
        """Within it, a failed connection is raised as ServerUnreachable, with httpx's as cause."""
        import httpx

        try:
            yield
        except httpx.RequestError as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(f"no answer from {self.url}: {reason}") from error


def in_pieces(body: object) -> dict[str, Any]:
    """What httpx must be told of a body so that :mod:`shared.uploads` sees that it is one."""
    return {} if body is None or isinstance(body, bytes) else {"extensions": {PIECES: body}}


def _sendable(token: str) -> str:
    """A token without the line end of the file that it was read from.

    Raises:
        InvalidRequest: no header can carry it. httpx would say so too, and show it.
    """
    token = token.strip()
    if not _TOKEN.fullmatch(token):
        problem = Problem("token", "other characters, or none", "visible ASCII characters")
        raise InvalidRequest("the token cannot be sent", problems=[problem])
    return token


class Patience:
    """How often a request is sent again, and how long to wait before.

    Args:
        repeatable: whether it is sent again, a few times in a row, when nothing was done.
        retries: times in a row that it is sent again when the connection was lost, or when nothing
            was done even then.
    """

    def __init__(self, repeatable: bool, retries: int) -> None:
        self._most = (len(DELAYS_S) if repeatable else 0), retries
        self.renew()

    def renew(self) -> None:
        """Something has arrived."""
        self._left = list(self._most)
        self._tries = 0

    def pause(self, error: TitoError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            TitoError: the error itself; there is none.
        """
        did_nothing = _did_nothing(error)
        may = (did_nothing, did_nothing or isinstance(error, ServerUnreachable))
        which = next((i for i in (0, 1) if may[i] and self._left[i]), None)
        if which is None:
            raise error
        self._left[which] -= 1
        delay = DELAYS_S[min(self._tries, len(DELAYS_S) - 1)]
        self._tries += 1
        return _pause(error, delay)


def _did_nothing(error: TitoError) -> bool:
    """Whether it is certain that the server did nothing with the request."""
    if isinstance(error, EngineUnavailable | Overloaded):
        return error.retry_after is not None
    import httpx

    return isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)


def _pause(error: TitoError, delay: float) -> float:
    """Seconds to wait: what the server asks for, within reason, or else our own delay."""
    return delay if error.retry_after is None else min(max(error.retry_after, 0.0), _MAX_DELAY_S)

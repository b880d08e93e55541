"""What the clients have in common: addressing, reading answers, and sending again.

A request is sent again only when that can do no harm: no connection was made, the server answered
that it did not start, or the request has a key under which the server knows what it did.
"""

from __future__ import annotations

from typing import Any, NoReturn

import httpx

from shared.codec import decode, media_type
from shared.errors import (
    EngineUnavailable,
    MalformedBody,
    Overloaded,
    ServerUnreachable,
    TitoError,
    from_wire,
)
from shared.protocol import FRAMES, MSGPACK

DELAYS_S = (0.25, 0.5, 1.0)
_MAX_DELAY_S = 60.0


class Exchange:
    """What both clients share: how requests are addressed and answers are read."""

    def __init__(self, url: str, token: str | None, timeout: float | None) -> None:
        self.url = url.rstrip("/")
        headers = {"accept": MSGPACK}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        self.options: dict[str, Any] = {
            "base_url": self.url,
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

    def unreachable(self, error: httpx.RequestError) -> ServerUnreachable:
        """What a failed connection is raised as; the caller sets the cause."""
        reason = str(error) or type(error).__name__
        return ServerUnreachable(f"no answer from {self.url}: {reason}")


class Patience:
    """How often a request is sent again, and how long to wait before.

    Args:
        repeatable: whether it is sent again, a few times in a row, when nothing was done.
        retries: times in a row that it is sent again when the connection was lost.
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
        which = 0 if _did_nothing(error) else 1
        if not self._left[which] or (which and not isinstance(error, ServerUnreachable)):
            raise error
        self._left[which] -= 1
        delay = DELAYS_S[min(self._tries, len(DELAYS_S) - 1)]
        self._tries += 1
        return _pause(error, delay)


def _did_nothing(error: TitoError) -> bool:
    """Whether it is certain that the server did nothing with the request."""
    if isinstance(error, EngineUnavailable | Overloaded):
        return error.retry_after is not None
    return isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)


def _pause(error: TitoError, delay: float) -> float:
    """Seconds to wait: what the server asks for, within reason, or else our own delay."""
    return delay if error.retry_after is None else min(max(error.retry_after, 0.0), _MAX_DELAY_S)

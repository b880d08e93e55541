"""Holding a policy's lease: the right to publish it, kept alive while a trainer works.

    with client.lease("default", ttl=30) as lease:
        client.reload(tensors, fence=lease.fence)

A thread (a task, for the asynchronous client) sends a heartbeat every third of the time to live.
``lease.fence`` raises Conflict as soon as the lease is known to be lost, or could be because no
heartbeat was answered for its whole life; the server would refuse the publish anyway, but only
after an upload. A heartbeat proves that the process lives, not that it makes progress.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self
from urllib.parse import quote

from shared.codec import encode
from shared.errors import (
    Conflict,
    EngineFailure,
    EngineUnavailable,
    InsufficientStorage,
    MalformedBody,
    ServerUnreachable,
    TitoError,
)
from shared.protocol import MSGPACK

_BEATS_PER_TTL = 3
_RETRY_S = 1.0
# What a later heartbeat may mend; any other refusal means that the lease is lost.
_PASSING = (ServerUnreachable, EngineUnavailable, EngineFailure, InsufficientStorage)


Send = Callable[..., Any]
"""Sends one request, ``(method, path, **options of httpx)``; raises TitoError."""


def default_holder() -> str:
    """A name that no other process has, and that says where to look for this one."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"[-128:]


class Held:
    """What is known of a lease: its number, and until when it surely lives."""

    def __init__(self, policy: str, holder: str | None, ttl: float, wait: float) -> None:
        self.policy = policy
        self.holder = holder or default_holder()
        self.ttl = ttl
        self._wait = wait
        self._fence: int | None = None
        self._alive_until = 0.0
        self._lost: TitoError | None = None

    @property
    def fence(self) -> int:
        """The fencing number, for the ``fence`` argument of a publish.

        Raises:
            Conflict: the lease is lost, or nobody knows whether it is.
        """
        if self._fence is None:
            raise Conflict(f"the lease of policy {self.policy!r} is not held; enter it first")
        if self._lost is not None:
            reason = f"the lease of policy {self.policy!r} was lost: {self._lost.message}"
            raise Conflict(reason, details=self._lost.details)
        if time.monotonic() > self._alive_until:
            reason = f"no heartbeat of policy {self.policy!r} was answered for {self.ttl} s"
            raise Conflict(reason, details={"fence": self._fence, "holder": self.holder})
        return self._fence

    @property
    def _beat_s(self) -> float:
        return self.ttl / _BEATS_PER_TTL

    def _acquiring(self) -> dict[str, Any]:
        return _post({"holder": self.holder, "ttl_seconds": self.ttl})

    def _renewing(self) -> dict[str, Any]:
        # An answer that takes longer is of no use, and would hold up the next heartbeat.
        return {**_post({"fence": self._fence}), "timeout": self._beat_s}

    def _acquired(self, document: Any, sent_at: float) -> None:
        try:
            self._fence = int(document["fence"])
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedBody(f"not an answer about a lease: {error!r}") from None
        self._lost = None
        self._renewed(sent_at)

    def _renewed(self, sent_at: float) -> None:
        # The server counts from when it answered, which is later: this errs on the safe side.
        self._alive_until = sent_at + self.ttl

    def _failed(self, error: TitoError) -> bool:
        """Note a heartbeat that failed; whether there is any sense in a next one."""
        if not isinstance(error, _PASSING):
            self._lost = error
        return self._lost is None

    def _pause(self, error: Conflict, deadline: float) -> float:
        """Seconds until somebody else's lease may be free; raises the error if that is too long."""
        left = deadline - time.monotonic()
        if error.retry_after is None or left <= 0:
            raise error
        return min(error.retry_after, left, _RETRY_S)

    def _path(self) -> str:
        return f"/policies/{quote(self.policy, safe='')}/lease"

    def _releasing(self) -> str:
        return f"{self._path()}?fence={self._fence}"


class Lease(Held):
    """A lease as a context manager; made by :meth:`shared.client.RolloutClient.lease`.

    Args:
        send: sends one request.
        policy: which one to write.
        holder: a name to show; the same name of the same caller takes an earlier lease over.
        ttl: seconds that it lives without a heartbeat.
        wait: seconds to wait for somebody else's lease to end.
    """

    def __init__(
        self, send: Send, policy: str, *, holder: str | None = None, ttl: float, wait: float = 0.0
    ) -> None:
        super().__init__(policy, holder, ttl, wait)
        self._send = send
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._wait
        while True:
            sent_at = time.monotonic()
            try:
                self._acquired(self._send("POST", self._path(), **self._acquiring()), sent_at)
                break
            except Conflict as error:
                time.sleep(self._pause(error, deadline))
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="tito-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        self._thread = None
        if self._lost is None:
            # Whatever goes wrong here, the lease ends by itself.
            with contextlib.suppress(TitoError):
                self._send("DELETE", self._releasing(), timeout=self._beat_s)
        self._fence = None

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_s):
            sent_at = time.monotonic()
            try:
                self._send("POST", f"{self._path()}/renew", **self._renewing())
                self._renewed(sent_at)
            except TitoError as error:
                if not self._failed(error):
                    return


def _post(document: dict[str, Any]) -> dict[str, Any]:
    return {"content": encode(document, MSGPACK), "headers": {"content-type": MSGPACK}}

"""A lease of the asynchronous client; see :mod:`shared.lease`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

from shared.errors import Conflict, TitoError
from shared.lease import Held

AsyncSend = Callable[..., Awaitable[Any]]


class AsyncLease(Held):
    """Asynchronous twin of :class:`shared.lease.Lease`.

    Heartbeats stop while the event loop is blocked.
    """

    def __init__(
        self,
        send: AsyncSend,
        policy: str,
        *,
        holder: str | None = None,
        ttl: float,
        wait: float = 0.0,
    ) -> None:
        super().__init__(policy, holder, ttl, wait)
        self._send = send
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        deadline = time.monotonic() + self._wait
        while True:
            sent_at = time.monotonic()
            try:
                self._acquired(await self._send("POST", self._path(), **self._acquiring()), sent_at)
                break
            except Conflict as error:
                await asyncio.sleep(self._pause(error, deadline))
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None
        if self._lost is None:
            with contextlib.suppress(TitoError):
                await self._send("DELETE", self._releasing(), timeout=self._beat_s)
        self._fence = None

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            sent_at = time.monotonic()
            try:
                await self._send("POST", f"{self._path()}/renew", **self._renewing())
                self._renewed(sent_at)
            except TitoError as error:
                if not self._failed(error):
                    return

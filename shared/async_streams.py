"""Streamed rollouts of the asynchronous client; see :mod:`shared.streams`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Self

import httpx

from shared import calls
from shared.errors import ServerUnreachable, TitoError
from shared.exchange import Exchange, Patience
from shared.incoming import Incoming
from shared.protocol import Group
from shared.streams import CANCEL_S, Stream


class AsyncRolloutStream(Stream):
    """Asynchronous twin of :class:`shared.streams.RolloutStream`.

    Leave it with ``async with`` or ``aclose``.
    """

    def __init__(
        self, http: httpx.AsyncClient, exchange: Exchange, incoming: Incoming, retries: int
    ) -> None:
        super().__init__(incoming)
        self._groups = _groups(http, exchange, incoming, Patience(True, retries))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        return await anext(self._groups)

    async def aclose(self) -> None:
        """Close the connection; unfinished work is cancelled."""
        await self._groups.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _groups(
    http: httpx.AsyncClient, exchange: Exchange, incoming: Incoming, patience: Patience
) -> AsyncGenerator[Group, None]:
    try:
        while not incoming.has_ended():
            try:
                async with _connected(http, exchange, incoming) as chunks:
                    async for chunk in chunks:
                        for group in incoming.feed(chunk):
                            patience.renew()
                            yield group
                incoming.check_ended()
            except TitoError as error:
                if not incoming.has_ended() or not isinstance(error, ServerUnreachable):
                    await asyncio.sleep(patience.pause(error))
    except (GeneratorExit, asyncio.CancelledError):
        if incoming.key is not None:  # its work would go on for a while
            call = calls.cancel_rollout(incoming.key)
            with contextlib.suppress(ServerUnreachable), exchange.reaching():
                await http.request(call.method, call.path, headers=call.headers, timeout=CANCEL_S)
        raise


@contextlib.asynccontextmanager
async def _connected(
    http: httpx.AsyncClient, exchange: Exchange, incoming: Incoming
) -> AsyncIterator[AsyncIterator[bytes]]:
    with exchange.reaching():
        async with http.stream(**incoming.request()) as response:
            if not exchange.is_stream(response):
                await response.aread()
                exchange.refuse(response)
            yield response.aiter_bytes()

"""The asynchronous twin of :mod:`shared.client`, which gives it out as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from shared import calls, channel, parts, tracing
from shared.async_lease import AsyncLease
from shared.async_streams import AsyncRolloutStream
from shared.calls import Call, Pieces, PromptLike, Target
from shared.errors import Conflict, EngineUnavailable, ServerUnreachable, TitoError
from shared.exchange import POLL_S, Exchange, Patience, in_pieces
from shared.incoming import Incoming, new_key
from shared.protocol import (
    DEFAULT_POLICY,
    ReloadResult,
    Rollout,
    Sample,
    Score,
    ServerInfo,
)
from shared.resume import Continuation, Resumption, joined
from shared.uploads import async_transport_to

if TYPE_CHECKING:
    from shared.arrays import IdArray
    from shared.channel import Channel
    from shared.delta_sender import DeltaBase
    from shared.weights import LazyTensor, TensorSpec

_PIECES_AT_ONCE = 4

T = TypeVar("T")


class AsyncRolloutClient:
    """Asynchronous twin of :class:`shared.client.RolloutClient`: the same arguments and errors."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float | None = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._exchange = Exchange(url, token, timeout)
        # Thousands of prompts may be in flight, each waiting on a connection of its own.
        limits = httpx.Limits(max_connections=None)
        transport = transport or async_transport_to(self._exchange.url, limits)
        hooks = {"request": [tracing.carry_async]}
        self._http = httpx.AsyncClient(
            **self._exchange.options, transport=transport, limits=limits, event_hooks=hooks
        )

    async def rollout(
        self,
        prompts: Sequence[PromptLike],
        *,
        resume_aborted: bool = False,
        retries: int = 0,
        **settings: Any,
    ) -> Rollout:
        """See :meth:`shared.client.RolloutClient.rollout`."""
        resumption = Resumption(prompts, settings) if resume_aborted else None
        rollout = await self._call(calls.rollout(prompts, settings, new_key(retries)), retries)
        while resumption is not None and (left := resumption.of(rollout)):
            finished = await asyncio.gather(*(self._continue(c, retries) for c in left))
            rollout = joined(
                rollout, {id(c.sample): s for c, s in zip(left, finished, strict=True)}
            )
        return rollout

    async def _continue(self, continuation: Continuation, retries: int) -> Sample:
        call = calls.rollout([continuation.prompt], continuation.settings, new_key(retries))
        return (await self._call(call, retries)).samples[0]

    def rollout_stream(
        self, prompts: Sequence[PromptLike], *, retries: int = 0, **settings: Any
    ) -> AsyncRolloutStream:
        """See :meth:`shared.client.RolloutClient.rollout_stream`; an asynchronous iterator."""
        incoming = Incoming(prompts, settings, new_key(retries))
        return AsyncRolloutStream(self._http, self._exchange, incoming, retries)

    async def score(
        self,
        prompts: Sequence[Sequence[int] | IdArray],
        completions: Sequence[Sequence[int] | IdArray],
        *,
        policy: str = DEFAULT_POLICY,
    ) -> list[Score]:
        """See :meth:`shared.client.RolloutClient.score`."""
        return await self._call(calls.score(prompts, completions, policy))

    async def reload(
        self,
        tensors: Sequence[LazyTensor],
        *,
        base: DeltaBase | None = None,
        adapter_config: Mapping[str, Any] | None = None,
        **target: Any,
    ) -> ReloadResult:
        """See :meth:`shared.client.RolloutClient.reload`."""
        to = Target(**target)
        if base is None:
            return await self._reload_whole(tensors, to, adapter_config)
        result = await self._try_delta(tensors, to, base)
        if result is None:
            result = await self._reload_whole(base.record(tensors), to, None)
        await asyncio.to_thread(base.commit)
        return result

    async def _reload_whole(
        self,
        tensors: Sequence[LazyTensor],
        to: Target,
        adapter_config: Mapping[str, Any] | None,
    ) -> ReloadResult:
        if adapter_config is None and parts.are_worth_it(tensors, to):
            cut = parts.Parts(tensors, await self.info())
            if len(cut.parts) > 1:
                return await parts.publish_async(self._call, cut, to)
        return await self._call(calls.reload_stream(tensors, to, adapter_config))

    async def _try_delta(
        self, tensors: Sequence[LazyTensor], to: Target, base: DeltaBase
    ) -> ReloadResult | None:
        if not base.covers(tensors):
            return None
        try:
            return await self._call(calls.reload_delta(tensors, to, base))
        except Conflict as error:
            if not calls.is_other_base(error):
                raise
            return None

    async def reload_path(
        self, path: str | Path, *, digest: str | None = None, **target: Any
    ) -> ReloadResult:
        """See :meth:`shared.client.RolloutClient.reload_path`."""
        return await self._call(calls.reload_path(path, Target(**target), digest))

    async def open_channel(
        self, kind: str, specs: Sequence[TensorSpec], *, fence: int | None = None
    ) -> Channel:
        """See :meth:`shared.client.RolloutClient.open_channel`."""
        return await self._call(channel.open_channel(kind, specs, fence=fence))

    async def await_channel(self, id: str, wait: float = 60.0) -> str:
        """See :meth:`shared.client.RolloutClient.await_channel`."""
        return await self._call(channel.await_channel(id, wait))

    async def reload_channel(
        self, id: str, *, durable: bool = False, **target: Any
    ) -> ReloadResult:
        """See :meth:`shared.client.RolloutClient.reload_channel`."""
        return await self._call(channel.reload_channel(id, Target(**target), durable=durable))

    async def close_channel(self, id: str) -> None:
        """See :meth:`shared.client.RolloutClient.close_channel`."""
        await self._call(channel.close_channel(id))

    async def reset(self, **target: Any) -> ReloadResult:
        """See :meth:`shared.client.RolloutClient.reset`."""
        return await self._call(calls.reset(Target(**target)))

    async def policy(self, name: str = DEFAULT_POLICY) -> dict[str, Any]:
        """See :meth:`shared.client.RolloutClient.policy`."""
        return await self._call(calls.policy(name))

    async def delete_policy(self, name: str) -> None:
        """See :meth:`shared.client.RolloutClient.delete_policy`."""
        await self._call(calls.delete_policy(name))

    async def report_rewards(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """See :meth:`shared.client.RolloutClient.report_rewards`."""
        return await self._call(calls.report_rewards(groups))

    async def look(self, path: str, **query: str) -> dict[str, Any]:
        """See :meth:`shared.client.RolloutClient.look`."""
        return await self._call(calls.look(path, query))

    def lease(
        self,
        policy: str = DEFAULT_POLICY,
        *,
        holder: str | None = None,
        ttl: float = 30.0,
        wait: float = 0.0,
    ) -> AsyncLease:
        """See :meth:`shared.client.RolloutClient.lease`; enter it with ``async with``."""
        return AsyncLease(self._send, policy, holder=holder, ttl=ttl, wait=wait)

    async def sleep(self, level: int, *, fence: int | None = None) -> None:
        """See :meth:`shared.client.RolloutClient.sleep`."""
        await self._call(calls.sleep(level, fence))

    async def wake_up(self, memory: str | None = None) -> None:
        """See :meth:`shared.client.RolloutClient.wake_up`."""
        await self._call(calls.wake_up(memory))

    async def info(self) -> ServerInfo:
        """See :meth:`shared.client.RolloutClient.info`."""
        return await self._call(calls.info())

    async def wait_ready(self, timeout: float = 300.0) -> ServerInfo:  # noqa: ASYNC109 - as the twin
        """See :meth:`shared.client.RolloutClient.wait_ready`."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                await self._call(calls.ready())
                return await self.info()
            except (ServerUnreachable, EngineUnavailable):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(POLL_S)

    async def _call(self, call: Call[T], retries: int = 0) -> T:
        patience = Patience(call.repeatable, retries)
        while True:
            try:
                return await self._send_once(call)
            except TitoError as error:
                await asyncio.sleep(patience.pause(error))

    async def _send_once(self, call: Call[T]) -> T:
        body = None if call.body is None else call.body()
        request = {"headers": call.headers, "params": call.params, **in_pieces(body)}
        content = body if body is None or isinstance(body, bytes) else _in_threads(body)
        return call.read(await self._send(call.method, call.path, content=content, **request))

    async def _send(self, method: str, path: str, **request: Any) -> Any:
        with self._exchange.reaching():
            return self._exchange.read(await self._http.request(method, path, **request))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _in_threads(pieces: Pieces) -> AsyncIterator[bytes | memoryview]:
    """Produce pieces in a worker thread: copying and hashing must not hold up the loop."""
    while some := await asyncio.to_thread(lambda: list(islice(pieces, _PIECES_AT_ONCE))):
        for piece in some:
            yield piece

"""Clients for the rollout server: what a trainer, or any other tool, calls.

    with RolloutClient("http://127.0.0.1:8300") as client:
        rollout = client.rollout(["2 + 2 ="], group_size=4, max_tokens=8)
        for sample in rollout.samples:
            print(sample.group_id, sample.completion_ids, sample.text)

:class:`AsyncRolloutClient` is the same with ``await``. Both raise the exceptions of
:mod:`shared.errors`. A request is sent again only when that can do no harm: no connection was made,
or the server answered that it did not start. An answer lost half-way is never asked for again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from shared.codec import decode, encode, media_type, rollout_from_wire
from shared.errors import EngineUnavailable, MalformedBody, ServerUnreachable, TitoError, from_wire
from shared.lease import AsyncLease, Lease
from shared.protocol import (
    DEFAULT_POLICY,
    DIGEST_HEADER,
    DIGEST_TRAILER,
    FENCE_HEADER,
    MSGPACK,
    PROTOCOL_VERSION,
    SAFETENSORS,
    ReloadResult,
    Rollout,
    ServerInfo,
)
from shared.weights import LazyTensor, stream_checkpoint, stream_length

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]]

_ATTEMPTS = 4
_FIRST_DELAY_S = 0.25
_POLL_S = 0.25


class _Exchange:
    """What both clients share: how requests are written and answers are read."""

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
        """The decoded body, or the exception that it describes."""
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

    def unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        reason = str(error) or type(error).__name__
        return ServerUnreachable(f"no answer from {self.url}: {reason}")


def _rollout_body(prompts: Sequence[PromptLike], settings: Mapping[str, Any]) -> bytes:
    return encode({"prompts": _plain(prompts), "packed": True, **settings}, MSGPACK)


def _plain(value: Any) -> Any:
    """Tuples, mappings and numpy arrays as the lists and dicts that msgpack writes."""
    if isinstance(value, str | int | float | bytes) or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value]


def _info_from_wire(document: Any) -> ServerInfo:
    try:
        info = ServerInfo(**{name: document[name] for name in ServerInfo.__dataclass_fields__})
    except (KeyError, TypeError) as error:
        raise MalformedBody(f"not an /info answer: {error!r}") from None
    if info.protocol != PROTOCOL_VERSION:
        raise ServerUnreachable(
            f"the server speaks protocol {info.protocol}, this client {PROTOCOL_VERSION}"
        )
    return info


def _reload_from_wire(document: Any) -> ReloadResult:
    return ReloadResult(document["version"], document["digest"], document["timings"])


def _reload_headers(tensors: Sequence[LazyTensor]) -> dict[str, str]:
    return {
        "content-type": SAFETENSORS,
        "content-length": str(stream_length(tensors)),
        DIGEST_HEADER: DIGEST_TRAILER,
    }


def _fence_header(fence: int | None) -> dict[str, str]:
    return {} if fence is None else {FENCE_HEADER: str(fence)}


def _delays() -> Iterator[float]:
    """Seconds to wait before each further attempt."""
    for attempt in range(_ATTEMPTS - 1):
        yield _FIRST_DELAY_S * 2**attempt


def _may_retry(error: BaseException) -> bool:
    """Whether it is certain that the server did nothing with the request."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) or (
        isinstance(error, EngineUnavailable) and error.retry_after is not None
    )


class RolloutClient:
    """Blocking client. Thread-safe; close it or use it as a context manager.

    Args:
        url: where the server listens, e.g. ``http://127.0.0.1:8300``.
        token: bearer token, if the server asks for one.
        timeout: seconds without any byte after which a request fails; None waits for ever.
        transport: an httpx transport, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float | None = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._exchange = _Exchange(url, token, timeout)
        self._http = httpx.Client(**self._exchange.options, transport=transport)

    def rollout(self, prompts: Sequence[PromptLike], **settings: Any) -> Rollout:
        """Sample ``group_size`` completions of each prompt.

        Args:
            prompts: each a string, a list of token ids, or a list of chat messages.
            settings: fields of :class:`shared.protocol.RolloutRequest`, e.g. ``group_size``,
                ``max_tokens``, ``temperature``, ``stop``, ``purpose``.

        Raises:
            InvalidRequest: a field is wrong; nothing was run.
            EngineUnavailable: the server cannot generate, and went on saying so.
        """
        body = _rollout_body(prompts, settings)
        headers = {"content-type": MSGPACK}
        return rollout_from_wire(self._send("POST", "/rollout", content=body, headers=headers))

    def reload(self, tensors: Sequence[LazyTensor], *, fence: int | None = None) -> ReloadResult:
        """Publish new weights, streamed tensor by tensor with their digest.

        Args:
            tensors: the whole checkpoint.
            fence: number of the lease under which it is published; see :meth:`lease`.

        Raises:
            WeightsRejected: verification failed; the live policy is as it was.
            Conflict: somebody else has the lease; the live policy is as it was.
        """
        headers = _reload_headers(tensors) | _fence_header(fence)
        document = self._send_once(
            "POST", "/reload", content=stream_checkpoint(tensors), headers=headers
        )
        return _reload_from_wire(document)

    def reload_path(
        self, path: str | Path, *, digest: str | None = None, fence: int | None = None
    ) -> ReloadResult:
        """Publish a checkpoint that the server can read: a .safetensors file or a directory."""
        body = encode({"path": str(path), "digest": digest}, MSGPACK)
        headers = {"content-type": MSGPACK} | _fence_header(fence)
        return _reload_from_wire(self._send_once("POST", "/reload", content=body, headers=headers))

    def lease(
        self,
        policy: str = DEFAULT_POLICY,
        *,
        holder: str | None = None,
        ttl: float = 30.0,
        wait: float = 0.0,
    ) -> Lease:
        """The right to publish a policy, as a context manager that keeps it alive.

        Args:
            policy: which one.
            holder: a name to show; the same name of the same caller takes an earlier lease over.
            ttl: seconds after which the policy is free if this process dies.
            wait: seconds to wait for somebody else's lease to end.

        Raises (on entry):
            Conflict: somebody else holds it; ``details`` says who, and for how long.
        """
        return Lease(self._send_once, policy, holder=holder, ttl=ttl, wait=wait)

    def info(self) -> ServerInfo:
        """Model, tokenizer, live version and limits."""
        return _info_from_wire(self._send("GET", "/info"))

    def wait_ready(self, timeout: float = 300.0) -> ServerInfo:
        """Wait until the server can generate.

        Raises:
            ServerUnreachable, EngineUnavailable: it still could not after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._send_once("GET", "/readyz")
                return self.info()
            except (ServerUnreachable, EngineUnavailable):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)

    def _send(self, method: str, path: str, **request: Any) -> Any:
        for delay in _delays():
            try:
                return self._send_once(method, path, **request)
            except TitoError as error:
                if not _may_retry(error.__cause__ or error):
                    raise
                time.sleep(error.retry_after or delay)
        return self._send_once(method, path, **request)

    def _send_once(self, method: str, path: str, **request: Any) -> Any:
        try:
            return self._exchange.read(self._http.request(method, path, **request))
        except httpx.TransportError as error:
            raise self._exchange.unreachable(error) from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncRolloutClient:
    """Asynchronous twin of :class:`RolloutClient`, with the same arguments and errors."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float | None = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._exchange = _Exchange(url, token, timeout)
        # Thousands of prompts may be in flight, each waiting on a connection of its own.
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(**self._exchange.options, transport=transport, limits=limits)

    async def rollout(self, prompts: Sequence[PromptLike], **settings: Any) -> Rollout:
        """See :meth:`RolloutClient.rollout`."""
        body = _rollout_body(prompts, settings)
        headers = {"content-type": MSGPACK}
        document = await self._send("POST", "/rollout", content=body, headers=headers)
        return rollout_from_wire(document)

    async def reload(
        self, tensors: Sequence[LazyTensor], *, fence: int | None = None
    ) -> ReloadResult:
        """See :meth:`RolloutClient.reload`."""
        document = await self._send_once(
            "POST",
            "/reload",
            content=_in_threads(stream_checkpoint(tensors)),
            headers=_reload_headers(tensors) | _fence_header(fence),
        )
        return _reload_from_wire(document)

    async def reload_path(
        self, path: str | Path, *, digest: str | None = None, fence: int | None = None
    ) -> ReloadResult:
        """See :meth:`RolloutClient.reload_path`."""
        body = encode({"path": str(path), "digest": digest}, MSGPACK)
        headers = {"content-type": MSGPACK} | _fence_header(fence)
        document = await self._send_once("POST", "/reload", content=body, headers=headers)
        return _reload_from_wire(document)

    def lease(
        self,
        policy: str = DEFAULT_POLICY,
        *,
        holder: str | None = None,
        ttl: float = 30.0,
        wait: float = 0.0,
    ) -> AsyncLease:
        """See :meth:`RolloutClient.lease`; enter it with ``async with``."""
        return AsyncLease(self._send_once, policy, holder=holder, ttl=ttl, wait=wait)

    async def info(self) -> ServerInfo:
        """See :meth:`RolloutClient.info`."""
        return _info_from_wire(await self._send("GET", "/info"))

    async def wait_ready(self, timeout: float = 300.0) -> ServerInfo:  # noqa: ASYNC109 - as the twin
        """See :meth:`RolloutClient.wait_ready`."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                await self._send_once("GET", "/readyz")
                return await self.info()
            except (ServerUnreachable, EngineUnavailable):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_POLL_S)

    async def _send(self, method: str, path: str, **request: Any) -> Any:
        for delay in _delays():
            try:
                return await self._send_once(method, path, **request)
            except TitoError as error:
                if not _may_retry(error.__cause__ or error):
                    raise
                await asyncio.sleep(error.retry_after or delay)
        return await self._send_once(method, path, **request)

    async def _send_once(self, method: str, path: str, **request: Any) -> Any:
        try:
            return self._exchange.read(await self._http.request(method, path, **request))
        except httpx.TransportError as error:
            raise self._exchange.unreachable(error) from error

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _in_threads(
    pieces: Iterator[bytes | memoryview],
) -> AsyncIterator[bytes | memoryview]:
    """Produce each piece in a worker thread: copying and hashing must not hold up the loop."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece

"""Clients for the rollout server: what a trainer, or any other tool, calls.

    with RolloutClient("http://127.0.0.1:8300") as client:
        rollout = client.rollout(["2 + 2 ="], group_size=4, max_tokens=8)
        for sample in rollout.samples:
            print(sample.group_id, sample.completion_ids, sample.text)

:class:`AsyncRolloutClient` is the same with ``await``. Both raise the exceptions of
:mod:`shared.errors`. A request is sent again only when that can do no harm: no connection was made,
or the server answered that it did not start. An answer lost half-way is asked for again only with
``retries``: the rollout then has a key, under which the server goes on with it, or keeps it.

Importing this is quick: httpx is imported when a client is made, numpy when arrays arrive, and
asyncio with :class:`AsyncRolloutClient`, which is in :mod:`shared.async_client`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from shared import calls, channel, tracing
from shared.calls import Call, PromptLike, Target
from shared.errors import Conflict, EngineUnavailable, ServerUnreachable, TitoError
from shared.exchange import POLL_S, Exchange, Patience, in_pieces
from shared.incoming import Incoming, new_key
from shared.lease import Lease
from shared.protocol import (
    DEFAULT_POLICY,
    ReloadResult,
    Rollout,
    Sample,
    Score,
    ServerInfo,
)
from shared.resume import Continuation, Resumption, joined
from shared.streams import RolloutStream

if TYPE_CHECKING:
    import httpx

    from shared.arrays import IdArray
    from shared.async_client import AsyncRolloutClient as AsyncRolloutClient  # noqa: PLC0414
    from shared.channel import Channel
    from shared.delta_sender import DeltaBase
    from shared.weights import LazyTensor, TensorSpec

_RESUMED_AT_ONCE = 64

T = TypeVar("T")


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
        import httpx

        from shared.uploads import transport_to

        self._exchange = Exchange(url, token, timeout)
        hooks = {"request": [tracing.carry]}
        transport = transport or transport_to(self._exchange.url)
        self._http = httpx.Client(**self._exchange.options, transport=transport, event_hooks=hooks)

    def rollout(
        self,
        prompts: Sequence[PromptLike],
        *,
        resume_aborted: bool = False,
        retries: int = 0,
        **settings: Any,
    ) -> Rollout:
        """Sample ``group_size`` completions of each prompt.

        Args:
            prompts: each a string, a list of token ids, a list of chat messages, or a map with
                ``token_ids`` and ``completion_from``: ids, the last of which are a completion.
            resume_aborted: go on with samples that a publish has aborted, until all are whole.
            retries: how often to ask again when the connection is lost; nothing is sampled twice.
            settings: fields of :class:`shared.requests.RolloutRequest`, e.g. ``group_size``,
                ``max_tokens``, ``temperature``, ``stop``, ``purpose``.

        Raises:
            InvalidRequest: a field is wrong; nothing was run.
            EngineUnavailable: the server cannot generate, and went on saying so.
        """
        from concurrent.futures import ThreadPoolExecutor

        resumption = Resumption(prompts, settings) if resume_aborted else None
        rollout = self._call(calls.rollout(prompts, settings, new_key(retries)), retries)
        while resumption is not None and (left := resumption.of(rollout)):
            with ThreadPoolExecutor(_RESUMED_AT_ONCE) as pool:
                finished = pool.map(lambda c: self._continue(c, retries), left)
                rollout = joined(
                    rollout, {id(c.sample): s for c, s in zip(left, finished, strict=True)}
                )
        return rollout

    def _continue(self, continuation: Continuation, retries: int) -> Sample:
        call = calls.rollout([continuation.prompt], continuation.settings, new_key(retries))
        return self._call(call, retries).samples[0]

    def rollout_stream(
        self, prompts: Sequence[PromptLike], *, retries: int = 0, **settings: Any
    ) -> RolloutStream:
        """The same, group by group: each as soon as its last sample has ended.

        Args:
            prompts: see :meth:`rollout`.
            retries: how often in a row to connect again when the connection is lost. The server
                then sends what is lacking; each group comes once.
            settings: see :meth:`rollout`.

        Returns:
            An iterator; its ``end`` has the totals. Close it to cancel what is left. Iteration
            raises the errors of :meth:`rollout`, and ServerUnreachable if the stream breaks off.
        """
        incoming = Incoming(prompts, settings, new_key(retries))
        return RolloutStream(self._http, self._exchange, incoming, retries)

    def score(
        self,
        prompts: Sequence[Sequence[int] | IdArray],
        completions: Sequence[Sequence[int] | IdArray],
        *,
        policy: str = DEFAULT_POLICY,
    ) -> list[Score]:
        """Log-probabilities of given completions, token by token, at temperature 1.

        Args:
            prompts: token ids, at least one each.
            completions: token ids, one list for each prompt.
            policy: which scores them.

        Raises:
            InvalidRequest: a sequence cannot be scored; nothing was run.
        """
        return self._call(calls.score(prompts, completions, policy))

    def reload(
        self,
        tensors: Sequence[LazyTensor],
        *,
        base: DeltaBase | None = None,
        adapter_config: Mapping[str, Any] | None = None,
        **target: Any,
    ) -> ReloadResult:
        """Publish new weights, streamed tensor by tensor with their digest.

        Args:
            tensors: the whole checkpoint, or a LoRA adapter's tensors under PEFT's names.
            base: what the server is known to serve. Only the changes to it are sent, or everything
                if the server turns out to serve something else; it then remembers ``tensors``.
            adapter_config: PEFT's configuration, for a LoRA policy.
            target: fields of :class:`shared.calls.Target`: ``policy``, ``fence``, ``mode``,
                ``drain_seconds``.

        Raises:
            WeightsRejected: verification failed; the live policy is as it was.
            Conflict: somebody else has the lease; the live policy is as it was.
        """
        to = Target(**target)
        if base is None:
            return self._reload_whole(tensors, to, adapter_config)
        result = self._try_delta(tensors, to, base)
        if result is None:
            result = self._reload_whole(base.record(tensors), to, None)
        base.commit()
        return result

    def _reload_whole(
        self,
        tensors: Sequence[LazyTensor],
        to: Target,
        adapter_config: Mapping[str, Any] | None,
    ) -> ReloadResult:
        from shared import parts

        if adapter_config is None and parts.are_worth_it(tensors, to):
            cut = parts.Parts(tensors, self.info())
            if len(cut.parts) > 1:
                return parts.publish(self._call, cut, to)
        return self._call(calls.reload_stream(tensors, to, adapter_config))

    def _try_delta(
        self, tensors: Sequence[LazyTensor], to: Target, base: DeltaBase
    ) -> ReloadResult | None:
        if not base.covers(tensors):
            return None
        try:
            return self._call(calls.reload_delta(tensors, to, base))
        except Conflict as error:
            if not calls.is_other_base(error):
                raise
            return None

    def reload_path(
        self, path: str | Path, *, digest: str | None = None, **target: Any
    ) -> ReloadResult:
        """Publish what the server can read: a checkpoint file or directory, or a PEFT adapter."""
        return self._call(calls.reload_path(path, Target(**target), digest))

    def open_channel(
        self, kind: str, specs: Sequence[TensorSpec], *, fence: int | None = None
    ) -> Channel:
        """Make the server's workers allocate a buffer for weights that do not come by HTTP.

        Args:
            kind: ``ipc``, for a process of the same host, or ``nccl``.
            specs: the whole checkpoint, in the dtype that the server serves.
            fence: number of the lease that the channel belongs to, and ends with.

        Raises:
            Conflict: somebody else has the lease, or publishes through a channel.
            Forbidden: the server is on another host.
            WeightsRejected: the tensors do not fit the model.
        """
        return self._call(channel.open_channel(kind, specs, fence=fence))

    def await_channel(self, id: str, wait: float = 60.0) -> str:
        """Wait until a channel's buffer may be written; its state, ``open`` unless it took longer.

        Raises:
            Conflict: the channel has ended.
        """
        return self._call(channel.await_channel(id, wait))

    def reload_channel(self, id: str, *, durable: bool = False, **target: Any) -> ReloadResult:
        """Publish what a channel holds, or what is being broadcast to it.

        Args:
            id: of the channel.
            durable: return only when there is a copy of the weights; else ``await_channel`` waits
                for it.
            target: as for :meth:`reload`.

        Raises:
            WeightsRejected, Conflict: the live policy is as it was.
            EngineFailure: the transfer or the load failed; the message says what is live.
        """
        return self._call(channel.reload_channel(id, Target(**target), durable=durable))

    def close_channel(self, id: str) -> None:
        """Give a channel's memory back."""
        self._call(channel.close_channel(id))

    def reset(self, **target: Any) -> ReloadResult:
        """Publish the checkpoint that the server was started with, as a new version."""
        return self._call(calls.reset(Target(**target)))

    def policy(self, name: str = DEFAULT_POLICY) -> dict[str, Any]:
        """A policy's version, digest, lease and recent publishes."""
        return self._call(calls.policy(name))

    def delete_policy(self, name: str) -> None:
        """Forget a LoRA policy."""
        self._call(calls.delete_policy(name))

    def report_rewards(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """Tell what samples were worth, so that the server's page can show it beside them.

        Args:
            groups: fields of :class:`shared.feedback.GroupRewards`: ``id`` of a group, ``rewards``
                in the order of its samples, and ``components`` or nothing.

        Returns:
            Of how many groups the server still has the samples.

        Raises:
            NotFound: the server keeps none to look at.
        """
        return self._call(calls.report_rewards(groups))

    def look(self, path: str, **query: str) -> dict[str, Any]:
        """What the server's page is told, e.g. ``look("groups", limit="3")``.

        Other than everything else here it is not part of the protocol, and may change.

        Raises:
            NotFound: it is not there, or the server keeps nothing to look at.
        """
        return self._call(calls.look(path, query))

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
        return Lease(self._send, policy, holder=holder, ttl=ttl, wait=wait)

    def sleep(self, level: int, *, fence: int | None = None) -> None:
        """Let the server finish what is in flight and hand its GPU's memory back.

        Args:
            level: 1 keeps the weights in host memory, 2 drops them; up to ``max_sleep_level`` of
                :meth:`info`, above which nothing is handed back.
            fence: number of a lease on ``default``. The server wakes up by itself when that ends.

        Raises:
            Conflict: somebody else has paused the server, or the lease has ended.
        """
        self._call(calls.sleep(level, fence))

    def wake_up(self, memory: str | None = None) -> None:
        """End sleep, or take one kind of memory back.

        Args:
            memory: ``weights``, which can then be published, or ``kv_cache`` after them. Weights
                that were dropped and not published since are those of the live version again.

        Raises:
            Conflict: somebody else has put the server to sleep.
            EngineFailure: it did not wake up; its engine was replaced.
        """
        self._call(calls.wake_up(memory))

    def info(self) -> ServerInfo:
        """Model, tokenizer, live version and limits."""
        return self._call(calls.info())

    def wait_ready(self, timeout: float = 300.0) -> ServerInfo:
        """Wait until the server can generate.

        Raises:
            ServerUnreachable, EngineUnavailable: it still could not after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._call(calls.ready())
                return self.info()
            except (ServerUnreachable, EngineUnavailable):
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def _call(self, call: Call[T], retries: int = 0) -> T:
        patience = Patience(call.repeatable, retries)
        while True:
            try:
                return self._send_once(call)
            except TitoError as error:
                time.sleep(patience.pause(error))

    def _send_once(self, call: Call[T]) -> T:
        content = None if call.body is None else call.body()
        request = {"headers": call.headers, "params": call.params, **in_pieces(content)}
        return call.read(self._send(call.method, call.path, content=content, **request))

    def _send(self, method: str, path: str, **request: Any) -> Any:
        with self._exchange.reaching():
            return self._exchange.read(self._http.request(method, path, **request))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Only when it is asked for: asyncio takes longer to import than all the rest.
        if name == "AsyncRolloutClient":
            from shared.async_client import AsyncRolloutClient as AsyncRolloutClient  # noqa: PLC0414

            return AsyncRolloutClient
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

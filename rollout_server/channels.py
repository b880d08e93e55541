"""Who has which channel: a trainer's way into the workers' memory, from one publish to the next.

A channel belongs to the lease that it was opened under, or to the caller when there is none. It
ends when that lease does, when its owner closes it or opens another, when its engine is replaced,
and when a transfer breaks off. A trainer that dies in the middle of one has changed nothing: its
connection breaks, the workers give the transfer up, and the next trainer opens a channel at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial

from rollout_server.auth import Caller
from rollout_server.checkpoints import Manifest, reject_if, reject_unfit
from rollout_server.leases import Leases
from rollout_server.open_channel import OpenChannel
from rollout_server.pauses import alive
from rollout_server.service import Startup
from rollout_server.worker_links import WorkerLinks
from shared.channel import Channel, Kind, Layout
from shared.errors import (
    BodyTooLarge,
    Conflict,
    EngineFailure,
    Forbidden,
    NotFound,
    Problem,
    TitoError,
)
from shared.protocol import DEFAULT_POLICY
from shared.weights import TensorSpec

log = logging.getLogger("tito.channels")

_LOOK_S = 0.5
_IDLE_S = 600.0
_RETRY_S = 1.0
_REASONS_KEPT = 64


class Channels:
    """The channels of the default policy; there is one at a time.

    Args:
        startup: leads to the engine.
        leases: of the policies.
        seconds: how long joining, a transfer and its verification may take each.
    """

    def __init__(self, startup: Startup, leases: Leases, seconds: float) -> None:
        self._startup = startup
        self._leases = leases
        self.seconds = seconds
        self._open: OpenChannel | None = None
        self._opening = asyncio.Lock()
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def open(
        self,
        caller: Caller,
        fence: int | None,
        kind: Kind,
        specs: Sequence[TensorSpec],
        *,
        interface: str,
    ) -> Channel:
        """Allocate buffers in the workers, and let them wait for the trainer.

        Args:
            caller: becomes the owner.
            fence: number of its lease.
            kind: see :mod:`shared.channel`.
            specs: the whole checkpoint, in the dtype that it is served in.
            interface: at which the caller has reached this server.

        Raises:
            Conflict: somebody else holds the lease, or publishes through a channel.
            WeightsRejected: the tensors do not fit the model.
            BodyTooLarge: they are more than an upload may be.
            EngineFailure: the workers refused.
        """
        service = self._startup.service
        service.check_ready()
        check = partial(self._leases.check, DEFAULT_POLICY, fence, owner=caller.name)
        await asyncio.to_thread(check)
        _check_layout(specs, service.publisher.manifest)
        layout = Layout.of(specs)
        if layout.nbytes > service.settings.max_upload_bytes:
            most = service.settings.max_upload_bytes
            raise BodyTooLarge(f"the tensors are {layout.nbytes} bytes; allowed: {most}")
        async with self._opening:
            self._make_way()
            id = secrets.token_hex(16)
            engine = service.supervisor.current()
            with alive():
                links = await WorkerLinks.open(engine, id, kind, layout.specs, interface)
            opened = OpenChannel(id, caller.name, fence, layout, links)
            if kind == "nccl":
                opened.joining = asyncio.create_task(self._join(opened))
            self._open = opened
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch())
        log.info("%r has opened a channel (%s, %d bytes)", caller.name, kind, layout.nbytes)
        return Channel(
            id=id,
            kind=kind,
            nbytes=layout.nbytes,
            seconds=self.seconds,
            memory=links.memory,
            rendezvous=links.rendezvous,
        )

    def find(self, id: str, caller: Caller) -> OpenChannel:
        """The caller's open channel of that name.

        Raises:
            Conflict: it has ended; the message says why.
            Forbidden: it is another caller's.
            NotFound: there never was one.
        """
        found = self._open
        if found is None or found.id != id:
            if id in self._ended:
                raise Conflict(f"the channel has ended: {self._ended[id]}")
            raise NotFound("there is no such channel")
        if found.owner != caller.name:
            raise Forbidden("the channel belongs to another caller")
        if not self._startup.service.supervisor.runs(found.links.engine):
            self.end(found, "the engine was replaced")
            raise Conflict("the channel has ended: the engine was replaced")
        return found

    async def writable(self, channel: OpenChannel, seconds: float) -> None:
        """Wait until the trainer may fill the buffer, for at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (work := channel.under_way) is not None:
                    await asyncio.wait({work})

    @contextlib.contextmanager
    def used(self, channel: OpenChannel) -> Iterator[None]:
        """A publish is under way inside; if it breaks off, the channel ends.

        Raises:
            Conflict: another one is.
        """
        if channel.is_used:
            raise Conflict("a publish is under way in this channel", retry_after=_RETRY_S)
        channel.using = asyncio.get_running_loop().create_future()
        channel.has_loaded = False
        try:
            yield
        except EngineFailure as error:
            if channel.is_given_up and not channel.has_loaded:
                raise Conflict("the channel was closed; nothing has changed") from error
            raise
        finally:
            channel.using.set_result(None)
            channel.used_at = time.monotonic()
            if channel.links.is_closed:
                self.end(channel, "the workers did not answer in time, or have gone")

    def give_up(self, channel: OpenChannel) -> None:
        """Its owner closes it: a transfer in flight is given up, but not what becomes live."""
        channel.is_given_up = True
        self.end(channel, "its owner has closed it")

    def end(self, channel: OpenChannel, reason: str) -> None:
        """Close a channel; what becomes live does so first, and is copied to its file."""
        if self._open is not channel:
            return
        self._open = None
        self._ended[channel.id] = reason
        while len(self._ended) > _REASONS_KEPT:
            self._ended.popitem(last=False)
        log.info("a channel of %r ends: %s", channel.owner, reason)
        if not channel.close():
            closing = asyncio.create_task(channel.closed())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def close(self) -> None:
        """Let go of everything: the server stops."""
        if self._watching is not None:
            self._watching.cancel()
        if self._open is not None:
            self.end(self._open, "the server stops")

    def _make_way(self) -> None:
        """End the channel that there is: whoever opens another has been found to hold the lease.

        Raises:
            Conflict: a publish is under way in it.
        """
        if self._open is None:
            return
        if self._open.is_used:
            reason = f"{self._open.owner!r} publishes through a channel"
            raise Conflict(reason, retry_after=_RETRY_S)
        self.end(self._open, "another one was opened")

    async def _join(self, channel: OpenChannel) -> None:
        try:
            await channel.links.join(self.seconds)
        except TitoError as error:
            self.end(channel, f"the trainer did not join: {error}")

    async def _watch(self) -> None:
        """End the channel when its lease has, or when it is not used any more."""
        while (channel := self._open) is not None:
            await asyncio.sleep(_LOOK_S)
            if channel.is_used or self._open is not channel:
                continue
            lease = self._leases.current(DEFAULT_POLICY)
            if channel.fence is not None and (lease is None or lease.fence != channel.fence):
                self.end(channel, f"lease {channel.fence} has ended")
            elif channel.fence is None and time.monotonic() > channel.used_at + _IDLE_S:
                self.end(channel, f"it was not used for {_IDLE_S:g} s")
            elif not self._startup.service.supervisor.runs(channel.links.engine):
                self.end(channel, "the engine was replaced")


def _check_layout(specs: Sequence[TensorSpec], manifest: Manifest) -> None:
    """Refuse tensors that are not just those of the model, as they are served."""
    sent = {spec.name: spec for spec in specs}
    repeated = Counter(spec.name for spec in specs) - Counter(sent.keys())
    twice = [Problem(name, "listed twice", "each tensor once") for name in sorted(repeated)]
    reject_if(twice, "tensors are repeated")
    reject_unfit(sent, manifest)
    problems = [
        Problem(name, f"dtype {spec.dtype}", f"dtype {manifest.required[name].dtype}, as served")
        if name in manifest.required
        else Problem(name, str(spec), f"nothing: it is tied to {manifest.tied[name]}")
        for name, spec in sent.items()
        if spec != manifest.required.get(name)
    ]
    reject_if(problems, "a channel takes tensors as they are served")

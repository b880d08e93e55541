"""Weights from this process's memory straight into the server's, without HTTP.

``ipc`` maps the server's buffers into this process and copies into them. ``nccl`` broadcasts to
them piece by piece, so that no second model is needed here. Either way the tensors are cast on the
way to what the server serves, and the server verifies, loads and labels them as it does an upload.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from shared.byte_link import LinkError
from shared.channel import Channel, Kind, Layout
from shared.client import RolloutClient
from shared.errors import Conflict, NotFound, ServerUnreachable, TitoError, WeightsRejected
from shared.protocol import ReloadResult
from shared.weights import TensorSpec
from trainer.channel_pieces import Named
from trainer.channel_ways import BROKEN, Broadcast, Mapped, Streamed, Way


class ChannelError(ServerUnreachable):
    """The way into the server's memory cannot be opened, or has broken."""


class ChannelSender:
    """A channel to one server, opened again when it has ended.

    Args:
        client: of the server.
        kind: ``ipc`` or ``nccl``.
        specs: the whole checkpoint, in the dtype that the server serves.
        first: dtype to which floating-point tensors are cast before that; None casts once.
        device: where the tensors are.
    """

    def __init__(
        self,
        client: RolloutClient,
        kind: Kind,
        specs: Sequence[TensorSpec],
        *,
        first: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._client, self._kind, self._specs = client, kind, specs
        self._first, self._device = first, device
        self._layout = Layout.of(specs)
        self._channel: Channel | None = None
        self._way: Way | None = None
        self._fence: int | None = None

    @property
    def id(self) -> str:
        """Name of the channel; empty while there is none."""
        return "" if self._channel is None else self._channel.id

    def open(self, fence: int | None) -> None:
        """Open the channel, unless there is one under this lease.

        Raises:
            ChannelError: there is no such way from here to there.
            TitoError: the server refuses.
        """
        if self._channel is not None and self._fence == fence:
            return
        self.close()
        channel = self._client.open_channel(self._kind, self._specs, fence=fence)
        self._channel, self._fence = channel, fence
        try:
            self._way = self._way_through(channel)
        except BROKEN as error:
            self.close()
            raise ChannelError(f"{self._kind}: {error}") from error

    def _way_through(self, channel: Channel) -> Way:
        if channel.kind == "ipc":
            return Mapped(channel, self._layout, self._first, self._device)
        assert channel.rendezvous is not None
        if channel.rendezvous.unique_id:
            if self._device.type != "cuda":
                raise LinkError("the server is on a GPU, and this process is not")
            return Broadcast(channel, self._layout, self._first, self._device)
        return Streamed(channel.rendezvous, self._layout, self._first, channel.seconds)

    def publish(self, tensors: Sequence[Named], fence: int | None, **target: Any) -> ReloadResult:
        """Make the server sample from these tensors.

        Args:
            tensors: in the order of the specs.
            fence: number of the lease.
            target: as for :meth:`shared.client.RolloutClient.reload`.

        Raises:
            ChannelError: the way there broke, twice.
            WeightsRejected, Conflict: the server refused, and serves what it served before.
        """
        try:
            return self._publish(tensors, fence, target)
        except ChannelError:
            # The server, or its engine, may have been restarted, or a transfer have broken off.
            return self._publish(tensors, fence, target)

    def _publish(
        self, tensors: Sequence[Named], fence: int | None, target: dict[str, Any]
    ) -> ReloadResult:
        self.open(fence)
        assert self._channel is not None
        assert self._way is not None
        id, seconds = self._channel.id, self._channel.seconds
        try:
            self._await(id, seconds)
            return self._way.send(
                tensors,
                lambda: self._client.reload_channel(id, fence=fence, **target),
            )
        except BROKEN as error:
            self.close()
            raise ChannelError(f"{self._kind}: {error}") from error
        except (WeightsRejected, Conflict):
            raise  # the channel is as good as before
        except BaseException:
            self.close()  # also lets the server's workers go, if they wait for the rest
            raise

    def _await(self, id: str, seconds: float) -> None:
        """Wait until the server has copied what was sent last, and let the workers join."""
        deadline = time.monotonic() + 2 * seconds
        try:
            while (state := self._client.await_channel(id, seconds)) != "open":
                if time.monotonic() > deadline:
                    raise LinkError(f"the channel is still {state} after {2 * seconds:g} s")
        except (Conflict, NotFound) as error:
            self.close()
            raise ChannelError(error.message) from error

    def close(self) -> None:
        """Give the memory back, on both sides."""
        way, self._way = self._way, None
        channel, self._channel = self._channel, None
        if way is not None:
            way.close()
        if channel is not None:
            with contextlib.suppress(TitoError):  # it ends with the lease at the latest
                self._client.close_channel(channel.id)

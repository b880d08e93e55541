"""How a run's weights get to a server: by HTTP, whole or as a delta, or through GPU memory.

Each server has a transport of its own. ``auto`` takes the fastest that works, and says why the
others do not; what fails later on is given up for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from shared.channel import Kind
from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import EngineUnavailable, ServerUnreachable, TitoError
from shared.protocol import ReloadResult
from trainer.channels import ChannelError, ChannelSender
from trainer.config import ServerConfig
from trainer.errors import ConfigError
from trainer.publish import checkpoint_tensors, distinct_tensors, publish

Say = Callable[[str], None]


class Transport(Protocol):
    """A way to one server."""

    def publish(self, fence: int) -> ReloadResult:
        """Make the server sample from the model as it is.

        Raises:
            TitoError: see :func:`trainer.publish.publish`.
        """
        ...

    def close(self) -> None:
        """Give back what the server keeps for it."""
        ...


def transport_to(
    client: RolloutClient, model: nn.Module, options: ServerConfig, say: Say
) -> Transport:
    """The transport that the configuration asks for.

    Args:
        client: of the server.
        model: what is published, as it is by then.
        options: of the servers.
        say: told what ``auto`` has chosen.
    """
    dtype: torch.dtype = getattr(torch, options.publish_dtype)
    match options.transport:
        case "http" | "delta":
            base = DeltaBase() if options.transport == "delta" else None
            return _Http(client, model, dtype, base)
        case "auto":
            return _Auto(client, model, dtype, say)
        case kind:
            return _Channel(client, model, dtype, kind)


class _Http:
    def __init__(
        self, client: RolloutClient, model: nn.Module, dtype: torch.dtype, base: DeltaBase | None
    ) -> None:
        self._client, self._model, self._dtype, self._base = client, model, dtype, base

    def publish(self, fence: int) -> ReloadResult:
        return publish(self._client, self._model, self._dtype, fence=fence, base=self._base)

    def close(self) -> None:
        pass


class _Channel:
    """Through GPU memory, or through what stands in for it on CPUs."""

    def __init__(
        self, client: RolloutClient, model: nn.Module, dtype: torch.dtype, kind: Kind
    ) -> None:
        self._client, self._model, self._dtype, self._kind = client, model, dtype, kind
        self._sender: ChannelSender | None = None

    def open(self, fence: int) -> None:
        """See :meth:`trainer.channels.ChannelSender.open`."""
        if self._sender is None:
            served: torch.dtype = getattr(torch, self._client.info().dtype)
            self._sender = ChannelSender(
                self._client,
                self._kind,
                [tensor.spec for tensor in checkpoint_tensors(self._model, served)],
                first=None if served == self._dtype else self._dtype,
                device=next(self._model.parameters()).device,
            )
        self._sender.open(fence)

    def publish(self, fence: int) -> ReloadResult:
        first = self._sender is None
        try:
            self.open(fence)
        except ChannelError as error:
            if not first:
                raise
            raise ConfigError(
                f"server.transport is {self._kind!r}: {error}",
                advice="auto takes the fastest that works",
            ) from error
        assert self._sender is not None
        return self._sender.publish(list(distinct_tensors(self._model)), fence)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


class _Auto:
    def __init__(
        self, client: RolloutClient, model: nn.Module, dtype: torch.dtype, say: Say
    ) -> None:
        self._client, self._say = client, say
        on_gpu = next(model.parameters()).device.type == "cuda"
        kinds: tuple[Kind, ...] = ("ipc", "nccl") if on_gpu else ("ipc",)
        self._left = {kind: _Channel(client, model, dtype, kind) for kind in kinds}
        self._http = _Http(client, model, dtype, None)
        self._why_not: dict[str, str] = {} if on_gpu else {"nccl": "the model is on the CPU"}
        self._said = ""

    def publish(self, fence: int) -> ReloadResult:
        for kind, channel in list(self._left.items()):
            try:
                channel.open(fence)
                self._tell(kind)
                return channel.publish(fence)
            except ChannelError as error:
                self._give_up(kind, error)
            except (ServerUnreachable, EngineUnavailable):
                raise
            except TitoError as error:
                if kind == self._said:  # it did open: HTTP would fare no better
                    raise
                self._give_up(kind, error)
        self._tell("http")
        return self._http.publish(fence)

    def _give_up(self, kind: Kind, error: TitoError) -> None:
        self._why_not[kind] = error.message
        self._left.pop(kind).close()

    def _tell(self, chosen: str) -> None:
        if chosen == self._said:
            return
        self._said = chosen
        reasons = "; ".join(f"not {kind}: {why}" for kind, why in self._why_not.items())
        self._say(f"weights go by {chosen}" + (f" ({reasons})" if reasons else ""))

    def close(self) -> None:
        for channel in self._left.values():
            channel.close()

"""What the tests of channels share: an engine in memory whose worker's end is the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from rollout_server.device_staging import DeviceStaging
from shared.channel import Kind
from shared.client import RolloutClient
from shared.errors import EngineFailure
from shared.protocol import PauseMode
from shared.weights import TensorSpec
from tests.rollout_server.support import FakeEngine, Tensors, Weights, digest_of, spec_of
from trainer.channel_pieces import Named
from trainer.channels import ChannelSender


class Worker(DeviceStaging):
    """A worker without a model: it notes what it would load."""

    rank = 0
    device = torch.device("cpu")
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1)
    )
    model_runner: Any = SimpleNamespace(get_model=torch.nn.Module)
    _tito_plan: Any = False

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def _tito_replace(self, staged: Any) -> dict[str, int]:
        self.loaded.append(digest_of(dict(staged)))
        return {"parameters": 1, "checked": 1}


@dataclass
class ChannelEngine(FakeEngine):
    """Its worker takes channels as vLLM's do.

    Attributes:
        worker: see there.
        channel_errors: raised by the next loads from a channel; None lets one succeed.
    """

    worker: Worker = field(default_factory=Worker)
    channel_errors: list[Exception | None] = field(default_factory=list)

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        self.calls.append(method)
        if method == "tito_buffer_load":
            assert self.paused, "loaded while running"
            if self.channel_errors and (error := self.channel_errors.pop(0)) is not None:
                raise error
        try:
            return [await asyncio.to_thread(partial(getattr(self.worker, method), **arguments))]
        except Exception as error:
            raise EngineFailure(f"the engine's workers refused: {error}") from error

    async def switch(self, mode: PauseMode, buffer: str, version: int) -> dict[str, float]:
        await self.pause(mode)
        await self.call_workers("tito_buffer_load", name=buffer)
        await self.stamp(version)
        await self.resume()
        return dict.fromkeys(("pause", "load", "resume"), 0.0)


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    """What a channel is opened with."""
    return [spec_of(name, tensor) for name, tensor in tensors.items()]


def named(tensors: Tensors) -> list[Named]:
    """Tensors in the form in which channels send them."""

    def give(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor

    return [(name, give(tensor)) for name, tensor in tensors.items()]


def sender_to(client: RolloutClient, kind: Kind, weights: Weights, **options: Any) -> ChannelSender:
    """A sender of such weights."""
    given: dict[str, Any] = {"first": None, "device": torch.device("cpu"), **options}
    return ChannelSender(client, kind, specs_of(weights.tensors), **given)


def changed(tensors: Tensors, name: str, value: float) -> Tensors:
    """The same, with one element of one tensor changed."""
    other = tensors[name].clone()
    other.view(-1)[-1] = value
    return {**tensors, name: other}


def without(tensors: Tensors, names: Sequence[str]) -> Tensors:
    """The same, but for some."""
    return {name: tensor for name, tensor in tensors.items() if name not in names}

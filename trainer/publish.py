"""From the model being trained to the tensors that the rollout server loads.

Tensors are named and shaped as in the checkpoint on disk. Each is cast and copied to host memory
when it is about to be sent and forgotten afterwards, so publishing never needs a second model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.protocol import ReloadResult
from shared.weights import LazyTensor, TensorSpec, checkpoint_digest
from trainer.lora import Merged, merged_tensors

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class _Load:
    """Produces one tensor's bytes, on demand."""

    tensor: Merged
    dtype: torch.dtype
    first: torch.dtype

    def __call__(self) -> memoryview:
        sent = self.tensor().detach().to(device="cpu", dtype=self.first)
        host = sent.to(self.dtype).contiguous()
        # numpy has no bfloat16, so the bytes are viewed before they leave torch.
        return host.flatten().view(torch.uint8).numpy().data


def checkpoint_tensors(model: nn.Module, dtype: torch.dtype) -> list[LazyTensor]:
    """Every tensor of the model's checkpoint, to be loaded one by one.

    Args:
        model: parameters and persistent buffers are named as in its checkpoint; an adapter's are
            merged into the weights that they change.
        dtype: what floating-point tensors are cast to; others keep their type.

    A tensor under two names (tied embeddings) is listed under the first alone, as in a checkpoint.
    """
    return [_lazy(name, tensor, dtype, dtype) for name, tensor in distinct_tensors(model)]


def tensors_digest(model: nn.Module, dtype: torch.dtype, served: torch.dtype) -> str:
    """Digest that a server must find in what :func:`publish` sends.

    Args:
        dtype: that tensors are sent in.
        served: that the server computes in, to which it casts what it gets.
    """
    return checkpoint_digest(
        (sent.spec, xxhash.xxh3_128_hexdigest(sent.load()))
        for sent in (_lazy(name, tensor, served, dtype) for name, tensor in distinct_tensors(model))
    )


def distinct_tensors(model: nn.Module) -> Iterator[tuple[str, Merged]]:
    """Every tensor of the model's checkpoint, tied ones once, to be computed one by one."""
    seen: set[int] = set()
    for name, tensor in merged_tensors(model):
        if id(tensor.base) not in seen:
            seen.add(id(tensor.base))
            yield name, tensor


def _lazy(name: str, tensor: Merged, dtype: torch.dtype, first: torch.dtype) -> LazyTensor:
    """A tensor cast to ``first`` and then to ``dtype``, if it is of floating point."""
    own = tensor.base.dtype
    target, first = (dtype, first) if own.is_floating_point else (own, own)
    spec = TensorSpec(name, SAFETENSORS_NAMES[target], tuple(tensor.base.shape))
    return LazyTensor(spec, _Load(tensor, target, first))


def publish(
    client: RolloutClient,
    model: nn.Module,
    dtype: torch.dtype,
    *,
    fence: int,
    base: DeltaBase | None = None,
) -> ReloadResult:
    """Make the server sample from ``model``; returns the version that it now serves.

    Args:
        fence: number of the lease that gives the right to.
        base: what this server was sent last; only changes to it are sent, where it still has that.

    Raises:
        WeightsRejected: the server refused them and still serves what it served before.
        Conflict: the lease has passed to somebody else.
    """
    return client.reload(checkpoint_tensors(model, dtype), base=base, fence=fence)

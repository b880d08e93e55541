"""From the model being trained to the tensors that the rollout server loads.

Tensors are named and shaped as in the checkpoint on disk. Each is cast and copied to host memory
when it is about to be sent and forgotten afterwards, so publishing never needs a second model. From
a GPU one is copied while the one before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.protocol import ReloadResult
from shared.tensor_hash import tensor_hash
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


@dataclass
class _Load:
    """Produces one tensor's bytes, on demand."""

    tensor: Merged
    dtype: torch.dtype
    first: torch.dtype
    _copied: Callable[[], Tensor] | None = None

    def __call__(self) -> memoryview:
        self.begin()
        assert self._copied is not None
        copied, self._copied = self._copied, None
        # numpy has no bfloat16, so the bytes are viewed before they leave torch.
        return copied().flatten().view(torch.uint8).numpy().data

    def begin(self) -> None:
        """Begin the copy to host memory, if that has not happened."""
        if self._copied is None:
            cast = self.tensor().detach().to(self.first).to(self.dtype)
            self._copied = _copy_of(cast.contiguous())


def _copy_of(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin a copy to host memory; what is returned waits for its end."""
    if not tensor.is_cuda:
        return tensor.cpu
    # Several times faster to copy to than memory that the system may move. Torch keeps it for the
    # next tensor once nobody refers to it.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    there = torch.cuda.current_stream(tensor.device).record_event()

    def copied() -> Tensor:
        there.synchronize()
        return host

    return copied


def checkpoint_tensors(model: nn.Module, dtype: torch.dtype) -> list[LazyTensor]:
    """Every tensor of the model's checkpoint, to be loaded one by one.

    Args:
        model: parameters and persistent buffers are named as in its checkpoint; an adapter's are
            merged into the weights that they change.
        dtype: what floating-point tensors are cast to; others keep their type.

    A tensor under two names (tied embeddings) is listed under the first alone, as in a checkpoint.
    """
    return lazy_tensors(distinct_tensors(model), dtype)


def lazy_tensors(tensors: Iterable[tuple[str, Merged]], dtype: torch.dtype) -> list[LazyTensor]:
    """The same for some tensors."""
    lazy = [(tensor, *_lazy(name, tensor, dtype, dtype)) for name, tensor in tensors]
    return [
        LazyTensor(spec, load, load.begin) if tensor.base.is_cuda else LazyTensor(spec, load)
        for tensor, spec, load in lazy
    ]


def tensors_digest(model: nn.Module, dtype: torch.dtype, served: torch.dtype) -> str:
    """Digest that a server must find in what :func:`publish` sends.

    Args:
        dtype: that tensors are sent in.
        served: that the server computes in, to which it casts what it gets.
    """
    return checkpoint_digest(
        (spec, tensor_hash(load()))
        for spec, load in (_lazy(*named, served, dtype) for named in distinct_tensors(model))
    )


def distinct_tensors(model: nn.Module) -> Iterator[tuple[str, Merged]]:
    """Every tensor of the model's checkpoint, tied ones once, to be computed one by one."""
    seen: set[int] = set()
    for name, tensor in merged_tensors(model):
        if id(tensor.base) not in seen:
            seen.add(id(tensor.base))
            yield name, tensor


def _lazy(
    name: str, tensor: Merged, dtype: torch.dtype, first: torch.dtype
) -> tuple[TensorSpec, _Load]:
    """A tensor cast to ``first`` and then to ``dtype``, if it is of floating point."""
    own = tensor.base.dtype
    target, first = (dtype, first) if own.is_floating_point else (own, own)
    spec = TensorSpec(name, SAFETENSORS_NAMES[target], tuple(tensor.base.shape))
    return spec, _Load(tensor, target, first)


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

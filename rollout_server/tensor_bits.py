"""Tensors compared bit by bit: a NaN equals itself, and 0.0 is not -0.0."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_words(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape and dtype as integers, in words of eight bytes if both are dense."""
    pair = (one.detach(), other.detach())
    if not all(tensor.is_contiguous() for tensor in pair):
        kind = _INTEGERS[one.itemsize]
        return pair[0].view(kind), pair[1].view(kind)
    # Whole words compare several times faster than bfloat16, which is compared as float32.
    whole = all(
        size * t.itemsize % 8 == 0 for t in pair for size in (t.numel(), t.storage_offset())
    )
    kind = torch.int64 if whole else _INTEGERS[one.itemsize]
    return pair[0].view(-1).view(kind), pair[1].view(-1).view(kind)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype agree in every bit; waits for a GPU."""
    return torch.equal(*in_words(one, other))

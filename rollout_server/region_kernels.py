"""Many regions copied or compared by one launch on a GPU, in Triton.

A launch for each tensor costs microseconds of the host, hundreds of times; a list of addresses that
stays on the device costs nothing, and one launch runs at the speed of memory.
"""

# Triton reads annotations as part of its own language.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK_WORDS = 16384
_TILE_WORDS = 2048
_ALIGNMENT = 16


def suits(target: Tensor, source: Tensor) -> bool:
    """Whether a pair can be part of a batch."""
    return (
        target.device == source.device
        and target.dtype == source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
        and not (target.data_ptr() | source.data_ptr() | target.nbytes) % _ALIGNMENT
    )


class Batch:
    """Pairs of regions.

    Args:
        pairs: targets and sources, each of which :func:`suits`; all on one device. They must
            outlive the batch, which keeps their addresses only.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._device = pairs[0][0].device
        self._count = len(pairs)
        table = np.concatenate([_chunks(pair, index) for index, pair in enumerate(pairs)])
        self._table = torch.from_numpy(table).to(self._device)

    def copy(self) -> None:
        """Copy sources to targets; returns before the device has."""
        _copy[(len(self._table),)](self._table, CHUNK=_CHUNK_WORDS, TILE=_TILE_WORDS)

    def differs(self) -> Tensor:
        """For each pair 1 if some bit differs, else 0; ``[pairs]`` on the device."""
        flags = torch.zeros(self._count, dtype=torch.int32, device=self._device)
        _compare[(len(self._table),)](self._table, flags, CHUNK=_CHUNK_WORDS, TILE=_TILE_WORDS)
        return flags


def warm_up(device: torch.device) -> None:
    """Compile both kernels, which takes seconds where that was never done before."""
    target, source = torch.zeros(2, 4, dtype=torch.int64, device=device)
    batch = Batch([(target, source)])
    batch.copy()
    batch.differs().tolist()


def _chunks(
    pair: tuple[Tensor, Tensor], index: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """``[chunks, 4]``: both addresses, how many words, and which pair it belongs to."""
    target, source = pair
    starts = np.arange(0, target.nbytes // 8, _CHUNK_WORDS)
    words = np.minimum(target.nbytes // 8 - starts, _CHUNK_WORDS)
    addresses = [target.data_ptr() + 8 * starts, source.data_ptr() + 8 * starts]
    return np.stack([*addresses, words, np.full_like(starts, index)], axis=1)


@triton.jit
def _copy(table, CHUNK: tl.constexpr, TILE: tl.constexpr):
    row = table + tl.program_id(0) * 4
    target = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16)
    source = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int64)), 16)
    words = tl.multiple_of(tl.load(row + 2).to(tl.int32), 2)
    for start in range(0, CHUNK, TILE):
        at = start + tl.arange(0, TILE)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit
def _compare(table, flags, CHUNK: tl.constexpr, TILE: tl.constexpr):
    row = table + tl.program_id(0) * 4
    target = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16)
    source = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int64)), 16)
    words = tl.multiple_of(tl.load(row + 2).to(tl.int32), 2)
    found = tl.zeros((TILE,), tl.int64)
    for start in range(0, CHUNK, TILE):
        at = start + tl.arange(0, TILE)
        one = tl.load(target + at, mask=at < words, other=0)
        found |= one ^ tl.load(source + at, mask=at < words, other=0)
    differs = tl.max((found != 0).to(tl.int32), axis=0)
    tl.store(flags + tl.load(row + 3), 1, mask=differs != 0)

"""Which blocks of which tensors the kernels of ``digest_kernels.py`` take at once, as tables.

A buffer that is filled before anybody looks at it is taken in few steps; one that is filled piece
by piece in a step for each piece, so that little is left to do when the last has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_server import xxh3
from shared.channel import Layout

BLOCKS_PER_PROGRAM = 64
FIRST, LAST = 1, 2
_LONG_BLOCKS = 128 << 10
_LONG_TOGETHER = 4 << 20
_TOGETHER = 2 << 20
_LANES = 8  # as many streams as a process's work goes to a GPU in, if nobody says otherwise

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """Blocks whose sums lie in scratch memory at the same time.

    Attributes:
        end: as many bytes of the buffer must be there.
        lane: steps of one lane follow each other; those of others may go on beside them.
        sums: ``[programs, 4]`` and
        scans: ``[tensors, 4]``, tables of the kernels.
        blocks: rows of scratch memory that it takes.
    """

    end: int
    lane: int
    sums: Numbers
    scans: Numbers
    blocks: int


def at_once(layout: Layout, address: int) -> list[Step]:
    """The steps through a buffer that is complete.

    The walk over the blocks of one tensor is the longest wait, so that over long tensors begins at
    once, and goes on beside all else.
    """
    table = _Table(layout, address)
    order = np.argsort(-table.blocks, kind="stable")
    long = (table.blocks >= _LONG_BLOCKS) & _within(table.blocks, order, _LONG_TOGETHER)
    beside = np.flatnonzero(long)
    steps = [table.step(layout.nbytes, beside, 1)] if len(beside) else []
    rest = np.flatnonzero(~long)
    groups = np.cumsum(table.blocks[rest]) // _TOGETHER
    for group in np.unique(groups):
        steps.append(table.step(layout.nbytes, rest[groups == group]))
    return steps


def _within(blocks: Numbers, order: Numbers, most: int) -> NDArray[np.bool_]:
    """Those that have no more than ``most`` together, the longest first."""
    chosen = np.zeros(len(blocks), np.bool_)
    chosen[order[np.cumsum(blocks[order]) <= most]] = True
    return chosen


def in_pieces(layout: Layout, address: int, ends: Sequence[int]) -> list[Step]:
    """The steps through a buffer that is filled from its beginning up to each of ``ends`` in turn.

    Walks over one tensor follow each other, but need not wait for those over others: tensors that
    end in the same piece share a lane.
    """
    table = _Table(layout, address)
    last_pieces = np.searchsorted(np.array(ends), table.ends)
    waits = np.zeros(len(ends), np.int64)
    np.maximum.at(waits, last_pieces, table.blocks)
    lanes = _spread(waits)[last_pieces]
    pieces = zip([0, *ends[:-1]], ends, strict=True)
    return [step for low, high in pieces for step in table.piece(low, high, lanes)]


def _spread(waits: Numbers) -> Numbers:
    """A lane for each of these, so that none takes much longer than the others."""
    lanes, taken = np.zeros_like(waits), np.zeros(_LANES, np.int64)
    for index in np.argsort(-waits, kind="stable"):
        lanes[index] = np.argmin(taken)
        taken[lanes[index]] += waits[index]
    return lanes


class _Table:
    def __init__(self, layout: Layout, address: int) -> None:
        self._offsets = np.array(layout.offsets, np.int64)
        self._lengths = np.array([spec.nbytes for spec in layout.specs], np.int64)
        self._address = address
        self.blocks = xxh3.blocks_of(self._lengths)
        self.ends = self._offsets + self._lengths

    def step(self, end: int, tensors: Numbers, lane: int = 0) -> Step:
        """All blocks of some tensors."""
        none = np.zeros_like(tensors)
        whole = np.full_like(tensors, LAST)
        return self._step(end, lane, tensors, none, self.blocks[tensors], whole)

    def piece(self, start: int, end: int, lanes: Numbers) -> Iterator[Step]:
        """What is complete at ``end`` and was not at ``start``; a step for each tensor's lane."""
        before, after = self._complete(start), self._complete(end)
        last = (self.ends <= end) & ((self.ends > start) | (start == 0))
        some = (after > before) | last
        for lane in np.unique(lanes[some]):
            these = np.flatnonzero(some & (lanes == lane))
            kinds = np.where(last, LAST, 0)[these]
            counts = (after - before)[these]
            yield self._step(end, int(lane), these, before[these], counts, kinds)

    def _complete(self, end: int) -> Numbers:
        return np.clip((end - self._offsets) // xxh3.BLOCK_BYTES, 0, self.blocks)

    def _step(
        self, end: int, lane: int, tensors: Numbers, firsts: Numbers, counts: Numbers,
        kinds: Numbers,
    ) -> Step:  # fmt: skip
        rows = np.cumsum(counts) - counts
        scans = np.stack([tensors, rows, counts, kinds + np.where(firsts == 0, FIRST, 0)], 1)
        programs = -(-counts // BLOCKS_PER_PROGRAM)
        owner = np.repeat(np.arange(len(tensors)), programs)
        within = np.arange(len(owner)) - (np.cumsum(programs) - programs)[owner]
        begun = within * BLOCKS_PER_PROGRAM
        addresses = self._address + self._offsets[tensors] + firsts * xxh3.BLOCK_BYTES
        sums = np.stack([
            addresses[owner] + begun * xxh3.BLOCK_BYTES,
            np.minimum(counts[owner] - begun, BLOCKS_PER_PROGRAM),
            rows[owner] + begun,
            tensors[owner],
        ], 1)  # fmt: skip
        return Step(end, lane, sums, scans, int(counts.sum()))


def tensor_table(layout: Layout, address: int) -> Numbers:
    """``[tensors, 5]``: address, length, and what tells values that are not finite."""
    told = {spec.dtype: _finite(spec.dtype) for spec in layout.specs}
    rows = [
        (address + offset, spec.nbytes, *told[spec.dtype])
        for spec, offset in zip(layout.specs, layout.offsets, strict=True)
    ]
    return np.array(rows, np.int64)


# Bits of a value, and of its fraction. Of F8_E4M3 only the largest magnitude is not finite, so its
# fraction counts as exponent.
_FLOATS = {
    "BF16": (16, 7), "F16": (16, 10), "F32": (32, 23), "F64": (64, 52),
    "F8_E5M2": (8, 2), "F8_E4M3": (8, 0),
}  # fmt: skip


def _finite(dtype: str) -> tuple[int, int, int]:
    """Words of eight bytes: where exponents are, one in their last place, and the sign."""
    if dtype not in _FLOATS:
        return 0, 0, 0
    bits, fraction = _FLOATS[dtype]
    sign, one = 1 << (bits - 1), 1 << fraction
    return _repeated(sign - one, bits), _repeated(one, bits), _repeated(sign, bits)


def _repeated(value: int, bits: int) -> int:
    """A word of eight bytes, full of it, as a signed number."""
    content = value.to_bytes(bits // 8, "little") * (64 // bits)
    return int.from_bytes(content, "little", signed=True)

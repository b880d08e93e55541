"""The pieces of a buffer's tensors that digests are made of, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shared import tensor_hash
from shared.channel import Layout

DIGEST_BYTES = 16

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """One row for each, in the order in which the buffer is filled.

    Attributes:
        tensors: whose it is.
        starts: where it begins in the buffer.
        ends: and where it ends.
    """

    tensors: Numbers
    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, layout: Layout) -> Pieces:
        """The pieces of all tensors; an empty one has an empty piece."""
        size = tensor_hash.HASH_PIECE_BYTES
        offsets = np.array(layout.offsets, np.int64)
        ends = offsets + np.array([spec.nbytes for spec in layout.specs], np.int64)
        counts = np.maximum(-(-(ends - offsets) // size), 1)
        tensors = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(tensors)) - (np.cumsum(counts) - counts)[tensors]
        starts = offsets[tensors] + size * within
        return cls(tensors, starts, np.minimum(starts + size, ends[tensors]))

    def complete(self, end: int) -> int:
        """How many are there when the buffer is filled up to ``end``."""
        return int(np.searchsorted(self.ends, end, side="right"))

    def row(self, index: int) -> tuple[int, int, int]:
        """One of them."""
        return int(self.tensors[index]), int(self.starts[index]), int(self.ends[index])

    def hashes(self, digests: bytes, tensors: int) -> list[str]:
        """Of each tensor, from the digests of all pieces, one after the other."""
        firsts = np.searchsorted(self.tensors, np.arange(tensors + 1)) * DIGEST_BYTES
        parts = pairwise(firsts.tolist())
        return [tensor_hash.combined_hash(digests[start:end]) for start, end in parts]


def finite_words(dtype: str) -> tuple[int, int, int]:
    """Words of eight bytes: where exponents are, one in their last place, and the sign.

    A value is not finite if its exponent plus one reaches the sign; zeros for a dtype whose values
    always are.
    """
    if dtype not in _FLOATS:
        return 0, 0, 0
    bits, fraction = _FLOATS[dtype]
    sign, one = 1 << (bits - 1), 1 << fraction
    return _repeated(sign - one, bits), _repeated(one, bits), _repeated(sign, bits)


# Bits of a value, and of its fraction. Of F8_E4M3 only the largest magnitude is not finite, so its
# fraction counts as exponent.
_FLOATS = {
    "BF16": (16, 7), "F16": (16, 10), "F32": (32, 23), "F64": (64, 52),
    "F8_E5M2": (8, 2), "F8_E4M3": (8, 0),
}  # fmt: skip


def _repeated(value: int, bits: int) -> int:
    """A word of eight bytes, full of it, as a signed number."""
    content = value.to_bytes(bits // 8, "little") * (64 // bits)
    return int.from_bytes(content, "little", signed=True)

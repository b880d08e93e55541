"""One look at a tensor's bytes, in pieces as they come: their hash, and whether values are finite.

Whether a value is finite is seen from its bits, without converting it: exponent and fraction, read
as one integer, grow with the magnitude, so there is a least integer that is infinite or NaN. When
the tensor will be rounded to a narrower dtype, that is the least which rounds to infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.errors import Problem
from shared.tensor_hash import Buffer, TensorHash
from shared.weights import ITEM_BYTES, TensorSpec

_LEAST_INFINITE = {
    ("BF16", "BF16"): 0x7F80, ("BF16", "F32"): 0x7F80,
    ("F16", "F16"): 0x7C00, ("F16", "F32"): 0x7C00,
    ("F32", "F32"): 0x7F800000,
    ("F32", "BF16"): 0x7F7F8000,  # half-way above the largest bfloat16, and ties go up here
    ("F32", "F16"): 0x477FF000,  # 65520, half-way above the largest float16
    ("F64", "F64"): 0x7FF << 52,
    ("F8_E5M2", "F8_E5M2"): 0x7C,
    ("F8_E4M3", "F8_E4M3"): 0x7F,  # NaN; it has no infinity
}  # fmt: skip
_PIECE_BYTES = 1 << 20  # what was just hashed is still in the cache when its values are looked at


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """What one look at a tensor tells.

    Attributes:
        hash: of the bytes.
        problem: what is wrong if some value is not finite in the dtype that it is served in.
    """

    hash: str
    problem: Problem | None


class TensorLook:
    """Looks at a tensor whose bytes come in pieces.

    Args:
        spec: the tensor as it was sent.
        served: the dtype that it will be served in.
    """

    def __init__(self, spec: TensorSpec, served: str) -> None:
        self._spec = spec
        self._served = served
        self._hash = TensorHash()
        self._broken = 0
        self._seam = b""

    def update(self, piece: Buffer) -> None:
        """Look at the next bytes, which may begin and end within a value."""
        rest = memoryview(piece)
        while rest:
            self._look(rest[:_PIECE_BYTES])
            rest = rest[_PIECE_BYTES:]

    def _look(self, piece: memoryview) -> None:
        self._hash.update(piece)
        size = ITEM_BYTES[self._spec.dtype]
        if self._seam:
            missing = size - len(self._seam)
            self._seam += piece[:missing]
            piece = piece[missing:]
            if len(self._seam) < size:
                return
            self._count(self._seam)
        whole = len(piece) - len(piece) % size
        self._count(piece[:whole])
        self._seam = bytes(piece[whole:])

    def _count(self, values: Buffer) -> None:
        bits = np.frombuffer(values, f"<u{ITEM_BYTES[self._spec.dtype]}")
        self._broken += count_not_finite(bits, self._spec.dtype, self._served)

    def result(self) -> TensorCheck:
        """What was seen, now that all bytes were."""
        return TensorCheck(self._hash.hexdigest(), not_finite(self._spec.name, self._broken))


def check_piece(piece: Buffer, dtype: str) -> tuple[bytes, bool]:
    """Digest of one of the pieces that a tensor's hash is made of, and whether it is finite."""
    digest = xxhash.xxh3_128()
    digest.update(piece)  # lets other threads run, which hashing in one call does not
    bits = np.frombuffer(piece, f"<u{ITEM_BYTES[dtype]}")
    return digest.digest(), not count_not_finite(bits, dtype, dtype)


def count_not_finite(bits: NDArray[Any], dtype: str, served: str) -> int:
    """How many values are NaN or infinite once they are served; integers never are.

    Args:
        bits: the values, as unsigned integers of their size.
        dtype: their safetensors dtype.
        served: the dtype that they are rounded or widened to.
    """
    least = _LEAST_INFINITE.get((dtype, served))
    if least is None:
        return 0
    if not bits.size:
        return 0
    sign = 1 << (8 * bits.itemsize - 1)
    # Read with a sign and without one: the largest of each tell it, and nothing is copied.
    if bits.view(f"<i{bits.itemsize}").max() < least and bits.max() < sign + least:
        return 0
    magnitude = bits & (sign - 1)
    return int(np.count_nonzero(magnitude >= least))


def not_finite(name: str, count: int) -> Problem | None:
    """The problem with a tensor some of whose values are not finite."""
    return Problem(name, f"{count} NaN or infinite values", "finite values") if count else None

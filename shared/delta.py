"""Delta checkpoints: only the elements that changed, exact to the bit.

After one small optimizer step most values of a checkpoint are, in the dtype that is served, what
they were. A delta names the checkpoint it starts from and the one it leads to by their digests
(:mod:`shared.weights`) and holds what lies between::

    magic "TITODLT1" | header {"base": digest} | frame ... | end {"digest": digest} | checksum

A header is four bytes of little-endian length and JSON. A frame changes one block of one tensor:
its header, then where the changes are (distances) and what they are (differences of the values'
bits, as integers), each cut into byte planes and compressed by zstd. Blocks keep every allocation
small whatever a sender announces, and let threads share a large tensor. Adding a difference undoes
its subtraction for any bits at all, so NaN payloads and signed zeros need no special case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import xxhash
import zstandard
from numpy.typing import NDArray

from shared.errors import MalformedBody
from shared.tensor_hash import Buffer
from shared.weights import ITEM_BYTES, TensorSpec

MAGIC = b"TITODLT1"
BLOCK_ELEMENTS = 1 << 20
"""A flattened tensor is cut into blocks of this many elements; the last may be shorter."""
MAX_JSON_BYTES = 64 << 10
CHECKSUM_BYTES = 32

LENGTH_BYTES = 4
_GAP = np.dtype("<u4")
_ZSTD_LEVEL = 1  # the planes hold hardly any repeats: higher levels cost time and gain nothing
_DENSE_FROM = 0.5  # measured: from here on, distances cost more than the zeros they spare

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """The changes to one block of one tensor, compressed.

    Attributes:
        spec: the tensor; all sizes below are bounded by its size.
        block: which block of it.
        changes: how many values follow.
        gaps: for each change, how many unchanged elements precede it since the last one. Empty
            when there is a value for every element of the block.
        values: what to add to each changed element.
    """

    spec: TensorSpec
    block: int
    changes: int
    gaps: Buffer
    values: Buffer

    def to_bytes(self) -> bytes:
        """The frame as it is sent."""
        header = {
            "name": self.spec.name, "dtype": self.spec.dtype, "shape": self.spec.shape,
            "block": self.block, "changes": self.changes,
            "gaps": len(self.gaps), "values": len(self.values),
        }  # fmt: skip
        return b"".join((encode_json(header), self.gaps, self.values))


def encode_json(document: Mapping[str, Any]) -> bytes:
    """A header of the format: four bytes of length, little-endian, then JSON.

    Raises:
        ValueError: it is longer than a header may be.
    """
    body = orjson.dumps(document)
    if len(body) > MAX_JSON_BYTES:
        raise ValueError(f"a delta's header has {len(body)} bytes; allowed: {MAX_JSON_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def checksum(data: Buffer) -> bytes:
    """XXH3-128 of everything before it, as the 32 hex characters that end a delta."""
    return xxhash.xxh3_128_hexdigest(data).encode()


def elements(data: Buffer, spec: TensorSpec) -> Array:
    """Bytes of a tensor as a flat array of unsigned integers of its items' size, not copied."""
    return np.frombuffer(data, dtype=f"<u{ITEM_BYTES[spec.dtype]}")


def block_ranges(spec: TensorSpec) -> list[slice]:
    """Which bytes of a tensor each of its blocks covers; an empty tensor has no blocks."""
    step = BLOCK_ELEMENTS * ITEM_BYTES[spec.dtype]
    return [slice(at, min(at + step, spec.nbytes)) for at in range(0, spec.nbytes, step)]


def encode_block(spec: TensorSpec, block: int, old: Buffer, new: Buffer) -> Frame | None:
    """What turns one block of a tensor into another, or None if nothing does.

    Args:
        spec: the tensor.
        block: which of its blocks.
        old: the block's bytes in the base.
        new: its bytes now.
    """
    before, after = elements(old, spec), elements(new, spec)
    where = np.flatnonzero(before != after)
    if not len(where):
        return None
    if len(where) > _DENSE_FROM * len(after):
        return Frame(spec, block, len(after), b"", _pack(_fold(after - before)))
    gaps = (np.diff(where, prepend=-1) - 1).astype(_GAP)
    values = _fold(after[where] - before[where])
    return Frame(spec, block, len(where), _pack(gaps), _pack(values))


def apply_frame(data: bytearray | memoryview, frame: Frame) -> Array:
    """Change one block in place.

    Args:
        data: the block's bytes, writable.
        frame: a frame for that block.

    Returns:
        The new values of the elements that were sent, as unsigned integers.

    Raises:
        MalformedBody: a payload is not what the frame's header says; nothing was changed.
    """
    target = elements(data, frame.spec)
    steps = _unfold(_unpack(frame.values, frame.changes, target.dtype, frame))
    if not len(frame.gaps):
        target += steps
        return target
    gaps = _unpack(frame.gaps, frame.changes, _GAP, frame)
    # At most 2^20 gaps below 2^32 each: the sum cannot overflow.
    where = np.cumsum(gaps, dtype=np.int64) + np.arange(frame.changes)
    if where[-1] >= len(target):
        raise malformed(frame, f"element {where[-1]} of {len(target)} is to be changed")
    values: Array = target[where] + steps
    target[where] = values
    return values


def _fold(steps: Array) -> Array:
    """Differences with the sign moved to the lowest bit (zigzag): 0, -1, 1, -2 as 0, 1, 2, 3.

    Small steps in either direction then leave the high byte planes empty.
    """
    signs = steps.view(f"<i{steps.itemsize}") >> (8 * steps.itemsize - 1)
    folded: Array = (steps << 1) ^ signs.view(steps.dtype)
    return folded


def _unfold(folded: Array) -> Array:
    steps: Array = (folded >> 1) ^ -(folded & 1)
    return steps


def _pack(values: Array) -> bytes:
    # Shifting and narrowing is several times faster than transposing the bytes.
    planes = [(values >> (8 * i)).astype(np.uint8) for i in range(values.itemsize)]
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(np.concatenate(planes).data)


def _unpack(payload: Buffer, count: int, dtype: np.dtype[Any], frame: Frame) -> Array:
    expected = count * dtype.itemsize
    try:
        # The decompressor allocates what the payload announces, so that is looked at first.
        announced = zstandard.frame_content_size(payload)
        if announced != expected:
            raise malformed(frame, f"a payload announces {announced} bytes, not {expected}")
        raw = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise malformed(frame, str(error)) from None
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(dtype.itemsize, count)
    values: Array = planes[0].astype(dtype)
    for i in range(1, dtype.itemsize):
        values |= planes[i].astype(dtype) << (8 * i)
    return values


def malformed(frame: Frame, reason: str) -> MalformedBody:
    """The error for a frame that breaks the format."""
    return MalformedBody(f"the delta is malformed: block {frame.block} of {frame.spec}: {reason}")

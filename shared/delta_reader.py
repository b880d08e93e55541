"""Reading a delta that somebody sent: everything is checked before anything is believed.

The checksum comes first, so that damage on the way is reported as such. Then each header is held
against the tensors of the base, which bounds every size before anything of that size is allocated.
What the payloads hold is checked by :func:`shared.delta.apply_frame`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from shared.delta import (
    BLOCK_ELEMENTS,
    CHECKSUM_BYTES,
    LENGTH_BYTES,
    MAGIC,
    MAX_JSON_BYTES,
    Frame,
    checksum,
    malformed,
)
from shared.errors import MalformedBody, Problem, WeightsRejected
from shared.weights import TensorSpec

OPENING_BYTES = len(MAGIC) + LENGTH_BYTES + MAX_JSON_BYTES
"""The base's digest lies within this many bytes of a delta's start."""
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta whose checksum and structure are right. Payloads are still compressed.

    Attributes:
        base: digest of the checkpoint that it changes.
        digest: digest of the checkpoint that results.
        frames: at most one for each block of each tensor.
    """

    base: str
    digest: str
    frames: tuple[Frame, ...]


def parse_base(data: memoryview) -> str:
    """Digest of the checkpoint that a delta changes, from its first bytes.

    Raises:
        MalformedBody: it is not a delta of this format.
    """
    return _open(data)[1]


def _open(data: memoryview) -> tuple[_Cursor, str]:
    if data[: len(MAGIC)] != MAGIC:
        raise MalformedBody(f"not a delta: it does not begin with {MAGIC.decode()}")
    cursor = _Cursor(data)
    cursor.take(len(MAGIC))
    return cursor, _digest(cursor.json(), "base")


def parse_delta(data: memoryview, known: Mapping[str, TensorSpec]) -> Delta:
    """Read a delta, all of it except what its payloads hold.

    Args:
        data: the delta; must outlive the frames, which refer to it.
        known: the tensors that the base consists of.

    Raises:
        MalformedBody: it was cut short or changed on the way, or its sender does not follow the
            format.
        WeightsRejected: it changes tensors that the base does not have.
    """
    cursor, base = _open(data)
    cursor = _verified(data, cursor.offset)
    frames: list[Frame] = []
    last: dict[str, int] = {}
    while "digest" not in (header := cursor.json()):
        frame = _parse_frame(header, cursor, known)
        if frame.block <= last.get(frame.spec.name, -1):
            raise malformed(frame, "it comes twice, or after a later one")
        last[frame.spec.name] = frame.block
        frames.append(frame)
    digest = _digest(header, "digest")
    if surplus := len(data) - CHECKSUM_BYTES - cursor.offset:
        raise MalformedBody(f"the delta is malformed: {surplus} bytes follow its end")
    return Delta(base, digest, tuple(frames))


def _verified(data: memoryview, offset: int) -> _Cursor:
    end = len(data) - CHECKSUM_BYTES
    if end < offset:
        raise MalformedBody("the delta is cut short: it ends before its checksum")
    if bytes(data[end:]) != checksum(data[:end]):
        raise MalformedBody("the delta's checksum is wrong: it was cut short or changed on the way")
    cursor = _Cursor(data[:end])
    cursor.take(offset)
    return cursor


def _parse_frame(header: dict[str, Any], cursor: _Cursor, known: Mapping[str, TensorSpec]) -> Frame:
    match header:
        case {
            "name": str(name), "dtype": str(dtype), "shape": list(shape), "block": int(block),
            "changes": int(changes), "gaps": int(gap_bytes), "values": int(value_bytes),
        }:  # fmt: skip
            spec = _known_spec(name, dtype, shape, known)
        case _:
            raise MalformedBody(f"the delta is malformed: a frame's header is {header!r:.200}")
    frame = Frame(spec, block, changes, cursor.take(gap_bytes), cursor.take(value_bytes))
    _check_sizes(frame)
    return frame


def _known_spec(
    name: str, dtype: str, shape: list[Any], known: Mapping[str, TensorSpec]
) -> TensorSpec:
    spec = known.get(name)
    if spec is not None and (spec.dtype, list(spec.shape)) == (dtype, shape):
        return spec
    allowed = f"{spec.dtype}{list(spec.shape)}" if spec else "only tensors that the model has"
    problem = Problem(f"{name:.200}", f"{dtype}{shape}"[:200], allowed)
    raise WeightsRejected("the delta does not fit the model", problems=[problem])


def _check_sizes(frame: Frame) -> None:
    total = math.prod(frame.spec.shape)
    if not 0 <= frame.block * BLOCK_ELEMENTS < total:
        raise malformed(frame, f"the tensor has {total} elements, {BLOCK_ELEMENTS} in a block")
    size = min(BLOCK_ELEMENTS, total - frame.block * BLOCK_ELEMENTS)
    least = 1 if len(frame.gaps) else size
    if not least <= frame.changes <= size:
        raise malformed(frame, f"{frame.changes} changes; allowed: {least} to {size}")


def _digest(header: dict[str, Any], field: str) -> str:
    value = header.get(field)
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise MalformedBody(f"the delta is malformed: {field} is {value!r:.80}, not a digest")
    return value


class _Cursor:
    """Reads a delta from front to back; its payloads are not copied."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    def take(self, count: int) -> memoryview:
        left = len(self._data) - self.offset
        if not 0 <= count <= left:
            raise MalformedBody(f"the delta is cut short: {count} more bytes expected, {left} left")
        self.offset += count
        return self._data[self.offset - count : self.offset]

    def json(self) -> dict[str, Any]:
        start, length = self.offset, int.from_bytes(self.take(LENGTH_BYTES), "little")
        if length > MAX_JSON_BYTES:
            raise MalformedBody(
                f"the delta is malformed: a header of {length} bytes at byte {start}; "
                f"allowed: {MAX_JSON_BYTES}"
            )
        try:
            document = orjson.loads(self.take(length))
        except ValueError as error:
            raise MalformedBody(f"the delta is malformed: at byte {start}: {error}") from None
        if not isinstance(document, dict):
            raise MalformedBody(f"the delta is malformed: no JSON object at byte {start}")
        return document

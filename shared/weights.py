"""Checkpoints as streams: the safetensors layout, content digests, one tensor in memory at a time.

The safetensors format is eight bytes of little-endian header length, a JSON header that gives each
tensor's dtype, shape and byte range, and the tensors' bytes. Reading and writing it here, without
the library, is what lets a trainer send parameters one by one and a server hash them as they
arrive; neither ever holds a second copy of the model.

A **digest** names the content of a checkpoint whatever the order or file layout of its tensors:
XXH3-128 over the lines ``name NUL dtype NUL dims NUL hash LF``, sorted by name, where dims are
decimal numbers joined by commas and hash is that of the tensor's bytes (:mod:`shared.tensor_hash`).
It protects against torn and mislabelled weights, not against forgery; bearer tokens are for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from shared.errors import MalformedBody
from shared.tensor_hash import TensorHash

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 64 << 20
PREFIX_BYTES = 8
TRAILER_BYTES = 32
_CHUNK_BYTES = 512 << 10
"""Small pieces cost a system call each; larger ones are not in the cache any more when they go."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What identifies one checkpoint tensor, but for its values.

    Attributes:
        name: as in the checkpoint.
        dtype: safetensors' name, such as ``BF16`` or ``F32``; a key of ``ITEM_BYTES``.
        shape: empty for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor whose bytes are produced when they are about to be sent.

    Attributes:
        spec: what the receiver is told.
        load: returns the contiguous little-endian bytes, ``spec.nbytes`` long; called once.
        begin: begins to produce them, and does not wait; called before ``load``, or not at all.
    """

    spec: TensorSpec
    load: Callable[[], bytes | bytearray | memoryview]
    begin: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Where a tensor's bytes lie: ``[start, end)``, counted from the start of the file."""

    spec: TensorSpec
    start: int
    end: int


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length prefix and JSON header of a safetensors file that holds ``specs`` in this order.

    Args:
        metadata: strings for the header's ``__metadata__``.

    Raises:
        ValueError: a name is there twice, or reserved.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        if spec.name in header or spec.name == "__metadata__":
            raise ValueError(f"tensor {spec.name} is listed twice, or has a reserved name")
        end = offset + spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    body = orjson.dumps(header)
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def header_length(prefix: bytes) -> int:
    """Length of the JSON header that the first eight bytes announce.

    Raises:
        MalformedBody: it cannot be a safetensors file.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX_BYTES or not 2 <= length <= MAX_HEADER_BYTES:
        raise MalformedBody(
            f"not a safetensors file: a header of {length} bytes is announced; "
            f"allowed: 2 to {MAX_HEADER_BYTES}"
        )
    return length


def header_metadata(header: bytes) -> dict[str, str]:
    """The free-form strings that a safetensors header may carry beside its tensors.

    Raises:
        MalformedBody: it is not a JSON object, or carries something else than strings.
    """
    try:
        metadata = dict(orjson.loads(header).get("__metadata__", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise MalformedBody(f"the safetensors header is malformed: {error!r}") from None
    if not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedBody("the safetensors header is malformed: metadata are strings")
    return metadata


def parse_header(header: bytes) -> list[TensorRange]:
    """Tensors of a safetensors file in file order, from its JSON header.

    Raises:
        MalformedBody: bad JSON, an unknown dtype, or ranges that overlap or leave holes.
    """
    try:
        entries = orjson.loads(header)
        entries.pop("__metadata__", None)
        ranges = [_parse_entry(name, entry, len(header)) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MalformedBody(f"the safetensors header is malformed: {error!r}") from None
    ranges.sort(key=lambda r: (r.start, r.end))
    expected = PREFIX_BYTES + len(header)
    for item in ranges:
        if item.start != expected or item.end - item.start != item.spec.nbytes:
            raise MalformedBody(
                f"the safetensors header is malformed: {item.spec} occupies bytes "
                f"{item.start} to {item.end}; allowed: {item.spec.nbytes} bytes from {expected}"
            )
        expected = item.end
    return ranges


def _parse_entry(name: str, entry: Any, header_bytes: int) -> TensorRange:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name} has dtype {dtype}; allowed: {', '.join(ITEM_BYTES)}")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError(f"tensor {name} has a negative or non-integer size")
    base = PREFIX_BYTES + header_bytes
    return TensorRange(TensorSpec(name, dtype, shape), base + start, base + end)


def checkpoint_digest(tensors: Iterable[tuple[TensorSpec, str]]) -> str:
    """Digest of a checkpoint from its specs and the hex hash of each tensor's bytes."""
    whole = xxhash.xxh3_128()
    for spec, tensor_hash in sorted(tensors, key=lambda item: item[0].name):
        dims = ",".join(map(str, spec.shape))
        whole.update(f"{spec.name}\0{spec.dtype}\0{dims}\0{tensor_hash}\n".encode())
    return whole.hexdigest()


def stream_length(tensors: Sequence[LazyTensor], metadata: Mapping[str, str] | None = None) -> int:
    """Bytes that :func:`stream_checkpoint` will yield, its digest trailer included."""
    specs = [tensor.spec for tensor in tensors]
    return len(encode_header(specs, metadata)) + sum(spec.nbytes for spec in specs) + TRAILER_BYTES


def stream_checkpoint(
    tensors: Sequence[LazyTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces, then its digest as 32 hex characters.

    The digest comes last because it is known only when the last tensor has been produced.

    Raises:
        ValueError: a tensor produced another number of bytes than its spec says.
    """
    yield encode_header((tensor.spec for tensor in tensors), metadata)
    hashes: dict[TensorSpec, str] = {}
    yield from stream_tensors(tensors, hashes)
    yield checkpoint_digest(hashes.items()).encode()


def stream_tensors(
    tensors: Sequence[LazyTensor], hashes: dict[TensorSpec, str]
) -> Iterator[memoryview]:
    """The bytes of tensors, in pieces; each begins to be produced while the one before it is sent.

    Args:
        hashes: where each one's hash is noted once it is known.

    Raises:
        ValueError: a tensor produced another number of bytes than its spec says.
    """
    for tensor, after in itertools.zip_longest(tensors, tensors[1:]):
        tensor.begin()
        if after is not None:
            after.begin()
        data = memoryview(tensor.load()).cast("B")
        if len(data) != tensor.spec.nbytes:
            raise ValueError(f"{tensor.spec} produced {len(data)} bytes, not {tensor.spec.nbytes}")
        whole = TensorHash()
        for start in range(0, len(data), _CHUNK_BYTES):
            piece = data[start : start + _CHUNK_BYTES]
            whole.update(piece)  # it is then in the cache when it is sent
            yield piece
        hashes[tensor.spec] = whole.hexdigest()

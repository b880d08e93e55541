"""The safetensors layout and digests, against the safetensors library and by hand."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import MalformedBody
from shared.tensor_hash import HASH_PIECE_BYTES, TensorHash, tensor_hash
from shared.weights import (
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    LazyTensor,
    TensorSpec,
    checkpoint_digest,
    encode_header,
    header_length,
    parse_header,
    stream_checkpoint,
    stream_length,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def checkpoints(draw: st.DrawFn) -> list[tuple[TensorSpec, bytes]]:
    found = []
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        spec = TensorSpec(name, draw(st.sampled_from(sorted(ITEM_BYTES))), draw(SHAPES))
        found.append((spec, draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))))
    return found


def lazy(checkpoint: Sequence[tuple[TensorSpec, bytes]]) -> list[LazyTensor]:
    return [LazyTensor(spec, functools.partial(bytes, data)) for spec, data in checkpoint]


def streamed(checkpoint: Sequence[tuple[TensorSpec, bytes]]) -> bytes:
    return b"".join(bytes(piece) for piece in stream_checkpoint(lazy(checkpoint)))


@given(checkpoints())
def test_a_stream_is_as_long_as_announced(checkpoint: list[tuple[TensorSpec, bytes]]) -> None:
    assert len(streamed(checkpoint)) == stream_length(lazy(checkpoint))


@given(checkpoints())
def test_what_is_written_is_read(checkpoint: list[tuple[TensorSpec, bytes]]) -> None:
    raw = streamed(checkpoint)
    length = header_length(raw[:8])
    ranges = parse_header(raw[8 : 8 + length])
    assert {item.spec: raw[item.start : item.end] for item in ranges} == dict(checkpoint)
    end = max((item.end for item in ranges), default=8 + length)
    assert end == len(raw) - 32


@given(checkpoints())
def test_the_trailer_is_the_digest_by_its_definition(
    checkpoint: list[tuple[TensorSpec, bytes]],
) -> None:
    lines = []
    for spec, data in sorted(checkpoint, key=lambda item: item[0].name):
        dims = ",".join(str(size) for size in spec.shape)
        parts = [spec.name, spec.dtype, dims, by_definition(data)]
        lines.append("\0".join(parts) + "\n")
    expected = xxhash.xxh3_128("".join(lines).encode()).hexdigest()
    assert streamed(checkpoint)[-32:].decode() == expected


def test_the_digest_of_a_known_checkpoint() -> None:
    # Fixed for ever: another implementation can check itself against these numbers.
    short, long = TensorSpec("bias", "F32", (2,)), TensorSpec("weight", "U8", (600, 1000))
    checkpoint = [
        (long, bytes(index % 251 for index in range(600_000))),
        (short, b"\x00\x00\x80\x3f\x00\x00\x00\x40"),  # 1.0, 2.0
    ]
    lines = (
        b"bias\0F32\0002\0004533ce61c4655ba3c3e077b25dd1d769\n"
        b"weight\0U8\000600,1000\0001155556cd4f91054f36d254cffeb6a2a\n"
    )
    digest = "df52e1358ddeae34c6b33f4f2a385f70"
    assert xxhash.xxh3_128_hexdigest(lines) == digest
    assert streamed(checkpoint)[-32:].decode() == digest
    assert checkpoint_digest([]) == "99aa06d3014798d86001c324468d497f"


def test_the_protocol_tells_the_known_digest() -> None:
    told = (files("shared") / "PROTOCOL.md").read_text()
    long = bytes(index % 251 for index in range(600_000))
    pieces = [long[start : start + (1 << 18)] for start in (0, 1 << 18, 2 << 18)]
    hashes = [xxhash.xxh3_128_hexdigest(piece) for piece in pieces]
    joined = xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(hashes)))
    for number in (*hashes, joined, "df52e1358ddeae34c6b33f4f2a385f70"):
        assert number in told


SIZES = [0, 1, 240, 241, 1024, 300_000]
SIZES += [n * HASH_PIECE_BYTES + more for n in (1, 2, 7) for more in (-1, 0, 1, 100)]


def by_definition(data: bytes) -> str:
    if len(data) <= 262_144:
        return xxhash.xxh3_128_hexdigest(data)
    pieces = [data[start : start + 262_144] for start in range(0, len(data), 262_144)]
    return xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces))


@pytest.mark.parametrize("size", SIZES)
def test_the_hash_of_a_tensor(size: int) -> None:
    data = random.Random(size).randbytes(size)
    expected = by_definition(data)
    assert tensor_hash(data) == tensor_hash(bytearray(data)) == expected
    for step in (1000, HASH_PIECE_BYTES - 1, HASH_PIECE_BYTES, 3 * HASH_PIECE_BYTES + 5):
        whole = TensorHash()
        for start in range(0, size, step):
            whole.update(data[start : start + step])
            assert step < 10_000 or whole.hexdigest() == by_definition(data[: start + step])
        assert whole.hexdigest() == expected


@given(checkpoints(), st.randoms())
def test_the_digest_ignores_the_order(
    checkpoint: list[tuple[TensorSpec, bytes]], draw: random.Random
) -> None:
    shuffled = list(checkpoint)
    draw.shuffle(shuffled)
    assert streamed(shuffled)[-32:] == streamed(checkpoint)[-32:]


@pytest.mark.parametrize(
    "other",
    [
        TensorSpec("v", "F32", (2, 3)),
        TensorSpec("w", "I32", (2, 3)),
        TensorSpec("w", "F32", (3, 2)),
        TensorSpec("w", "F32", (6,)),
        TensorSpec("w", "F32", (2, 3, 1)),
    ],
)
def test_the_digest_depends_on_all_that_is_said(other: TensorSpec) -> None:
    data = bytes(range(24))
    assert (
        streamed([(other, data)])[-32:] != streamed([(TensorSpec("w", "F32", (2, 3)), data)])[-32:]
    )


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 4),
        "b.weight": torch.randn(2, 2).to(torch.bfloat16),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(1.5),
        '\u00e9\n"quoted"': torch.arange(3),
    }
    dtypes = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
    checkpoint = [
        (
            TensorSpec(name, dtypes[tensor.dtype], tuple(tensor.shape)),
            bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()),
        )
        for name, tensor in tensors.items()
    ]
    path = tmp_path / "written.safetensors"
    path.write_bytes(streamed(checkpoint)[:-32])
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_what_the_library_writes_is_read() -> None:
    tensors = {"b": torch.randn(2, 3), "a": torch.ones(4, dtype=torch.int64), "c": torch.zeros(0)}
    raw = safetensors.torch.save(tensors, metadata={"format": "pt", "dims": "[1,2]"})
    ranges = parse_header(raw[8 : 8 + header_length(raw[:8])])
    found = {item.spec.name: (item.spec.dtype, item.spec.shape) for item in ranges}
    assert found == {"a": ("I64", (4,)), "b": ("F32", (2, 3)), "c": ("F32", (0,))}
    for item in ranges:
        expected = tensors[item.spec.name].view(-1).view(torch.uint8).numpy().tobytes()
        assert raw[item.start : item.end] == expected


def test_data_begins_on_a_multiple_of_eight() -> None:
    for length in range(1, 20):
        assert len(encode_header([TensorSpec("n" * length, "F32", (1,))])) % 8 == 0


def test_large_tensors_go_out_in_pieces() -> None:
    spec = TensorSpec("w", "U8", (10 << 20,))
    pieces = list(stream_checkpoint([LazyTensor(spec, lambda: bytes(spec.nbytes))]))
    assert max(len(piece) for piece in pieces) <= 4 << 20
    assert sum(len(piece) for piece in pieces) == stream_length([LazyTensor(spec, bytes)])


def test_each_tensor_is_produced_once_and_when_it_is_sent() -> None:
    made: list[str] = []

    def tensor(name: str) -> LazyTensor:
        def load() -> bytes:
            made.append(name)
            return b"\0" * 4

        return LazyTensor(TensorSpec(name, "F32", (1,)), load)

    pieces = stream_checkpoint([tensor("a"), tensor("b")])
    next(pieces)
    assert made == []
    next(pieces)
    assert made == ["a"]
    assert len(list(pieces)) == 2
    assert made == ["a", "b"]


@pytest.mark.parametrize("produced", [b"", b"\0" * 3, b"\0" * 5])
def test_a_tensor_of_the_wrong_length_stops_the_stream(produced: bytes) -> None:
    with pytest.raises(ValueError, match="w F32"):
        list(stream_checkpoint([LazyTensor(TensorSpec("w", "F32", (1,)), lambda: produced)]))


def test_a_name_listed_twice_is_not_written() -> None:
    with pytest.raises(ValueError, match="twice"):
        encode_header([TensorSpec("w", "F32", (1,))] * 2)


def test_a_tensor_may_not_be_called_like_the_metadata() -> None:
    # Readers take that entry out of the header, and the tensor with it.
    with pytest.raises(ValueError):
        encode_header([TensorSpec("__metadata__", "F32", (1,))])


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"\x10",
        b"\x10" + b"\0" * 6,
        b"\0" * 8,
        b"\x01" + b"\0" * 7,
        b"\xff" * 8,
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little"),
        b"\0" * 7 + b"\x80",
    ],
)
def test_a_header_length_that_cannot_be(prefix: bytes) -> None:
    with pytest.raises(MalformedBody):
        header_length(prefix)


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(), "b": entry()},
        {"a": entry(offsets=(0, 4)), "b": entry(offsets=(2, 6))},
        {"a": entry(offsets=(0, 4)), "b": entry(offsets=(8, 12))},
        {"a": entry(offsets=(4, 8))},
        {"a": entry(offsets=(4, 0))},
        {"a": entry(offsets=(-4, 0))},
        {"a": entry(offsets=(0, 8))},
        {"a": entry(offsets=(0, 2**62))},
        {"a": entry(shape=(2**62,), offsets=(0, 4))},
        {"a": entry(shape=(2**40, 2**40), offsets=(0, 4))},
        {"a": entry(shape=(-1,))},
        {"a": entry(shape=(-1, -1))},
        {"a": entry(shape=(1.0,))},
        {"a": entry(shape=(True,))},
        {"a": entry(shape="1")},
        {"a": entry(shape=5)},
        {"a": entry(shape=None)},
        {"a": entry(shape=[[1]])},
        {"a": entry(offsets=(0,))},
        {"a": entry(offsets=(0, 4, 8))},
        {"a": entry(offsets=("0", "4"))},
        {"a": entry(offsets=(False, 4))},
        {"a": entry(offsets=(0, 4.0))},
        {"a": entry(offsets=None)},
        {"a": entry(offsets={"0": 4})},
        {"a": entry(dtype="F33")},
        {"a": entry(dtype="f32")},
        {"a": entry(dtype=None)},
        {"a": entry(dtype=["F32"])},
        {"a": {}},
        {"a": None},
        {"a": []},
        {"a": "F32"},
        [],
        ["a"],
        None,
        5,
        "text",
    ],
)
def test_a_header_that_lies(header: Any) -> None:
    with pytest.raises(MalformedBody):
        parse_header(json.dumps(header).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"{}x",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    ],
)
def test_a_header_that_is_no_header(raw: bytes) -> None:
    with pytest.raises(MalformedBody):
        parse_header(raw)


@pytest.mark.parametrize("order", [(4, 8), (8, 4)])
def test_a_name_given_twice_is_refused_or_read_as_the_library_does(order: tuple[int, int]) -> None:
    # The worker reads the file again with the library: both must see the same tensors.
    entries = (f'"a":{json.dumps(entry(shape=(n // 4,), offsets=(0, n)))}' for n in order)
    header = f"{{{','.join(entries)}}}".encode()
    try:
        found = {item.spec.name: item.spec.shape for item in parse_header(header)}
    except MalformedBody:
        return
    raw = len(header).to_bytes(8, "little") + header + b"\0" * order[-1]
    assert found == {name: tuple(t.shape) for name, t in safetensors.torch.load(raw).items()}


@given(st.binary(max_size=80))
def test_garbage_is_malformed_or_empty(raw: bytes) -> None:
    try:
        parse_header(raw)
    except MalformedBody:
        return


def test_metadata_is_no_tensor() -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry()}
    (only,) = parse_header(json.dumps(header).encode())
    assert only.spec == TensorSpec("a", "F32", (1,))


def test_tensors_are_given_in_file_order() -> None:
    empty = entry(shape=(0,), offsets=(4, 4))
    header = {"b": entry(offsets=(4, 8)), "a": entry(offsets=(0, 4)), "z": empty}
    ranges = parse_header(json.dumps(header).encode())
    assert [item.spec.name for item in ranges] == ["a", "z", "b"]

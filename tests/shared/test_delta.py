"""Deltas are exact to the bit."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.delta import BLOCK_ELEMENTS, CHECKSUM_BYTES
from shared.errors import TitoError
from shared.weights import ITEM_BYTES, TensorSpec
from tests.shared.delta_support import Tensors, applied, digest_of, encoded, frames_of

VECTORS = json.loads((Path(__file__).parent / "delta_vectors.json").read_text())


@st.composite
def changes(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    old: Tensors = {}
    new: Tensors = {}
    for index in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        spec = TensorSpec(f"layer.{index}", dtype, shape)
        before = draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))
        after = bytearray(before)
        if spec.nbytes:
            how = draw(st.sampled_from(["few", "none", "all"]))
            if how == "all":
                after[:] = draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))
            elif how == "few":
                for at in draw(st.sets(st.integers(0, spec.nbytes - 1), max_size=4)):
                    after[at] = draw(st.integers(0, 255))
        old[spec], new[spec] = before, bytes(after)
    return old, new


@given(changes())
@settings(max_examples=300, deadline=None)
def test_any_bits_of_any_dtype_survive(pair: tuple[Tensors, Tensors]) -> None:
    old, new = pair
    assert applied(encoded(old, new), old) == new


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        ("F32", 0x00000000, 0x80000000),  # 0.0 to -0.0: equal as floats
        ("F32", 0x7FC00000, 0x7FC00001),  # one NaN to another: never equal as floats
        ("BF16", 0x8000, 0x0000),
        ("BF16", 0x7FC0, 0xFFC1),
        ("BF16", 0xFFFF, 0x0000),  # the difference wraps around
        ("F16", 0x0000, 0xFFFF),
        ("F64", 0x0000000000000001, 0xFFF8000000000001),
    ],
)
def test_bits_that_floats_do_not_tell_apart(dtype: str, before: int, after: int) -> None:
    spec, size = TensorSpec("w", dtype, (9,)), ITEM_BYTES[dtype]
    old = {spec: before.to_bytes(size, "little") * 9}
    new = {spec: old[spec][: 8 * size] + after.to_bytes(size, "little")}
    assert applied(encoded(old, new), old) == new


def test_same_bits_are_no_change_even_if_nan() -> None:
    old = {TensorSpec("w", "F32", (4,)): struct.pack("<f", float("nan")) * 4}
    assert frames_of(encoded(old, old), old) == ()


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32"])
@pytest.mark.parametrize("share", [0.001, 0.03, 0.49, 0.51, 1.0])
def test_tensors_of_several_blocks(dtype: str, share: float) -> None:
    rng = np.random.default_rng(0)
    old, new = large(rng, dtype, share)
    delta = encoded(old, new)
    assert applied(delta, old) == new
    assert [frame.block for frame in frames_of(delta, old)] == [0, 1, 2]


def large(rng: np.random.Generator, dtype: str, share: float) -> tuple[Tensors, Tensors]:
    """A tensor of two blocks and a bit, and the same after steps of one or two units."""
    spec = TensorSpec("w", dtype, (2 * BLOCK_ELEMENTS + 7,))
    width = np.dtype(f"<u{ITEM_BYTES[dtype]}")
    before = rng.integers(0, 1 << (8 * width.itemsize), spec.shape, dtype=width)
    steps = rng.choice(np.array([1, 2, -1, -2]).astype(width), spec.shape)
    chosen = rng.random(spec.shape) < share
    chosen[-1] = True
    after = np.where(chosen, before + steps, before)
    return {spec: before.tobytes()}, {spec: after.tobytes()}


def test_only_the_blocks_that_changed_are_sent() -> None:
    spec = TensorSpec("w", "U8", (2 * BLOCK_ELEMENTS + 7,))
    old = {spec: bytes(spec.nbytes)}
    new = {spec: bytes(spec.nbytes - 1) + b"\1"}
    (frame,) = frames_of(encoded(old, new), old)
    assert (frame.block, frame.changes) == (2, 1)


def test_a_small_step_costs_little() -> None:
    rng = np.random.default_rng(0)
    old, new = large(rng, "BF16", 0.03)
    size = sum(map(len, old.values()))
    # Three elements in a hundred, at 6.5 bits for where and 2.5 bits for what.
    assert len(encoded(old, new)) < 0.018 * size


def test_a_rewritten_tensor_costs_no_more_than_itself() -> None:
    rng = np.random.default_rng(0)
    spec = TensorSpec("w", "BF16", (1 << 18,))
    old, new = {spec: rng.bytes(spec.nbytes)}, {spec: rng.bytes(spec.nbytes)}
    assert len(encoded(old, new)) < 1.01 * spec.nbytes


# Test vectors, for those who write another implementation


def vector_tensors(case: dict[str, Any], which: str) -> Tensors:
    return {
        TensorSpec(t["name"], t["dtype"], tuple(t["shape"])): bytes.fromhex(t[which])
        for t in case["tensors"]
    }


def unsqueezed(payload: Any) -> str:
    return zstandard.ZstdDecompressor().decompress(bytes(payload)).hex() if len(payload) else ""


def plain_frames(delta: bytes, tensors: Tensors) -> list[dict[str, Any]]:
    """Frames without the compression, whose bytes are the compressor's own affair."""
    return [
        {
            "name": f.spec.name, "block": f.block, "changes": f.changes,
            "gaps": unsqueezed(f.gaps), "values": unsqueezed(f.values),
        }
        for f in frames_of(delta, tensors)
    ]  # fmt: skip


@pytest.mark.parametrize("case", VECTORS["accepted"], ids=lambda case: case["what"])
def test_vectors(case: dict[str, Any]) -> None:
    old, new = vector_tensors(case, "base"), vector_tensors(case, "result")
    delta = bytes.fromhex(case["delta"])
    assert (digest_of(old), digest_of(new)) == (case["base_digest"], case["result_digest"])
    assert applied(delta, old) == new
    assert plain_frames(delta, old) == case["frames"]
    assert plain_frames(encoded(old, new), old) == case["frames"]
    assert delta.endswith(xxhash.xxh3_128_hexdigest(delta[:-CHECKSUM_BYTES]).encode())


@pytest.mark.parametrize("case", VECTORS["rejected"], ids=lambda case: case["what"])
def test_vectors_of_what_is_rejected(case: dict[str, Any]) -> None:
    with pytest.raises(TitoError) as caught:
        applied(bytes.fromhex(case["delta"]), vector_tensors(case, "base"))
    assert caught.value.code == case["code"]

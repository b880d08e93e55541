"""What bits say about values, against torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout_server.checkpoints import TORCH_DTYPES
from rollout_server.tensor_check import TensorLook, count_not_finite
from shared.tensor_hash import tensor_hash
from shared.weights import ITEM_BYTES, TensorSpec

PAIRS = [("BF16", "BF16"), ("BF16", "F32"), ("F16", "F16"), ("F16", "F32")]
PAIRS += [("F32", served) for served in TORCH_DTYPES]


def all_bits(dtype: str) -> bytes:
    """Every value of a dtype of two bytes, or those of four around every edge and many others."""
    if ITEM_BYTES[dtype] == 2:
        return bytes(np.arange(1 << 16, dtype=np.uint16).data)
    steps = np.arange(-3, 4)
    edges = np.array([0, 0x477FF000, 0x7F7F8000, 0x7F800000, 0x7FC00000, 0x7FFFFFFC])
    near = (edges[:, None] + steps).clip(0, 0x7FFFFFFF).ravel().astype(np.uint32)
    spread = np.random.default_rng(0).integers(1 << 32, size=100_000, dtype=np.uint32)
    return bytes(np.concatenate([near, near | np.uint32(1 << 31), spread]).data)


@pytest.mark.parametrize(("dtype", "served"), PAIRS)
@pytest.mark.parametrize("piece", [1, 3, 1000, 1 << 30])
def test_counts_what_torch_counts(dtype: str, served: str, piece: int) -> None:
    raw = all_bits(dtype)[: 4096 if piece < 1000 else None]
    values = torch.frombuffer(bytearray(raw), dtype=TORCH_DTYPES[dtype])
    expected = int((~torch.isfinite(values.to(TORCH_DTYPES[served]))).sum())
    look = TensorLook(TensorSpec("t", dtype, (len(values),)), served)
    for start in range(0, len(raw), piece):
        look.update(raw[start : start + piece])
    check = look.result()
    assert check.hash == tensor_hash(raw)
    assert (check.problem.got if check.problem else "0") == (
        f"{expected} NaN or infinite values" if expected else "0"
    )


@pytest.mark.parametrize(("dtype", "served"), PAIRS)
def test_one_value_among_finite_ones(dtype: str, served: str) -> None:
    """Of either sign, and just this or just not this side of an edge."""
    raw, size = all_bits(dtype), ITEM_BYTES[dtype]
    values = torch.frombuffer(bytearray(raw), dtype=TORCH_DTYPES[dtype])
    finite = torch.isfinite(values.to(TORCH_DTYPES[served])).numpy()
    bits = np.frombuffer(raw, f"<u{size}")
    edges = np.flatnonzero(finite[1:] != finite[:-1])
    assert len(edges) >= 2
    for index in {*edges[:200], *(edges[:200] + 1)}:
        for others in ([], [0x0001, 1 << (8 * size - 1)]):
            array = np.array([*others, bits[index], *others], bits.dtype)
            assert count_not_finite(array, dtype, served) == (not finite[index])


def test_integers_are_finite() -> None:
    look = TensorLook(TensorSpec("t", "I64", (4,)), "I64")
    look.update(bytes([255]) * 32)
    assert look.result().problem is None

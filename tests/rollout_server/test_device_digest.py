"""Digests and finite values of a buffer's tensors; the kernels run interpreted here, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout_server.digest_pieces import Pieces
from rollout_server.verification import HostVerification, Verdict, Verification
from shared import tensor_hash
from shared.channel import Layout
from shared.weights import TensorSpec, checkpoint_digest
from tests.rollout_server.support import digest_of, spec_of, tensor_bytes
from tests.triton_interpreter import run_interpreted

LENGTHS = [
    0, 1, 239, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 1151, 2047, 2048, 2049,
    2112, 4095, 4096, 4097, 4336, 4337, 5000, 8192, 8193, 8448, 40_003,
]  # fmt: skip
DTYPES = ["BF16", "F16", "F32", "F64", "I64", "BOOL", "F8_E4M3", "F8_E5M2"]


def odd_layout() -> Layout:
    """Tensors that end in every way, and of every dtype."""
    specs = [TensorSpec(f"bytes.{length}", "U8", (length,)) for length in LENGTHS]
    specs += [TensorSpec(f"{d}.{n}", d, (n,)) for d in DTYPES for n in (3, 128, 700, 2053)]
    return Layout.of(specs)


def random_bytes(layout: Layout) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (layout.nbytes,), dtype=torch.uint8, generator=generator)


def part(flat: Tensor, layout: Layout, index: int) -> Tensor:
    start = layout.offsets[index]
    return flat[start : start + layout.specs[index].nbytes]


def looked(verification: Verification, ends: list[int]) -> Verdict:
    """What is found in a buffer that is filled up to each of these in turn."""
    verification.begin()
    for end in ends:
        verification.arrived(end)
    return verification.finished()


def some_ends(layout: Layout) -> list[int]:
    """Within pieces, at their ends, between tensors, and several times within the same tensor."""
    long = layout.offsets[LENGTHS.index(40_003)]
    within = [long + 4095, long + 4096, long + 12_289, long + 40_000]
    return [1000, 30_000, 30_100, *within, 120_000, layout.nbytes - 3, layout.nbytes]


def check_kernels(device: str) -> None:
    """Compare the kernel with the hash by its definition, and with what the host says."""
    from rollout_server.device_digest import DeviceVerification

    layout = odd_layout()
    flat = random_bytes(layout)
    by_host = looked(HostVerification(flat, layout), [layout.nbytes])
    wanted = [
        tensor_hash.tensor_hash(part(flat, layout, index).numpy().data)
        for index in range(len(layout.specs))
    ]
    assert by_host.hashes == wanted
    there, ends = flat.to(device), some_ends(layout)
    verification = DeviceVerification(there, layout)
    for arrivals in ([layout.nbytes], ends):
        found = looked(verification, arrivals)
        assert found.hashes == wanted
        assert found.not_finite == by_host.not_finite
    with pytest.raises(ValueError, match="not all of the buffer"):
        looked(verification, ends[:-2])
    # The same tables serve other bytes.
    flat.bitwise_not_()
    there.copy_(flat)
    found = looked(verification, [layout.nbytes])
    assert found == looked(HostVerification(flat, layout), ends)


def check_values_not_finite(device: str) -> None:
    """One value anywhere in a tensor, its neighbours and the padding behind it do not matter."""
    from rollout_server.device_digest import DeviceVerification

    specs = [TensorSpec(f"{d}.{n}", d, (n,)) for d in DTYPES[:4] for n in (5, 129, 5_000)]
    layout = Layout.of(specs)
    flat = torch.full((layout.nbytes,), 255, dtype=torch.uint8)  # padding is NaN
    places = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float, "F64": torch.double}
    values = [part(flat, layout, i).view(places[s.dtype]) for i, s in enumerate(specs)]
    for tensor in values:
        tensor.fill_(torch.finfo(tensor.dtype).max)
    there = flat.to(device)
    verification = DeviceVerification(there, layout)
    assert looked(verification, [layout.nbytes]).not_finite == []
    for some, value in ((slice(0, None, 2), float("nan")), (slice(1, None, 2), -float("inf"))):
        for place in (0.0, 0.5, 1.0):
            for tensor in values[some]:
                tensor[round(place * (len(tensor) - 1))] = value
            there.copy_(flat)
            found = looked(verification, [layout.nbytes])
            assert found.not_finite == [spec.name for spec in specs[some]]
            for tensor in values[some]:
                tensor.fill_(torch.finfo(tensor.dtype).max)


INTERPRETED = """
from shared import tensor_hash
from tests.rollout_server import test_device_digest as here
tensor_hash.HASH_PIECE_BYTES = 4096
here.{check}("cpu")
"""


@pytest.mark.parametrize("check", ["check_kernels", "check_values_not_finite"])
def test_kernels_interpreted(check: str) -> None:
    # Pieces are shorter, since interpreted kernels are slow.
    run_interpreted("-c", INTERPRETED.format(check=check))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGPU:
    def test_kernels(self) -> None:
        check_kernels("cuda")
        check_values_not_finite("cuda")

    @pytest.mark.parametrize("bytes_more", [-1, 0, 1, 64, 239, 240, 241, 1024])
    def test_last_pieces_of_every_kind(self, bytes_more: int) -> None:
        check_against_host([
            TensorSpec(f"{pieces}", "U8", (pieces * tensor_hash.HASH_PIECE_BYTES + bytes_more,))
            for pieces in (1, 2, 1000)
        ])  # fmt: skip

    def test_more_bytes_than_an_int32_counts(self) -> None:
        long = TensorSpec("long", "BF16", ((1 << 31) + 77,))  # more than an uint32, too
        check_against_host([long, TensorSpec("b", "F32", (99_999,))])


def check_against_host(specs: list[TensorSpec]) -> None:
    """Random tensors on a GPU, looked at there and on the host."""
    from rollout_server.device_digest import DeviceVerification

    layout = Layout.of(specs)
    flat = torch.randint(100, (layout.nbytes,), dtype=torch.uint8, device="cuda")
    on_host = flat.cpu()
    wanted = looked(HostVerification(on_host, layout), [layout.nbytes])
    parts = [part(on_host, layout, index).numpy().data for index in range(len(specs))]
    assert wanted.hashes == [tensor_hash.tensor_hash(content) for content in parts]
    verification = DeviceVerification(flat, layout)
    for ends in ([layout.nbytes], [end for _, end in layout.pieces()]):
        assert looked(verification, ends) == wanted


def test_a_buffer_that_begins_anywhere_is_refused() -> None:
    pytest.importorskip("triton")
    from rollout_server.device_digest import DeviceVerification

    layout = Layout.of([TensorSpec("a", "U8", (100,))])
    with pytest.raises(ValueError, match="multiples of 16"):
        DeviceVerification(torch.zeros(1000, dtype=torch.uint8)[3:], layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_digests_are_those_of_checkpoints(dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.randn(70, 130).to(dtype),
        "scalar": torch.tensor(3).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    layout = Layout.of(spec_of(name, tensor) for name, tensor in tensors.items())
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for index, tensor in enumerate(tensors.values()):
        part(flat, layout, index).copy_(tensor.reshape(-1).view(torch.uint8))
    for ends in ([layout.nbytes], [1, 256, 9001, layout.nbytes]):
        found = looked(HostVerification(flat, layout), ends)
        assert found.hashes[0] == tensor_hash.tensor_hash(tensor_bytes(tensors["matrix"]))
        whole = checkpoint_digest(zip(layout.specs, found.hashes, strict=True))
        assert whole == digest_of(tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_host_names_tensors_that_are_not_finite(value: float) -> None:
    layout = Layout.of(TensorSpec(name, "F32", (300,)) for name in ("z", "good", "a"))
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    verification = HostVerification(flat, layout)
    for index in (0, 2):
        part(flat, layout, index).view(torch.float)[7] = value
    # The value itself comes in two parts.
    assert looked(verification, [30, layout.nbytes]).not_finite == ["z", "a"]
    flat.zero_()
    assert looked(verification, [layout.nbytes]).not_finite == []


@pytest.mark.parametrize("ends", [[2_000_000], [1, 262_144, 600_000, 1_100_000, 2_000_000]])
def test_the_host_hashes_long_tensors(ends: list[int]) -> None:
    layout = Layout.of(TensorSpec(str(n), "BF16", (n,)) for n in (131_072, 131_073, 0, 500_000))
    flat = random_bytes(layout)
    parts = [part(flat, layout, index) for index in range(len(layout.specs))]
    verification = HostVerification(flat, layout)
    for number in (3, 0):
        # In the last value of a piece, and in the first of the one after it.
        parts[3].view(torch.bfloat16)[131_072 - 1 : 131_072 + 1] = number
        found = looked(verification, ends)
        assert found.hashes == [tensor_hash.tensor_hash(each.numpy().data) for each in parts]


def test_pieces_cover_every_tensor() -> None:
    # As much as a model of eight billion parameters has; nothing is allocated.
    shapes = [(151_936, 4096), *[(12_288, 4096), (128,), (0, 7)] * 100, (262_145,), (151_936, 4096)]
    layout = Layout.of(TensorSpec(str(i), "BF16", shape) for i, shape in enumerate(shapes))
    pieces, size = Pieces.of(layout), tensor_hash.HASH_PIECE_BYTES
    for index, (spec, start) in enumerate(zip(layout.specs, layout.offsets, strict=True)):
        mine = pieces.tensors == index
        starts = [*range(start, start + spec.nbytes, size)] or [start]
        assert pieces.starts[mine].tolist() == starts
        assert pieces.ends[mine].tolist() == [*starts[1:], start + spec.nbytes]
    assert (np.diff(pieces.ends) >= 0).all()
    for end in (0, 1, size - 1, size, size + 1, layout.nbytes // 3, layout.nbytes):
        assert pieces.complete(end) == (pieces.ends <= end).sum()

"""Digests and finite values of a buffer's tensors; the kernels run interpreted here, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rollout_server import digest_plan
from rollout_server.digest_plan import Step
from rollout_server.verification import HostVerification, Verdict, Verification
from rollout_server.xxh3 import BLOCK_BYTES
from shared.channel import Layout
from shared.weights import TensorSpec, checkpoint_digest
from tests.rollout_server.support import digest_of, spec_of, tensor_bytes
from tests.triton_interpreter import run_interpreted

LENGTHS = [
    0, 1, 239, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 1151, 2047, 2048, 2049,
    2112, 5000, 65536, 65537, 66560, 66561, 200_003,
]  # fmt: skip
DTYPES = ["BF16", "F16", "F32", "F64", "I64", "BOOL", "F8_E4M3", "F8_E5M2"]


def odd_layout() -> Layout:
    """Tensors that end in every way, and of every dtype."""
    specs = [TensorSpec(f"bytes.{length}", "U8", (length,)) for length in LENGTHS]
    specs += [TensorSpec(f"{d}.{n}", d, (n,)) for d in DTYPES for n in (3, 128, 700, 9001)]
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
    """Within blocks, at their ends, between tensors, and twice within the same tensor."""
    return [1000, 70_400, 71_000, 150_016, 300_000, 301_024, layout.nbytes - 3, layout.nbytes]


def check_kernels(device: str) -> None:
    """Compare kernels with the xxhash package, and with what the host says of finite values."""
    from rollout_server.device_digest import DeviceVerification

    layout = odd_layout()
    flat = random_bytes(layout)
    by_host = looked(HostVerification(flat, layout), [layout.nbytes])
    wanted = [
        xxhash.xxh3_128_hexdigest(part(flat, layout, index).numpy().data)
        for index in range(len(layout.specs))
    ]
    there, ends = flat.to(device), some_ends(layout)
    at_once = DeviceVerification(there, layout)
    in_pieces = DeviceVerification(there, layout, ends)
    for verification, arrivals in ((at_once, [layout.nbytes]), (in_pieces, ends)) * 2:
        found = looked(verification, arrivals)
        assert found.hashes == wanted
        assert found.not_finite == by_host.not_finite
    with pytest.raises(ValueError, match="not all of the buffer"):
        looked(in_pieces, ends[:-2])
    # The same tables serve other bytes.
    flat.bitwise_not_()
    there.copy_(flat)
    assert looked(at_once, [layout.nbytes]) == looked(HostVerification(flat, layout), ends)


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
from rollout_server import digest_plan
from tests.rollout_server import test_device_digest as here
digest_plan._LONG_BLOCKS, digest_plan._TOGETHER = 60, 40
here.{check}("cpu")
"""


@pytest.mark.parametrize("check", ["check_kernels", "check_values_not_finite"])
def test_kernels_interpreted(check: str) -> None:
    run_interpreted("-c", INTERPRETED.format(check=check))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGPU:
    def test_kernels(self) -> None:
        check_kernels("cuda")
        check_values_not_finite("cuda")

    def test_more_bytes_than_an_int32_counts(self) -> None:
        from rollout_server.device_digest import DeviceVerification

        layout = Layout.of(
            [TensorSpec("long", "BF16", ((1 << 30) + 77,)), TensorSpec("b", "F32", (99_999,))]
        )
        flat = torch.randint(100, (layout.nbytes,), dtype=torch.uint8, device="cuda")
        host = HostVerification(flat.cpu(), layout)
        ends = [end for _, end in layout.pieces()]
        wanted = looked(host, [layout.nbytes])
        assert looked(DeviceVerification(flat, layout), [layout.nbytes]) == wanted
        assert looked(DeviceVerification(flat, layout, ends), ends) == wanted


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
        assert found.hashes[0] == xxhash.xxh3_128_hexdigest(tensor_bytes(tensors["matrix"]))
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


def blocks_in(steps: list[Step], address: int) -> NDArray[np.int64]:
    """Where each block begins in the buffer, after a look at whether sums and walks agree."""
    found = []
    for step in steps:
        rows = np.zeros(step.blocks, np.int64)
        start, counts, first, _ = step.sums.T
        program = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(program)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows[first[program] + within] = start[program] - address + BLOCK_BYTES * within
        assert step.scans[:, 2].sum() == step.blocks
        for _, row, count, _ in step.scans:
            assert (np.diff(rows[row : row + count]) == BLOCK_BYTES).all()
        assert rows.max(initial=0) + BLOCK_BYTES <= step.end
        found.append(rows)
    return np.concatenate(found)


def test_steps_take_every_block_once() -> None:
    # As much as a model of eight billion parameters has; nothing is allocated.
    shapes = [(151_936, 4096), *[(12_288, 4096), (128,)] * 100, (151_936, 4096)]
    layout = Layout.of(TensorSpec(str(i), "BF16", shape) for i, shape in enumerate(shapes))
    address = 1 << 40
    wanted = np.concatenate([
        np.arange(start, start + spec.nbytes - BLOCK_BYTES, BLOCK_BYTES)
        for spec, start in zip(layout.specs, layout.offsets, strict=True)
    ])  # fmt: skip
    at_once = digest_plan.at_once(layout, address)
    assert [step.lane for step in at_once].count(1) == 1
    assert np.array_equal(np.sort(blocks_in(at_once, address)), wanted)
    ends = [end for _, end in layout.pieces()]
    in_pieces = digest_plan.in_pieces(layout, address, ends)
    assert np.array_equal(np.sort(blocks_in(in_pieces, address)), wanted)
    assert [step.end for step in in_pieces] == sorted(step.end for step in in_pieces)
    lane_of = {int(tensor): step.lane for step in in_pieces for tensor in step.scans[:, 0]}
    for lane in set(lane_of.values()):
        mine = np.concatenate([step.scans[:, 0] for step in in_pieces if step.lane == lane])
        assert {lane_of[tensor] for tensor in mine.tolist()} == {lane}, "walks stay in one lane"
    longest = max(layout.specs, key=lambda spec: spec.nbytes).nbytes // BLOCK_BYTES
    waits = [sum(max(s.scans[:, 2]) for s in in_pieces if s.lane == i) for i in range(8)]
    assert max(waits) < 1.2 * longest, "no lane is much longer than the longest walk"
    for steps in (at_once, in_pieces):
        kinds = np.concatenate([step.scans[:, [0, 3]] for step in steps])
        for flag in (digest_plan.FIRST, digest_plan.LAST):
            chosen = kinds[kinds[:, 1] & flag != 0, 0]
            assert sorted(chosen.tolist()) == list(range(len(shapes)))

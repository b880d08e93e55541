"""Digests and finite values of tensors; the kernels run interpreted here, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from rollout_server.device_digest import not_finite, tensor_digests
from shared.weights import checkpoint_digest
from tests.rollout_server.support import digest_of, spec_of, tensor_bytes

INTERPRETED = """
import torch, xxhash
from rollout_server.device_digest import reduced_digests
lengths = [1, 240, 241, 1024, 1088, 1089, 1151, 2048, 2049, 5000, 64 * 1024, 64 * 1024 + 1, 200_003]
generator = torch.Generator().manual_seed(0)
buffer = torch.randint(256, (sum(lengths),), dtype=torch.uint8, generator=generator)
contents = {str(len(piece)): piece for piece in buffer.split(lengths)}
wanted = {name: xxhash.xxh3_128_hexdigest(piece.numpy().data) for name, piece in contents.items()}
for some in (contents, {"1": contents["1"]}, {"5000": contents["5000"]}):
    got = reduced_digests(some, small_bytes=1088)
    assert got == {name: wanted[name] for name in some}, got
"""


def test_kernels_agree_with_xxhash() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when triton is imported
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=root,
        env=environment,
        capture_output=True,
        check=False,
        text=True,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_digests_on_a_gpu() -> None:
    lengths = [1, 240, 1025, 65536, 65537, 65600, 70_000, 1 << 20, (1 << 20) + 1, 77_777_777]
    buffer = torch.randint(256, (sum(lengths),), dtype=torch.uint8, device="cuda")
    contents = {str(len(piece)): piece for piece in buffer.split(lengths)}
    wanted = {
        name: xxhash.xxh3_128_hexdigest(piece.cpu().numpy().data)
        for name, piece in contents.items()
    }
    assert tensor_digests(contents) == wanted
    assert tensor_digests({"65537": contents["65537"]}) == {"65537": wanted["65537"]}
    half = buffer[: 1 << 20].view(torch.bfloat16)
    half.fill_(1.0)
    half[-1] = float("nan")
    assert not_finite({"half": half, "other": torch.ones(3, device="cuda")}) == ["half"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_digests_are_those_of_checkpoints(dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.randn(70, 130).to(dtype),
        "scalar": torch.tensor(3).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    digests = tensor_digests(tensors)
    assert list(digests) == list(tensors)
    assert digests["matrix"] == xxhash.xxh3_128_hexdigest(tensor_bytes(tensors["matrix"]))
    specs = [(spec_of(name, tensor), digests[name]) for name, tensor in tensors.items()]
    assert checkpoint_digest(specs) == digest_of(tensors)


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor a has strides \(1, 4\)"):
        tensor_digests({"a": torch.zeros(3, 4).t()})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_value_that_is_not_finite(dtype: torch.dtype, value: float) -> None:
    good = torch.full((5, 7), torch.finfo(dtype).max, dtype=dtype)
    bad = good.clone()
    bad[4, 6] = value
    tensors = {"z": bad, "good": good, "a": bad.view(-1), "ids": torch.arange(3)}
    assert not_finite(tensors) == ["a", "z"]


def test_small_floats_and_none_at_all() -> None:
    narrow = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    assert not_finite({"narrow": narrow, "empty": torch.zeros(0)}) == ["narrow"]
    assert not_finite({}) == not_finite({"ids": torch.arange(3)}) == []

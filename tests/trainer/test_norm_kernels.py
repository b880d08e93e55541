"""RMSNorm's kernels against float64, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.models import build
from tests.triton_interpreter import run_interpreted

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SHAPES = [(2, 3, 7, 16), (5, 100), (3, 300), (0, 8)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}


def check(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Values and both gradients."""
    from trainer.norm_kernels import rms_norm

    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator).to(device, dtype)
        return drawn.requires_grad_()

    x, weight = draw(*shape), draw(shape[-1])
    y = rms_norm(x, weight, 1e-6)
    slope = torch.randn(shape, generator=generator).to(y)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    scale = torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-6)
    wanted = exact[1] * exact[0] * scale
    found = (y, *torch.autograd.grad(y, (x, weight), slope))
    expected = (wanted, *torch.autograd.grad(wanted, exact, slope.double()))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= TOLERANCES[dtype] * other.norm()


def test_values_and_gradients_in_tritons_interpreter() -> None:
    run_interpreted("-m", "tests.trainer.test_norm_kernels")


@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 5003, 16, 128), (1, 4001, 1024), (257, 2560)])
def test_values_and_gradients_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(shape, dtype, "cuda")


@needs_gpu
def test_only_norms_that_compute_the_same_are_replaced() -> None:
    from trainer.norm_kernels import use_norm_kernels

    qwen: Any = build("qwen3", torch.float32)
    qwen.cuda()
    assert use_norm_kernels(qwen) == 2 * 4 + 1
    assert "forward" in vars(qwen.model.norm)
    gemma: Any = build("gemma2", torch.float32)  # multiplies by one more than its weight
    gemma.cuda()
    assert use_norm_kernels(gemma) == 0


def test_other_modules_are_not_even_tried() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from trainer.norm_kernels import use_norm_kernels

    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.RMSNorm(2))
    assert use_norm_kernels(model) == 0


if __name__ == "__main__":
    from trainer import norm_kernels

    norm_kernels._PROGRAMS, norm_kernels._ELEMENTS = 3, 256
    for each in SHAPES:
        for kind in TOLERANCES:
            check(each, kind, "cpu")

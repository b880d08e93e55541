"""RMSNorm (Zhang and Sennrich 2019, 1910.07467) in two GPU kernels, forward and backward.

    y = w x / rms(x)        dx = (g - n mean(g n)) / rms(x)        dw = sum over rows of n dy

with ``n = x / rms(x)`` and ``g = w dy``. Models call it on rows of 1,000 elements and, for queries
and keys, on hundreds of thousands of rows of 128. A program takes several short rows at a time, and
in the backward pass there are many programs for each multiprocessor; with one, as in Liger's, a
quarter of the memory's bandwidth is used.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_ELEMENTS, _WARPS = 4096, 4
"""Of a program, at one time."""
_PROGRAMS = 1024
"""Of the backward pass, each of which sums the weight's gradient over its rows."""
_PROBE_ROWS = 5


@triton.jit
def _forward_kernel(  # noqa: PLR0913, PLR0917
    x,
    more,
    weight,
    total,
    y,
    rows,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, v.to(total.dtype.element_ty), mask=inside)
        v = v.to(total.dtype.element_ty).to(tl.float32)  # of what the backward pass will find
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    n = v * (1.0 / tl.sqrt(tl.sum(v * v, 1) / WIDTH + eps))[:, None]
    # Rounded before the weight too, as models of transformers do.
    rounded = n.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (rounded * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # noqa: PLR0913, PLR0917
    x,
    weight,
    dy,
    more,
    dx,
    partial,
    stride,
    rows,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        scale = (1.0 / tl.sqrt(tl.sum(v * v, 1) / WIDTH + eps))[:, None]
        n, g = v * scale, d * w[None, :]
        dw += d * n
        slope = (g - n * (tl.sum(g * n, 1) / WIDTH)[:, None]) * scale
        if ADD:
            slope += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * stride + column, tl.sum(dw, 0), mask=column < WIDTH)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`rms_norm`, without a gradient, of a contiguous ``x``."""
    y, rows, how = torch.empty_like(x), x.numel() // x.shape[-1], _tiling(x.shape[-1])
    if rows:
        grid = (triton.cdiv(rows, how["ROWS"]),)
        _forward_kernel[grid](x, x, weight, x, y, rows, eps, **how, ADD=False)
    return y


def add_and_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + more``, which takes the place of ``more``, and the norm of it.

    Args:
        x, more: contiguous and of the same shape, with rows.
    """
    y, rows, how = torch.empty_like(x), x.numel() // x.shape[-1], _tiling(x.shape[-1])
    grid = (triton.cdiv(rows, how["ROWS"]),)
    _forward_kernel[grid](x, more, weight, more, y, rows, eps, **how, ADD=True)
    return more, y


def norm_slopes(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, partial: Tensor, more: Tensor | None = None
) -> Tensor:
    """Gradient of ``x``, to which ``more`` is added; all contiguous and of the same shape.

    Args:
        partial: float32 ``[P, H]``, of any stride between rows; its sum over P programs will be the
            gradient of the weight.
    """
    dx, rows = torch.empty_like(x), x.numel() // x.shape[-1]
    _backward_kernel[(len(partial),)](
        x, weight, dy, x if more is None else more, dx, partial, partial.stride(0), rows, eps,
        **_tiling(x.shape[-1]), ADD=more is not None,
    )  # fmt: skip
    return dx


def programs_for(rows: int) -> int:
    """Of a backward pass over rows, short or long."""
    return max(1, min(_PROGRAMS, rows))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = triton.cdiv(x.numel() // x.shape[-1], _tiling(x.shape[-1])["ROWS"])
        partial = x.new_empty((programs_for(rows), x.shape[-1]), dtype=torch.float32)
        dx = norm_slopes(x, weight, dy.contiguous(), ctx.eps, partial)
        return dx, partial.sum(0).to(weight.dtype), None


def _tiling(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS // columns)
    warps = _WARPS * max(1, columns // _ELEMENTS)
    return {"WIDTH": width, "ROWS": rows, "COLUMNS": columns, "num_warps": min(warps, 16)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, computed in float32.

    Args:
        x: ``[..., H]`` on a GPU.
        weight: ``[H]``, of the same dtype.
    """
    found: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return found


def use_norm_kernels(model: nn.Module) -> int:
    """Replace the forward pass of every norm that computes the same; returns how many there are."""
    alike = [module for module in model.modules() if _is_same(module)]
    for module in alike:
        module.forward = MethodType(_forward, module)
    return len(alike)


def _forward(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


@torch.no_grad()
def _is_same(module: Any) -> bool:
    """Some models add 1 to the weight, or have none: a few rows show it."""
    if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 1:
        return False
    steps = torch.arange(_PROBE_ROWS * len(weight), device=weight.device)
    rows = torch.sin(steps).reshape(_PROBE_ROWS, -1).to(weight.dtype)
    expected, found = module(rows), _forward(module, rows)
    tolerance = 4 * torch.finfo(weight.dtype).eps
    same: bool = expected.dtype == found.dtype and torch.allclose(
        found, expected, rtol=tolerance, atol=tolerance
    )
    return same

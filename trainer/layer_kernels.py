"""GPU kernels for what lies between a decoder layer's matrix products, each one pass over memory.

Rotation of queries and keys by their position, with the norm before it where a model has one, and
the gated unit of the MLP; forward and backward. They compute in float32. A head's two halves a and
b, normalised, turn into ``a cos - b sin`` and ``b cos + a sin``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

_ELEMENTS, _WARPS = 4096, 4
"""Of a program, at one time."""


@triton.jit
def _rotate_kernel(  # noqa: PLR0913, PLR0917
    x,
    weight,
    cos,
    sin,
    y,
    rows,
    eps,
    x_stride,
    y_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < HALF)[None, :]
    token, head = row // HEADS, (row % HEADS) * (2 * HALF)
    at = (token * x_stride + head)[:, None] + column[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        wa = tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        wb = tl.load(weight + column + HALF, mask=column < HALF, other=0.0).to(tl.float32)
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        a, b = a * scale * wa[None, :], b * scale * wb[None, :]
    turn = (token * (2 * HALF))[:, None] + column[None, :]
    c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
    at = (token * y_stride + head)[:, None] + column[None, :]
    tl.store(y + at, (a * c - b * s).to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + HALF, (b * c + a * s).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_back_kernel(  # noqa: PLR0913, PLR0917
    x,
    weight,
    cos,
    sin,
    dy,
    dx,
    partial,
    rows,
    eps,
    x_stride,
    dy_stride,
    dx_stride,
    partial_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    if NORM:
        wa = tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        wb = tl.load(weight + column + HALF, mask=column < HALF, other=0.0).to(tl.float32)
        dwa = tl.zeros([ROWS, COLUMNS], tl.float32)
        dwb = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < HALF)[None, :]
        token, head = row // HEADS, (row % HEADS) * (2 * HALF)
        turn = (token * (2 * HALF))[:, None] + column[None, :]
        c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
        at = (token * dy_stride + head)[:, None] + column[None, :]
        da = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        db = tl.load(dy + at + HALF, mask=inside, other=0.0).to(tl.float32)
        ga, gb = da * c + db * s, db * c - da * s
        if NORM:
            at = (token * x_stride + head)[:, None] + column[None, :]
            a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
            mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF)
            scale = (1.0 / tl.sqrt(mean + eps))[:, None]
            a, b = a * scale, b * scale
            dwa += ga * a
            dwb += gb * b
            ga, gb = ga * wa[None, :], gb * wb[None, :]
            along = ((tl.sum(ga * a, 1) + tl.sum(gb * b, 1)) / (2 * HALF))[:, None]
            ga, gb = (ga - a * along) * scale, (gb - b * along) * scale
        at = (token * dx_stride + head)[:, None] + column[None, :]
        tl.store(dx + at, ga.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + at + HALF, gb.to(dx.dtype.element_ty), mask=inside)
    if NORM:
        own = partial + tl.program_id(0) * partial_stride + column
        tl.store(own, tl.sum(dwa, 0), mask=column < HALF)
        tl.store(own + HALF, tl.sum(dwb, 0), mask=column < HALF)


@triton.jit
def _gate_kernel(gate_and_up, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = gate_and_up + row * 2 * WIDTH + column
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    found = g / (1.0 + tl.exp(-g)) * u
    tl.store(y + row * WIDTH + column, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gate_back_kernel(gate_and_up, dy, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the slopes over gate and up, and the values over ``dy``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at, own = gate_and_up + row * 2 * WIDTH + column, dy + row * WIDTH + column
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-g))
    silu = g * share
    slope = d * u * (share + silu * (1.0 - share))
    tl.store(own, (silu * u).to(dy.dtype.element_ty), mask=inside)
    tl.store(at, slope.to(gate_and_up.dtype.element_ty), mask=inside)
    tl.store(at + WIDTH, (d * silu).to(gate_and_up.dtype.element_ty), mask=inside)


def rotate(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, out: Tensor
) -> None:
    """Turn heads by their position, after their norm if they have one.

    Args:
        x, out: ``[T, heads, D]``, whose strides may differ between tokens alone.
        weight: ``[D]`` of the norm.
        cos, sin: ``[T, D]``, contiguous, whose two halves are the same.
    """
    how, rows = _tiling(x), x.shape[0] * x.shape[1]
    _rotate_kernel[(triton.cdiv(rows, how["ROWS"]),)](
        x, x if weight is None else weight, cos, sin, out, rows, eps, x.stride(0), out.stride(0),
        **how, NORM=weight is not None,
    )  # fmt: skip


def rotate_back(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    dy: Tensor,
    dx: Tensor,
    partial: Tensor,
) -> None:
    """Gradient of ``x`` in :func:`rotate`, into ``dx``; arguments as there.

    Args:
        partial: float32 ``[P, D]``, whose sum over programs will be the gradient of the weight;
            left alone without one, and read for their number.
    """
    _rotate_back_kernel[(len(partial),)](
        x, x if weight is None else weight, cos, sin, dy, dx, partial, x.shape[0] * x.shape[1],
        eps, x.stride(0), dy.stride(0), dx.stride(0), partial.stride(0),
        **_tiling(x), NORM=weight is not None,
    )  # fmt: skip


def gate(gate_and_up: Tensor) -> Tensor:
    """``silu(g) u`` of ``[T, 2 I]``, whose rows are g and then u; ``[T, I]``."""
    rows, width = gate_and_up.shape[0], gate_and_up.shape[1] // 2
    y = gate_and_up.new_empty((rows, width))
    block = _block(width)
    _gate_kernel[(rows, triton.cdiv(width, block))](gate_and_up, y, width, BLOCK=block)
    return y


def gate_back(gate_and_up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Values of :func:`gate` and slopes of its argument, written over ``dy`` and the argument."""
    increment_version(gate_and_up)  # so that a second backward pass says that it is gone
    rows, width = dy.shape
    block = _block(width)
    _gate_back_kernel[(rows, triton.cdiv(width, block))](gate_and_up, dy, width, BLOCK=block)
    return dy, gate_and_up


def _tiling(x: Tensor) -> dict[str, int]:
    half = x.shape[2] // 2
    columns = triton.next_power_of_2(half)
    rows = max(1, _ELEMENTS // (2 * columns))
    shape = {"HEADS": x.shape[1], "HALF": half, "ROWS": rows, "COLUMNS": columns}
    return shape | {"num_warps": _WARPS}


def _block(width: int) -> int:
    return min(1024, int(triton.next_power_of_2(width)))

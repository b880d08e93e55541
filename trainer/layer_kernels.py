"""GPU kernels for what lies between a decoder layer's matrix products, each one pass over memory.

Rotation of queries and keys by their position, with the norm before it where a model has one, and
the gated unit of the MLP; forward and backward. They compute in float32. A head's two halves a and
b, normalised, turn into ``a cos - b sin`` and ``b cos + a sin``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

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
    TURN: tl.constexpr,
    COPIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < HALF)[None, :]
    token, head = row // HEADS, row % HEADS
    at = (token * x_stride + head * (2 * HALF))[:, None] + column[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        wa = tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        wb = tl.load(weight + column + HALF, mask=column < HALF, other=0.0).to(tl.float32)
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        a, b = a * scale * wa[None, :], b * scale * wb[None, :]
    if TURN:
        turn = (token * (2 * HALF))[:, None] + column[None, :]
        c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
        a, b = a * c - b * s, b * c + a * s
    for copy in tl.static_range(COPIES):
        at = (token * y_stride + (head * COPIES + copy) * (2 * HALF))[:, None] + column[None, :]
        tl.store(y + at, a.to(y.dtype.element_ty), mask=inside)
        tl.store(y + at + HALF, b.to(y.dtype.element_ty), mask=inside)


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
    TURN: tl.constexpr,
    COPIES: tl.constexpr,
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
        token, head = row // HEADS, row % HEADS
        ga = tl.zeros([ROWS, COLUMNS], tl.float32)
        gb = tl.zeros([ROWS, COLUMNS], tl.float32)
        for copy in tl.static_range(COPIES):
            at = token * dy_stride + (head * COPIES + copy) * (2 * HALF)
            at = at[:, None] + column[None, :]
            ga += tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            gb += tl.load(dy + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if TURN:
            turn = (token * (2 * HALF))[:, None] + column[None, :]
            c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
            s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
            ga, gb = ga * c + gb * s, gb * c - ga * s
        if NORM:
            at = (token * x_stride + head * (2 * HALF))[:, None] + column[None, :]
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
        at = (token * dx_stride + head * (2 * HALF))[:, None] + column[None, :]
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


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What happens to heads between projection and attention.

    Attributes:
        weight: ``[D]`` of their norm; None: there is none.
        eps: of the norm.
        cos, sin: ``[T, D]``, contiguous, whose two halves are the same; None: they are not turned.
    """

    weight: Tensor | None
    eps: float
    cos: Tensor | None
    sin: Tensor | None


def rotate(x: Tensor, how: Turn, out: Tensor) -> None:
    """Normalise and turn heads by their position, each into as many copies as there is room for.

    Args:
        x, out: ``[T, heads, D]``, whose strides may differ between tokens alone.
    """
    tiling, rows = _tiling(x), x.shape[0] * x.shape[1]
    _rotate_kernel[(triton.cdiv(rows, tiling["ROWS"]),)](
        x, *_pointers(x, how), out, rows, how.eps, x.stride(0), out.stride(0),
        **tiling, **_flags(how), COPIES=out.shape[1] // x.shape[1],
    )  # fmt: skip


def rotate_back(x: Tensor, how: Turn, dy: Tensor, dx: Tensor, partial: Tensor) -> None:
    """Gradient of ``x`` in :func:`rotate`, into ``dx``, from that of all copies.

    Args:
        partial: float32 ``[P, D]``, whose sum over programs will be the gradient of the weight;
            left alone without one, and read for their number.
    """
    _rotate_back_kernel[(len(partial),)](
        x, *_pointers(x, how), dy, dx, partial, x.shape[0] * x.shape[1], how.eps, x.stride(0),
        dy.stride(0), dx.stride(0), partial.stride(0),
        **_tiling(x), **_flags(how), COPIES=dy.shape[1] // x.shape[1],
    )  # fmt: skip


def _pointers(x: Tensor, how: Turn) -> tuple[Tensor, ...]:
    """Something in the place of what is not there, and not read."""
    return tuple(x if y is None else y for y in (how.weight, how.cos, how.sin))


def _flags(how: Turn) -> dict[str, bool]:
    return {"NORM": how.weight is not None, "TURN": how.cos is not None}


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

"""One autograd node for each decoder layer of Llama's kind, on packed sequences.

    q, k, v = Wq n, Wk n, Wv n      n = norm(x)
    h = x + Wo attention(rotated norm(q), rotated norm(k), v)
    y = h + Wd (silu(g) u)          g, u = Wg m, Wu m      m = norm(h)

As a graph of modules a layer is about a hundred kernels and as many nodes, and launching them takes
longer than they run on a fast GPU. Here it is two dozen, launched from two calls. What lies between
matrix products are the kernels of :mod:`trainer.norm_kernels` and :mod:`trainer.layer_kernels`. The
backward pass finds x, the projections, what attention gave and h, and g and u; the rest it computes
again, which costs one pass over memory each. It can be told to find less.

Weights that take the same input are put side by side for one product: a copy of a few megabytes,
for a sum that is rounded once. Norms', attention's and weights' gradients are otherwise those of
the model's own layers, but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.attention_pair import Rows, attend, attend_back, wants_copies
from trainer.layer_kernels import Turn, gate, gate_back, rotate, rotate_back
from trainer.norm_kernels import add_and_norm, norm, norm_slopes, programs_for


class Weights(NamedTuple):
    """Of one layer; biases and norms of heads are None in models without them."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Form:
    """What a layer computes with its weights.

    Attributes:
        heads, key_heads: of queries; of keys and values.
        width: of a head.
        eps: of all norms.
        scale: of attention.
        again: what the backward pass computes again. 0: what costs one pass over memory, 1: g and
            u, 2: the projections too, 3: attention and h too.
    """

    heads: int
    key_heads: int
    width: int
    eps: float
    scale: float
    again: int = 0


def run(x: Tensor, weights: Weights, form: Form, rows: Rows) -> Tensor:
    """A layer's output; ``[T, H]`` as its input."""
    found: Tensor = _Layer.apply(x, form, rows, *weights)  # type: ignore[no-untyped-call]
    return found


class _Kept(NamedTuple):
    """Of a forward pass; None: to be computed again."""

    x: Tensor
    projected: Tensor | None
    attended: Tensor | None
    normaliser: Tensor | None
    h: Tensor | None
    gate_and_up: Tensor | None


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Form, rows: Rows, *tensors: Tensor | None) -> Tensor:
        w = _weights(tensors)
        projected = _project(x, w, form)
        attended, normaliser = _attend(projected, w, form, rows)
        h, normed = add_and_norm(x, attended.flatten(1) @ w.o.T, w.post_norm, form.eps)
        gate_and_up = normed @ torch.cat((w.gate, w.up)).T
        kept = _Kept(
            x,
            projected if form.again < 2 else None,
            attended if form.again < 3 else None,
            normaliser if form.again < 3 else None,
            h if form.again < 3 else None,
            gate_and_up if form.again < 1 else None,
        )
        ctx.save_for_backward(*kept, *tensors)
        ctx.form, ctx.rows = form, rows
        return (gate(gate_and_up) @ w.down.T).add_(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        kept, w = _Kept(*saved[: len(_Kept._fields)]), _weights(saved[len(_Kept._fields) :])
        form, rows, dy = ctx.form, ctx.rows, dy.contiguous()
        projected = kept.projected
        if projected is None:
            projected = _project(kept.x, w, form)
        attended, normaliser, h = kept.attended, kept.normaliser, kept.h
        if attended is None:
            attended, normaliser = _attend(projected, w, form, rows)
        if h is None:
            h, normed = add_and_norm(kept.x, attended.flatten(1) @ w.o.T, w.post_norm, form.eps)
        else:
            normed = norm(h, w.post_norm, form.eps)
        sums = _NormSums(kept.x, w, form)
        dh, mlp = _mlp_back(dy, h, normed, kept.gate_and_up, w, form, sums)
        dx, attention = _attention_back(
            dh, kept.x, projected, attended, normaliser, w, form, rows, sums
        )
        return dx, None, None, *Weights(**sums.gradients(), **mlp, **attention)


def _weights(tensors: Any) -> Weights:
    return Weights(*tensors)


def _project(x: Tensor, w: Weights, form: Form) -> Tensor:
    """Queries, keys and values side by side."""
    bias = None
    if w.q_bias is not None and w.k_bias is not None and w.v_bias is not None:
        bias = torch.cat((w.q_bias, w.k_bias, w.v_bias))
    return F.linear(norm(x, w.input_norm, form.eps), torch.cat((w.q, w.k, w.v)), bias)


def _heads(projected: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as ``[T, heads, D]``, in the same memory."""
    heads = projected.view(len(projected), -1, form.width)
    q, k, v = torch.split(heads, [form.heads, form.key_heads, form.key_heads], dim=1)
    return q, k, v


def _turns(w: Weights, form: Form, rows: Rows) -> tuple[Turn, Turn, Turn]:
    """For queries, keys and values; the last stay as they are."""
    return (
        Turn(w.q_norm, form.eps, rows.cos, rows.sin),
        Turn(w.k_norm, form.eps, rows.cos, rows.sin),
        Turn(None, form.eps, None, None),
    )


def _attend(projected: Tensor, w: Weights, form: Form, rows: Rows) -> tuple[Tensor, Tensor | None]:
    q, k, v = _heads(projected, form)
    turned = q.new_empty(q.shape), k.new_empty(k.shape)
    for x, how, out in zip((q, k), _turns(w, form, rows), turned, strict=False):
        rotate(x, how, out)
    return attend(*turned, v, rows, form.scale)


def _mlp_back(
    dy: Tensor,
    h: Tensor,
    normed: Tensor,
    gate_and_up: Tensor | None,
    w: Weights,
    form: Form,
    sums: _NormSums,
) -> tuple[Tensor, dict[str, Any]]:
    """Gradient of h, and of the weights by name."""
    together = torch.cat((w.gate, w.up))
    gate_and_up = normed @ together.T if gate_and_up is None else gate_and_up
    gated, slope = gate_back(gate_and_up, dy @ w.down)
    d_gate, d_up = torch.split(slope.T @ normed, [len(w.gate), len(w.up)])
    dh = norm_slopes(h, w.post_norm, slope @ together, form.eps, sums.post, more=dy)
    return dh, {"gate": d_gate, "up": d_up, "down": dy.T @ gated}


def _attention_back(
    dh: Tensor,
    x: Tensor,
    projected: Tensor,
    attended: Tensor,
    normaliser: Tensor | None,
    w: Weights,
    form: Form,
    rows: Rows,
    sums: _NormSums,
) -> tuple[Tensor, dict[str, Any]]:
    """Gradient of x, and of the weights by name."""
    raw, turns = _heads(projected, form), _turns(w, form, rows)
    heads = [form.heads] * 3 if wants_copies(attended) else [x.shape[1] for x in raw]
    turned = [x.new_empty((len(x), n, form.width)) for x, n in zip(raw, heads, strict=True)]
    for before, how, after in zip(raw, turns, turned, strict=True):
        rotate(before, how, after)
    q, k, v = turned
    slopes = attend_back(
        (dh @ w.o).view_as(attended), q, k, v, attended, normaliser, rows, form.scale
    )
    slope = torch.empty_like(projected)
    for before, how, after, into, total in zip(
        raw, turns, slopes, _heads(slope, form), (sums.q, sums.k, sums.q), strict=True
    ):
        rotate_back(before, how, after, into, total)
    together = torch.cat((w.q, w.k, w.v))
    sizes = [len(w.q), len(w.k), len(w.v)]
    normed = norm(x, w.input_norm, form.eps)
    weights = dict(zip("qkv", torch.split(slope.T @ normed, sizes), strict=True))
    biases = (None, None, None) if w.q_bias is None else torch.split(slope.sum(0), sizes)
    dx = norm_slopes(x, w.input_norm, slope @ together, form.eps, sums.first, more=dh)
    named = zip(("q_bias", "k_bias", "v_bias"), biases, strict=True)
    return dx, {"o": dh.T @ attended.flatten(1), **weights, **dict(named)}


class _NormSums:
    """Gradients of norms' weights in the making: one row for each program, one sum for all."""

    def __init__(self, x: Tensor, w: Weights, form: Form):
        heads = [] if w.q_norm is None else [form.width, form.width]
        self.sizes = [x.shape[1], x.shape[1], *heads]
        self.sums = x.new_empty((programs_for(len(x)), sum(self.sizes)), dtype=torch.float32)
        self.dtype, parts = x.dtype, torch.split(self.sums, self.sizes, dim=1)
        self.first, self.post = parts[:2]
        # Without norms of heads only the number of programs is read.
        self.q, self.k = parts[2:] or parts[:2]

    def gradients(self) -> dict[str, Any]:
        """Of the norms by name."""
        first, post, *heads = torch.split(self.sums.sum(0).to(self.dtype), self.sizes)
        q, k = heads or (None, None)
        return {"input_norm": first, "post_norm": post, "q_norm": q, "k_norm": k}

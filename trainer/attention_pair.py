"""Attention to packed sequences as two functions, for layers that write their own backward pass.

On a GPU and in half precision both are torch's flash attention by length. Elsewhere each sequence
is attended to by itself, and again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from trainer.packing import one_by_one, suits_flash

_CAUSAL = {"window_size_left": -1, "window_size_right": 0}


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where sequences lie in a packed row of T tokens, and how their positions turn heads.

    Attributes:
        cos, sin: ``[T, D]``.
        boundaries: int32 ``[N + 1]``.
        longest: tokens of the longest sequence.
    """

    cos: Tensor
    sin: Tensor
    boundaries: Tensor
    longest: int


def attend(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Causal attention within each sequence.

    Args:
        query, key, value: ``[T, heads, D]``; of the latter two there may be fewer heads.

    Returns:
        ``[T, heads, D]``, and normalisers for the backward pass where there are any.
    """
    if not suits_flash(query):
        return _plain(query, key, value, rows, scale), None
    ends, longest = rows.boundaries, rows.longest
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, True, False, scale=scale, **_CAUSAL
    )
    return found[0], found[1]


def wants_copies(query: Tensor) -> bool:
    """Whether :func:`attend_back` is quicker with a key and a value head for each query head.

    Flash attention makes one gradient for each query head in any case, and is slow to sum them.
    """
    return suits_flash(query)


def attend_back(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: Tensor,
    normaliser: Tensor | None,
    rows: Rows,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from that of what :func:`attend` found."""
    if normaliser is None:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (query, key, value)]
            again = _plain(inputs[0], inputs[1], inputs[2], rows, scale)
        dq, dk, dv = (x.contiguous() for x in torch.autograd.grad(again, inputs, slope))
        return dq, dk, dv
    ends, longest = rows.boundaries, rows.longest
    slopes: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        slope, query, key, value, found, normaliser, ends, ends, longest, longest, 0.0, True,
        *_no_dropout(query.device), scale=scale, **_CAUSAL,
    )  # fmt: skip
    return slopes


def _plain(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    found: Tensor = one_by_one(q, k, v, rows.boundaries, scale)
    return found.squeeze(0).transpose(0, 1).contiguous()


@cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """What stands for the state of a random generator that nothing was drawn from."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)

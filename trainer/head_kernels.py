"""Two GPU kernels for the head, each one pass over a chunk of logits.

In plain torch a chunk of bfloat16 logits is written out in float32 and read again for the maximum,
the exponentials, their sum and the probabilities: some 70 bytes of traffic for each logit where
these kernels move 2 in the forward pass and 4 in the backward pass. They compute in float32 and
differ from :mod:`trainer.head`'s plain path only in the order of the sums.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


@triton.jit
def _normalise_kernel(
    logits, tokens, chosen, normaliser, scale, vocabulary: tl.constexpr, BLOCK: tl.constexpr
):
    """Of one row: the chosen logit, and the log of the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    columns = tl.arange(0, BLOCK)
    # Each lane keeps a maximum and a sum of its own, so that lanes wait for each other only once.
    top = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        z = tl.load(logits + start + columns, mask=inside, other=-float("inf"))
        z = z.to(tl.float32) * scale
        higher = tl.maximum(top, z)
        total = total * tl.exp(top - higher) + tl.exp(z - higher)
        top = higher
    highest = tl.max(top, 0)
    total_of_row = tl.sum(total * tl.exp(top - highest), 0)
    tl.store(normaliser + row, tl.log(total_of_row) + highest)
    own = tl.load(logits + tl.load(tokens + row))
    tl.store(chosen + row, own.to(tl.float32) * scale)


@triton.jit
def _slopes_kernel(
    logits, tokens, normaliser, scale, vocabulary: tl.constexpr, BLOCK: tl.constexpr
):
    """Of one block of a row, in place: 1 at the chosen token, minus probabilities."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    at = logits + row * vocabulary + columns
    z = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale
    p = tl.exp(z - tl.load(normaliser + row))
    slope = tl.where(columns == tl.load(tokens + row), 1.0 - p, -p)
    tl.store(at, slope.to(logits.dtype.element_ty), mask=inside)


def normalise(logits: Tensor, tokens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The chosen tokens' scaled logits and the normalisers, float32 ``[C]`` each.

    Args:
        logits: ``[C, V]``, contiguous; left as it is.
        tokens: int64 ``[C]``.
        scale: that logits are multiplied by, 1 / temperature.
    """
    chosen = torch.empty(len(tokens), dtype=torch.float32, device=logits.device)
    normaliser = torch.empty_like(chosen)
    _normalise_kernel[(len(tokens),)](
        logits, tokens, chosen, normaliser, scale, logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS
    )
    return chosen, normaliser


def to_slopes(logits: Tensor, tokens: Tensor, normaliser: Tensor, scale: float) -> Tensor:
    """``onehot(token) - p``, written over the logits and returned; arguments as above."""
    grid = (len(tokens), triton.cdiv(logits.shape[1], _BLOCK))
    _slopes_kernel[grid](
        logits, tokens, normaliser, scale, logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS
    )
    return logits

"""Log-probabilities of given tokens, in Triton: one pass over the logits of each row."""

# Triton reads annotations as part of its own language.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _token_scores(scores, logits, row_stride, tokens, size, BLOCK: tl.constexpr):
    """The log-softmax of one row at one token; -inf among the logits counts as nothing.

    Each lane keeps the largest of the logits that it saw, and a sum of exponentials relative to
    that; lanes meet only at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    largest = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(line + places, mask=places < size, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, values)
        total = total * tl.exp(largest - larger) + tl.exp(values - larger)
        largest = larger
    highest = tl.max(largest, axis=0)
    whole = tl.sum(total * tl.exp(largest - highest), axis=0)
    chosen = tl.load(line + tl.load(tokens + row)).to(tl.float32)
    tl.store(scores + row, chosen - highest - tl.log(whole))


def token_scores(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of one token for each row.

    Args:
        logits: ``[R, V]``, any float type; neighbours in a row are neighbours in memory.
        tokens: ``[R]``, integers.

    Returns:
        ``[R]``, float32: ``log_softmax(logits)[r, tokens[r]]``.
    """
    rows, size = logits.shape
    assert logits.stride(1) == 1
    scores = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        _token_scores[(rows,)](
            scores, logits, logits.stride(0), tokens, size, BLOCK=BLOCK, num_warps=WARPS
        )
    return scores

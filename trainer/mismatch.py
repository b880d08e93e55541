"""Correcting for a sampler that is not quite the trainer.

The rollout engine and the trainer compute the same policy with other kernels, perhaps in another
precision or with weights a few steps older. Tokens come from the sampler, so a gradient that
assumes the trainer's ``old`` policy is reweighted by rho = old / sampler:

- ``truncate``: min(rho, high). Truncated importance sampling, TIS.
- ``mask``: rho inside [low, high], zero outside. At token level this is IcePop.

rho is taken per token, over the ``sequence`` as the product over its tokens, or as their
``geometric`` mean. The product is the exact weight of a sequence and drifts out of any band as
sequences grow (0.01 nats a token is a factor 2.7 after 100 tokens), so that long answers are cut
or dropped first; the geometric mean does not. Which lengths are dropped is logged.

A token of weight zero still counts in the denominator of the loss, as in both libraries below.
Token and sequence forms share their definitions with TRL (``vllm_importance_sampling_mode``) and
verl (``rollout_is``). The names of the modes are TRL's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.kl import exp_ratio

Correction = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]


def sequence_mean(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Mean over each sequence's unmasked tokens, ``[N, 1]``; 0 where there are none.

    Masked entries of ``values_NT`` must be 0.
    """
    return values_NT.sum(1, keepdim=True) / mask_NT.sum(1, keepdim=True).clamp(min=1)


@torch.no_grad()
def correction_weights(
    old_logprobs_NT: Tensor,
    sampler_logprobs_NT: Tensor,
    mask_NT: Tensor,
    *,
    correction: Correction,
    low: float,
    high: float,
) -> Tensor:
    """Weight of each token's policy-gradient term, ``[N, T]``, without gradient.

    Args:
        old_logprobs_NT: trainer's log-probabilities at the start of the step.
        sampler_logprobs_NT: those of the distribution that the tokens were drawn from.
        mask_NT: bool, True at completion tokens; masked entries are never read and get weight 0.
        correction: level and form, see above; ``none`` weighs every token 1.
        low: lower end of the band; truncation ignores it.
        high: cap, or upper end of the band. Both ends are inside.
    """
    log_rho_NT = torch.where(mask_NT, old_logprobs_NT - sampler_logprobs_NT, 0.0)
    if correction == "none":
        return mask_NT.to(log_rho_NT.dtype)
    level, form = correction.split("_")
    if level == "sequence":
        log_rho_NT = log_rho_NT.sum(1, keepdim=True).expand_as(log_rho_NT)
    elif level == "geometric":
        log_rho_NT = sequence_mean(log_rho_NT, mask_NT).expand_as(log_rho_NT)
    rho_NT = exp_ratio(log_rho_NT)
    if form == "truncate":
        return torch.where(mask_NT, rho_NT.clamp(max=high), 0.0)
    return torch.where(mask_NT & (rho_NT >= low) & (rho_NT <= high), rho_NT, 0.0)


LENGTH_BUCKETS = 24
"""Bucket k holds sequences of ``2^(k-1) + 1`` to ``2^k`` tokens, bucket 0 those of at most one."""


def by_length(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Sums of the values of unmasked tokens by the length of their sequence, ``[LENGTH_BUCKETS]``.

    Args:
        values_NT: any number or bool per token.
        mask_NT: bool; a sequence is as long as it has true entries.
    """
    length_N = mask_NT.sum(1).clamp(min=1)
    bucket_N = length_N.double().log2().ceil().long().clamp(max=LENGTH_BUCKETS - 1)
    sum_N = torch.where(mask_NT, values_NT, 0).sum(1).double()
    return sum_N.new_zeros(LENGTH_BUCKETS).index_add(0, bucket_N, sum_N)


def bucket_name(bucket: int) -> str:
    """Lengths in a bucket, such as ``65-128``."""
    return f"{2 ** (bucket - 1) + 1}-{2**bucket}" if bucket > 1 else str(2**bucket)

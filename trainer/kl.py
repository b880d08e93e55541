"""Per-token estimators of the divergence between the policy and a frozen reference.

What matters about an estimator inside a loss is not its value but the gradient that it has in
expectation over the sampled tokens. Write pi for the policy, ref for the reference, old for the
policy at the start of the step, and d = log ref - log pi:

===========  ==============  ==================================================================
name         value           expected gradient
===========  ==============  ==================================================================
k1           -d              zero on-policy, whatever the reference: good to watch, not to train
k2           d^2 / 2         that of the reverse KL(pi || ref), on-policy only
k3_forward   e^d - 1 - d     that of the FORWARD KL(ref || pi), on-policy only
k3_ratio     pi/old * k3     that of the reverse KL(pi || ref), on- and off-policy
k1_reward    log old/ref     none of its own; as a cost in the reward, that of the reverse KL,
                             on-policy only
===========  ==============  ==================================================================

The values are Schulman's ("Approximating KL Divergence", 2020). ``k3_forward`` is what GRPO's paper
wrote and most libraries call "k3" or "low_var_kl". ``k3_ratio`` lets the gradient through the ratio
as well; DeepSeek-V3.2 describes it, and TRL has it as ``use_bias_correction_kl``. The expectation
is over tokens drawn from ``old``, and per token: the effect of a token on later ones is left out.
``k1_reward`` is subtracted from the advantage, where the surrogate clips it like any other.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kl = Literal["k1", "k2", "k3_forward", "k3_ratio", "k1_reward"]

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this many nats either way before ``exp``, as in verl. Beyond it
float32 drifts towards infinity, and an infinity times a zero gradient is NaN."""


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log ratio in nats, clamped to ``MAX_LOG_RATIO``; no gradient beyond it."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_to_reference(
    estimator: Kl, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor
) -> Tensor:
    """KL estimate in nats of each token, differentiable in ``logprobs``.

    Args:
        estimator: see the table above.
        logprobs: log pi of the sampled tokens, any shape.
        ref_logprobs: log ref of the same tokens, same shape and temperature.
        old_logprobs: log old of the same tokens; ``k3_ratio`` and ``k1_reward`` read it.
    """
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3_forward":
            return torch.expm1(d) - d
        case "k3_ratio":
            return exp_ratio(logprobs - old_logprobs) * (torch.expm1(d) - d)
        case "k1_reward":
            # A reward belongs to a sample, so it stays what it was when the step began.
            gap = (old_logprobs - ref_logprobs).detach()
            return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

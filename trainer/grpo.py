"""The loss of GRPO and its relatives, as pure functions of tensors.

One optimizer step, start to end:

    objective = Objective.named("dapo")
    advantages_N = group_advantages(rewards_N, group_ids_N, baseline=objective.baseline,
                                    scale=objective.scale)
    weights_NT = token_weights(mask_NT, objective.reduction)      # once, over the whole step
    for each micro-batch of rows:
        loss, sums = policy_loss(objective, logprobs=..., weights=weights_NT[rows], ...)
        loss.backward()
        total = sums if total is None else total + sums
    optimizer.step(); log(total.metrics())

A loss here is only ever a sum over tokens of weight times per-token loss. The weights carry the one
denominator of the step, so how the step is split into micro-batches or over ranks cannot change
the gradient. Nothing below divides by a count of what it happens to be given.

In ``[N, T]`` tensors entry ``[n, t]`` belongs to token t of sequence n. Log-probabilities are in
nats and of the distribution that was sampled from, temperature included. Masked positions may hold
anything, NaN and infinity too: they are replaced before any arithmetic, because zero times NaN is
NaN in the value and again in the gradient.

Parts: ``trainer.objective`` names the choices, ``trainer.advantages``, ``trainer.kl`` and
``trainer.mismatch`` hold the formulas that stand alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainer.advantages import group_advantages
from trainer.kl import exp_ratio, kl_to_reference
from trainer.mismatch import bucket_name, by_length, correction_weights, sequence_mean
from trainer.objective import PRESETS, Objective, Reduction

__all__ = [
    "PRESETS",
    "LossSums",
    "Objective",
    "clipped_surrogate",
    "group_advantages",
    "policy_loss",
    "token_weights",
]


def token_weights(
    mask: Tensor,
    reduction: Reduction,
    *,
    constant_length: int | None = None,
    num_sequences: int | None = None,
    num_tokens: int | None = None,
) -> Tensor:
    """Weight of each token in the loss of one optimizer step; call it once per step.

    - ``grpo``: ``1 / (N * tokens of the sequence)``, the mean over sequences of token means. A
      fully masked sequence still counts in N, as in TRL; verl leaves it out of N, so that the
      other sequences weigh more there.
    - ``dapo``: ``1 / tokens of the step``, the mean over all tokens.
    - ``dr_grpo``: ``1 / (N * constant_length)``. The length is a constant of the run, never the
      padded width of a batch, which is what verl falls back to.

    Args:
        mask: ``[N, T]`` over the whole step, true at tokens that bear loss.
        reduction: see above.
        constant_length: tokens; read by ``dr_grpo`` alone.
        num_sequences, num_tokens: totals over all ranks when ``mask`` is one rank's share. The
            ranks' gradients must then be summed, not averaged.

    Returns:
        float64 ``[N, T]`` (counts stay exact; ``policy_loss`` casts), 0 at masked tokens.
    """
    weights_NT = mask.bool().double()
    sequences = max(1, mask.shape[0] if num_sequences is None else num_sequences)
    match reduction:
        case "grpo":
            return weights_NT / (sequences * weights_NT.sum(1, keepdim=True).clamp(min=1))
        case "dapo":
            tokens = weights_NT.sum() if num_tokens is None else torch.tensor(num_tokens)
            return weights_NT / tokens.clamp(min=1)
        case "dr_grpo":
            if constant_length is None:
                raise ValueError("reduction 'dr_grpo' needs constant_length")
            return weights_NT / (sequences * constant_length)


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    lowest: float,
    highest: float,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's pessimistic loss ``-min(r A, clip(r, lowest, highest) A)`` of each token.

    With ``dual_clip`` c, a token of negative advantage costs at most ``-c A`` (1912.09729). For
    c > highest this equals TRL's two-sided ``delta``, which caps the ratio itself.

    Args:
        ratio: pi / old, any shape, differentiable.
        advantages: same shape.
        lowest, highest: absolute bounds, such as 0.8 and 1.2.
    """
    gain = torch.minimum(ratio * advantages, ratio.clamp(lowest, highest) * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain


def _surrogate(objective: Objective, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Per-token policy-gradient loss, before the mismatch correction and the KL."""
    lowest, highest = objective.clip_bounds
    match objective.surrogate:
        case "ppo" | "gspo":
            return clipped_surrogate(ratio, advantages, lowest, highest, objective.dual_clip)
        case "cispo":
            # The clipped ratio is a weight: clipping bounds a token's pull and never silences it.
            return -ratio.detach().clamp(lowest, highest) * advantages * logprobs
        case "reinforce":
            return -advantages * logprobs


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over tokens, without gradient, as 0-d tensors; ``a + b`` joins two micro-batches.

    Attributes:
        loss: weighted, so that the sum over micro-batches is the loss of the step.
        tokens: number of unmasked tokens, the denominator of every mean below.
        ratio: pi / old as the surrogate uses it (of the sequence for GSPO).
        clipped_low, clipped_high: tokens whose ratio is clipped. For ``ppo`` and ``gspo`` only
            those whose gradient the clip removes: below with A < 0, above with A > 0.
        clipped_dual: tokens whose gradient the dual clip removes.
        kl: KL to the reference by the objective's estimator, nats.
        mismatch_k1, mismatch_k3: KL(sampler || old) by two estimators, nats. The first is signed
            and noisier; the second is never negative.
        correction: mismatch weights.
        dropped: tokens with mismatch weight 0.
        max_log_ratio: largest ``|log pi - log old|`` of any token, nats. Joined by maximum.
        tokens_by_length, dropped_by_length: tokens, and those with mismatch weight 0, by the length
            of their sequence, see :func:`trainer.mismatch.by_length`.
    """

    loss: Tensor
    tokens: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    kl: Tensor
    mismatch_k1: Tensor
    mismatch_k3: Tensor
    correction: Tensor
    dropped: Tensor
    max_log_ratio: Tensor
    tokens_by_length: Tensor
    dropped_by_length: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        names = [field.name for field in fields(self) if field.name != "max_log_ratio"]
        joined = {name: getattr(self, name) + getattr(other, name) for name in names}
        return LossSums(
            **joined, max_log_ratio=torch.maximum(self.max_log_ratio, other.max_log_ratio)
        )

    def metrics(self) -> dict[str, float]:
        """Loss, token count and largest log ratio as they are; means over tokens for the rest."""
        names = [f.name for f in fields(self) if not f.name.endswith("_by_length")]
        # One transfer from the device instead of one for each number.
        values = torch.stack([getattr(self, name).double() for name in names]).tolist()
        sums = dict(zip(names, values, strict=True))
        whole = {name: sums.pop(name) for name in ("loss", "tokens", "max_log_ratio")}
        return whole | {name: value / max(1.0, whole["tokens"]) for name, value in sums.items()}

    def dropped_shares(self) -> dict[str, float]:
        """Share of tokens with mismatch weight 0, by the length of their sequence (``65-128``)."""
        pairs = zip(self.dropped_by_length.tolist(), self.tokens_by_length.tolist(), strict=True)
        return {
            bucket_name(bucket): dropped / tokens
            for bucket, (dropped, tokens) in enumerate(pairs)
            if tokens
        }


def policy_loss(
    objective: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    ref_logprobs: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """Loss of some rows of a step, and the sums from which the step's metrics are made.

    Args:
        logprobs: ``[N, T]`` of the policy being trained, with gradient.
        old_logprobs: ``[N, T]`` of the policy at the start of the step, which the ratio is against.
        sampler_logprobs: ``[N, T]`` as returned with the samples.
        advantages: ``[N]``.
        mask: ``[N, T]``, true at completion tokens.
        weights: ``[N, T]`` these rows of ``token_weights`` of the whole step.
        ref_logprobs: ``[N, T]`` of the reference; given exactly when ``objective.beta > 0``.

    Returns:
        The loss, a 0-d sum to call ``backward`` on (0 with zero gradient when nothing is unmasked),
        and detached sums.

    Raises:
        ValueError: a reference without a KL coefficient, or the other way round.
    """
    if (ref_logprobs is not None) != (objective.beta > 0):
        raise ValueError(f"beta={objective.beta} and reference logprobs go together or not at all")
    mask_NT = mask.bool()
    logprobs_NT = torch.where(mask_NT, logprobs, 0.0)
    # Only the policy learns; a caller that passes one tensor twice must not cancel the gradient.
    old_NT = torch.where(mask_NT, old_logprobs.detach(), 0.0)
    sampler_NT = torch.where(mask_NT, sampler_logprobs.detach(), 0.0)
    advantages_NT = torch.where(mask_NT, advantages.detach()[:, None], 0.0)
    kl_NT = torch.zeros_like(logprobs_NT)
    if ref_logprobs is not None:
        ref_NT = torch.where(mask_NT, ref_logprobs.detach(), 0.0)
        kl_NT = kl_to_reference(objective.kl, logprobs_NT, ref_NT, old_NT)
        if objective.kl == "k1_reward":
            advantages_NT = advantages_NT - objective.beta * kl_NT

    ratio_NT = _ratio(objective, logprobs_NT - old_NT, mask_NT)
    low, high = objective.correction_band
    correction_NT = correction_weights(
        old_NT, sampler_NT, mask_NT, correction=objective.correction, low=low, high=high
    )
    losses_NT = correction_NT * _surrogate(objective, ratio_NT, advantages_NT, logprobs_NT)
    if objective.kl != "k1_reward":
        losses_NT = losses_NT + objective.beta * kl_NT
    loss = (weights.to(losses_NT) * losses_NT).sum()

    with torch.no_grad():
        dropped_NT = (correction_NT == 0) & mask_NT
        sums = LossSums(
            loss=loss.detach(),
            tokens=mask_NT.sum(),
            ratio=(ratio_NT * mask_NT).sum(),
            **_clip_counts(objective, ratio_NT, advantages_NT),
            kl=kl_NT.sum(),
            mismatch_k1=kl_to_reference("k1", sampler_NT, old_NT, sampler_NT).sum(),
            mismatch_k3=kl_to_reference("k3_forward", sampler_NT, old_NT, sampler_NT).sum(),
            correction=correction_NT.sum(),
            dropped=dropped_NT.sum(),
            max_log_ratio=(logprobs_NT - old_NT).abs().amax(),
            tokens_by_length=by_length(mask_NT, mask_NT),
            dropped_by_length=by_length(dropped_NT, mask_NT),
        )
    return loss, sums


def _ratio(objective: Objective, log_ratio_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """pi / old of each token, or for GSPO the geometric mean over its sequence."""
    if objective.surrogate == "gspo":
        return exp_ratio(sequence_mean(log_ratio_NT, mask_NT)).expand_as(log_ratio_NT)
    return exp_ratio(log_ratio_NT)


def _clip_counts(
    objective: Objective, ratio_NT: Tensor, advantages_NT: Tensor
) -> dict[str, Tensor]:
    """How many tokens are clipped below, above and by the dual clip.

    Masked tokens are among none of them: their advantage is 0, and their own ratio 1.
    """
    lowest, highest = objective.clip_bounds
    below_NT, above_NT = ratio_NT < lowest, ratio_NT > highest
    if objective.surrogate in ("ppo", "gspo"):
        below_NT, above_NT = below_NT & (advantages_NT < 0), above_NT & (advantages_NT > 0)
    cap = math.inf if objective.dual_clip is None else objective.dual_clip
    dual_NT = (ratio_NT > cap) & (advantages_NT < 0)
    return {
        "clipped_low": below_NT.sum(),
        "clipped_high": above_NT.sum(),
        "clipped_dual": dual_NT.sum(),
    }

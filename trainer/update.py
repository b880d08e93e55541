"""From scored samples to a changed model: advantages, batch, loss, AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.protocol import Rollout, Sample
from trainer.advantages import decoupled_advantages, group_advantages
from trainer.batch import Batch, collate
from trainer.config import Config
from trainer.errors import TrainerError
from trainer.grpo import policy_loss, token_weights
from trainer.kl import kl_to_reference
from trainer.learner import Learner
from trainer.ledger import NEVER_SCORED, Fate
from trainer.lora import adapter_off
from trainer.objective import Objective
from trainer.policy import token_logprobs
from trainer.rewards import Outcome, Score
from trainer.sharding import clip_gradient
from trainer.shares import Share, hand_out
from trainer.tally import Tally, Update

_LOWEST_SCALE = 1.0
"""Of the loss. A gradient that overflows float16 without being scaled up will do so again."""


@dataclass(frozen=True)
class TrainingSet:
    """Samples with a signal, and the advantage of each, float32 ``[N]``."""

    samples: list[Sample]
    advantages_N: Tensor


def training_set(
    rollout: Rollout,
    outcomes: Sequence[Sequence[Outcome]],
    fates: Sequence[Sequence[Fate]],
    learner: Learner,
) -> TrainingSet:
    """Advantages within each group, and the samples that are trained.

    Advantages are computed over all samples that were scored, before any of them is set aside, so
    that a baseline is that of its whole group and a batch's spread that of its whole batch.

    Args:
        outcomes, fates: by group and sample, in the rollout's order.
    """
    flat = zip(
        rollout.samples,
        [outcome for group in outcomes for outcome in group],
        [fate for group in fates for fate in group],
        strict=True,
    )
    scored = [
        (sample, outcome, fate)
        for sample, outcome, fate in flat
        if isinstance(outcome, Score) and fate not in NEVER_SCORED
    ]
    advantages_N = _advantages(
        [score for _, score, _ in scored],
        torch.tensor([sample.group_id for sample, _, _ in scored], dtype=torch.int64),
        learner.objective,
    )
    kept = [index for index, (_, _, fate) in enumerate(scored) if fate is Fate.TRAINED]
    return TrainingSet([scored[index][0] for index in kept], advantages_N[kept])


def _advantages(scores: Sequence[Score], group_ids_N: Tensor, objective: Objective) -> Tensor:
    how: dict[str, Any] = {"baseline": objective.baseline, "scale": objective.scale}
    if objective.normalise == "sum" or not scores:
        return group_advantages(torch.tensor([s.value for s in scores]), group_ids_N, **how)
    weights = [weight for _, weight in objective.rewards]
    parts_NK = torch.tensor([score.parts for score in scores])
    return decoupled_advantages(parts_NK, group_ids_N, weights, **how)


def learn(learner: Learner, chosen: TrainingSet, config: Config) -> Update:
    """Update the model ``updates_per_rollout`` times, each time with all chosen samples.

    With several ranks this is for rank 0, which gives the others their share.

    Raises:
        TrainerError: the gradient is not finite. The model is as it was before that update.
    """
    if not chosen.samples:
        return Update()
    whole = collate(chosen.samples, learner.pad_id)
    # One denominator for the whole step, so that splitting it changes nothing.
    weights_NT = token_weights(
        whole.completion_mask,
        learner.objective.reduction,
        constant_length=learner.objective.constant_length,
    )
    # A row longer than the limit gets a micro-batch to itself rather than ending the run.
    limit = max(config.train.micro_batch_tokens, int(whole.lengths.max()))
    share = Share(whole, chosen.advantages_N, weights_NT, limit)
    return learn_share(learner, hand_out(share, learner.ranks), config)


def learn_share(learner: Learner, share: Share, config: Config) -> Update:
    """One rank's part in ``learn``; the gradient and the figures are those of all ranks."""
    ranks, packed = learner.ranks, not learner.unpacked
    parts = [part.to(learner.device) for part in share.micro_batches(ranks, packed=packed)]
    references = [_reference_logprobs(learner, part, config) for part in parts]
    starts = [_logprobs_at_start(learner, part, config) for part in parts]
    tally = Tally()
    for _ in range(config.train.updates_per_rollout):
        for part, reference, start in zip(parts, references, starts, strict=True):
            # Before the forward pass, because both wait for the device.
            advantages, weights = part.take(share.advantages_N), part.take(share.weights_NT)
            logprobs = policy_logprobs(learner.model, part, config)
            loss, sums = policy_loss(
                learner.objective,
                logprobs=logprobs,
                old_logprobs=logprobs if start is None else start,
                sampler_logprobs=part.sampler_logprobs,
                advantages=advantages,
                mask=part.completion_mask,
                weights=weights,
                ref_logprobs=reference,
            )
            torch.autograd.backward(learner.scaler.scale(loss))
            tally.add(sums, _kl_from_sampler(part, logprobs))
        rate = learner.optimizer.param_groups[0]["lr"]  # the scheduler sets that of the next update
        norm = _step_optimizer(learner, config.optimizer.max_gradient_norm, tally.loss)
        tally.stepped(norm, rate)
    return tally.summary(learner)


def policy_logprobs(model: PreTrainedModel, part: Batch, config: Config) -> Tensor:
    """Log-probabilities ``[N, T]`` of the completion tokens, as training computes them."""
    return token_logprobs(
        model,
        part.input_ids,
        part.attention_mask,
        temperature=config.rollout.temperature,
        mask=part.completion_mask,
        head_dtype=torch.float32 if config.model.head_dtype == "float32" else None,
    )


def _reference_logprobs(learner: Learner, part: Batch, config: Config) -> Tensor | None:
    if learner.objective.beta == 0:
        return None
    with torch.no_grad(), ExitStack() as stack:
        if learner.reference is None:
            stack.enter_context(adapter_off(learner.model))
            return policy_logprobs(learner.model, part, config)
        return policy_logprobs(learner.reference, part, config)


def _logprobs_at_start(learner: Learner, part: Batch, config: Config) -> Tensor | None:
    """What the ratio is against; None is the policy itself, which a single update starts from.

    Correcting for the mismatch tells the trainer's policy at the start of the step from the
    sampler's. Without, they are taken for the same.
    """
    if learner.objective.correction == "none":
        return part.old_logprobs
    if config.train.updates_per_rollout == 1:
        return None
    with torch.no_grad():
        return policy_logprobs(learner.model, part, config)


def _kl_from_sampler(part: Batch, logprobs: Tensor) -> Tensor:
    """KL(sampler || policy) by k3, summed over completion tokens."""
    sampler, policy = part.sampler_logprobs, logprobs.detach()
    kl = kl_to_reference("k3_forward", sampler, policy, sampler)
    return torch.where(part.completion_mask, kl, 0.0).sum()


def _step_optimizer(learner: Learner, max_norm: float, loss: Tensor) -> float:
    """Clip, step, and clear the gradient; returns its norm before clipping.

    A gradient that has overflowed float16 is dropped, and the next loss scaled by half. Its norm,
    which is that of all ranks, is not finite then.

    Args:
        loss: before it was scaled; this rank's part.
    """
    learner.scaler.unscale_(learner.optimizer)
    norm = clip_gradient(learner.optimizer, max_norm)
    if torch.isfinite(norm):
        learner.optimizer.step()
        learner.scheduler.step()
    else:
        _refuse_hopeless(learner, norm, loss)
    learner.scaler.update()
    learner.optimizer.zero_grad(set_to_none=True)
    return float(norm)


def _refuse_hopeless(learner: Learner, norm: Tensor, loss: Tensor) -> None:
    """Raise unless a smaller scale may help; stepping would fill the model with NaN."""
    if not learner.scaler.is_enabled():
        raise TrainerError(
            f"the gradient's norm is {norm.item()}: lower optimizer.lr, or look at the last rewards"
        )
    whole = learner.ranks.reduced(loss)
    if not torch.isfinite(whole):
        raise TrainerError(
            f"the loss is {whole.item()}, whatever it is scaled by: look at the last rewards, or "
            'set model.dtype = "bfloat16", which has the range of float32'
        )
    if learner.scaler.get_scale() <= _LOWEST_SCALE:
        raise TrainerError(
            'gradients do not fit into float16 as they are: set model.dtype = "bfloat16"'
        )

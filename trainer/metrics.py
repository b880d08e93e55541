"""The figures of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.lesson import truncated_share
from shared.protocol import Rollout, Sample
from trainer.ledger import Fate, StepLedger
from trainer.rewards import Outcome, Score
from trainer.tally import Update


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; shares lie between 0 and 1.

    Attributes:
        reward_mean, reward_spread: over scored samples; NaN when there are none. The spread is the
            standard deviation over all of them.
        rewards: mean of each reward function by its name, unweighted, when there are several.
        useful_groups: share of groups that are trained.
        truncated: share of samples that hit max_tokens.
        length, trained_length: mean completion length in tokens, of all samples and of those that
            are trained; NaN when there are none. Where they part, training prefers a length.
        updates, loss, kl_sampler, kl_reference, ratio, clipped, gradient_norm, learning_rate: see
            :class:`trainer.tally.Update`.
        sampled_version: the lowest in the rollout, as its server counts.
        staleness: steps between the oldest policy in the rollout and the one trained.
        version: of the policy that the (first current) server has after the step.
        tokens_per_second: completion tokens over the step's whole time.
        rollout_seconds, update_seconds, publish_seconds: parts of the step; scoring, and asking for
            more in place of useless groups, is in the second. The first is what the trainer waited
            for samples.
        trainer_idle_seconds: of the step, how long the trainer waited for servers: the first and
            third.
        sampler_idle_seconds: of the step, how long a server had nothing to sample for this run.
        masked: share of trained tokens that the mismatch correction left without a gradient.
        masked_by_length: the same by the length of their sample, such as ``65-128``.
        skipped_updates, loss_scale: what float16 costs, see :class:`trainer.tally.Update`; 0 and
            NaN in other precisions.
    """

    step: int
    reward_mean: float
    reward_spread: float
    useful_groups: float
    truncated: float
    length: float
    trained_length: float
    updates: int
    loss: float
    kl_sampler: float
    kl_reference: float
    ratio: float
    clipped: float
    gradient_norm: float
    learning_rate: float
    sampled_version: int
    staleness: int
    version: int
    tokens_per_second: float
    rollout_seconds: float
    update_seconds: float
    publish_seconds: float
    trainer_idle_seconds: float
    sampler_idle_seconds: float
    masked: float = 0.0
    masked_by_length: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    skipped_updates: int = 0
    loss_scale: float = math.nan


def measure(
    rollout: Rollout,
    outcomes: Sequence[Sequence[Outcome]],
    fates: Sequence[Sequence[Fate]],
    accounts: StepLedger,
    update: Update,
    *,
    staleness: int,
    version: int,
    sampler_idle_seconds: float,
    times: Sequence[float],
    reward_names: Sequence[str] = (),
) -> StepMetrics:
    """Put a step's figures together.

    Args:
        outcomes, fates: by group and sample, in the rollout's order.
        staleness: of the oldest policy in the rollout, in steps.
        version: of the policy that is served after the step.
        sampler_idle_seconds: in which a server had nothing to do.
        times: clock readings in seconds: at the start, and after rollout, update and publishing.
        reward_names: of the reward functions.
    """
    reward_mean, reward_spread = reward_statistics(outcomes)
    oldest = min(span.version for sample in rollout.samples for span in sample.spans)
    rollout_seconds, update_seconds, publish_seconds = np.diff(times).tolist()
    return StepMetrics(
        step=accounts.step,
        reward_mean=reward_mean,
        reward_spread=reward_spread,
        useful_groups=accounts.groups.get(Fate.TRAINED, 0) / accounts.prompts,
        truncated=truncated_share(rollout.samples),
        length=mean_length(rollout.samples),
        trained_length=mean_length(_trained(rollout, fates)),
        updates=update.updates,
        loss=update.loss,
        kl_sampler=update.kl_sampler,
        kl_reference=update.kl_reference,
        ratio=update.ratio,
        clipped=update.clipped,
        gradient_norm=update.gradient_norm,
        learning_rate=update.learning_rate,
        sampled_version=oldest,
        staleness=staleness,
        version=version,
        tokens_per_second=accounts.received_tokens / (times[-1] - times[0]),
        rollout_seconds=rollout_seconds,
        update_seconds=update_seconds,
        publish_seconds=publish_seconds,
        trainer_idle_seconds=rollout_seconds + publish_seconds,
        sampler_idle_seconds=sampler_idle_seconds,
        masked=update.masked_tokens / max(update.loss_tokens, 1),
        masked_by_length=update.masked_by_length,
        rewards=reward_means(reward_names, outcomes),
        skipped_updates=update.skipped,
        loss_scale=update.loss_scale,
    )


def reward_statistics(outcomes: Sequence[Sequence[Outcome]]) -> tuple[float, float]:
    """Mean and population standard deviation of all scores; NaN and NaN without any."""
    scores = [o.value for group in outcomes for o in group if isinstance(o, Score)]
    return (float(np.mean(scores)), float(np.std(scores))) if scores else (math.nan, math.nan)


def reward_means(names: Sequence[str], outcomes: Sequence[Sequence[Outcome]]) -> dict[str, float]:
    """Mean of each of several reward functions over the scored samples; of one alone nothing."""
    parts = [o.parts for group in outcomes for o in group if isinstance(o, Score)]
    if len(names) < 2 or not parts:
        return {}
    return dict(zip(names, np.mean(parts, axis=0).tolist(), strict=True))


def mean_length(samples: Sequence[Sample]) -> float:
    """Mean number of completion tokens; NaN without samples."""
    lengths = [len(sample.completion_ids) for sample in samples]
    return float(np.mean(lengths)) if lengths else math.nan


def _trained(rollout: Rollout, fates: Sequence[Sequence[Fate]]) -> list[Sample]:
    flat = [fate for group in fates for fate in group]
    pairs = zip(rollout.samples, flat, strict=True)
    return [sample for sample, fate in pairs if fate is Fate.TRAINED]

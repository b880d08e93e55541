"""What a step may learn from: samples with scores and fates, and more where those teach nothing.

A group whose rewards are all the same says nothing about which answer is better. It can be replaced
by asking for more prompts, up to a budget and no further: with what there is then, training goes
on. A policy that solves everything, or nothing, makes such groups without end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shared.protocol import Rollout, Sample
from trainer.ledger import Fate, fate_of, fates_of_group
from trainer.objective import Objective
from trainer.prompts import Task
from trainer.rewards import Outcome, Score
from trainer.rewards.functions import overlong_penalty
from trainer.sampler import joined

MIN_USEFUL_SHARE = 0.25
"""The share of useful groups is not taken to be lower than this when more are asked for: a guess
from few groups may be far off, and what is asked for is trained."""


@dataclass(frozen=True)
class Judged:
    """Prompts of a step, their groups, and what is to become of them.

    Attributes:
        outcomes, fates: by group and sample, in the rollout's order.
    """

    tasks: list[Task]
    rollout: Rollout
    outcomes: list[list[Outcome]]
    fates: list[list[Fate]]

    @property
    def useful(self) -> int:
        """Groups that are trained."""
        return sum(fate_of(group) is Fate.TRAINED for group in self.fates)

    def followed_by(self, other: Judged) -> Judged:
        """Both, the groups counted on."""
        return Judged(
            self.tasks + other.tasks,
            joined([self.rollout, other.rollout]),
            self.outcomes + other.outcomes,
            self.fates + other.fates,
        )


def judge(
    objective: Objective,
    tasks: list[Task],
    rollout: Rollout,
    outcomes: list[list[Outcome]],
    *,
    is_stale: Callable[[Sample], bool],
) -> Judged:
    """Decide what becomes of each sample; scores get the punishment for length, if there is one."""
    if objective.overlong:
        outcomes = punished(rollout, outcomes, objective.overlong)
    fates = [
        fates_of_group(
            group.samples,
            scores,
            is_stale=is_stale,
            mask_truncated=objective.truncated == "mask",
            by_part=objective.normalise == "each",
        )
        for group, scores in zip(rollout.groups, outcomes, strict=True)
    ]
    return Judged(tasks, rollout, outcomes, fates)


def punished(
    rollout: Rollout, outcomes: Sequence[Sequence[Outcome]], overlong: tuple[int, int, float]
) -> list[list[Outcome]]:
    """Scores with the soft punishment of long answers; see ``Objective.overlong``."""
    max_tokens, cache, weight = overlong

    def shape(sample: Sample, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Score):
            return outcome
        length = len(sample.completion_ids)
        penalty = weight * overlong_penalty(length, max_tokens=max_tokens, cache=cache)
        return replace(outcome, value=outcome.value + penalty)

    return [
        [shape(sample, outcome) for sample, outcome in zip(group.samples, scores, strict=True)]
        for group, scores in zip(rollout.groups, outcomes, strict=True)
    ]


def refilled(first: Judged, more: Callable[[int], Judged], *, budget: int) -> Judged:
    """Ask for more prompts until as many groups are useful as there were prompts at first.

    All that was sampled is kept, useful or not: the ledger counts it.

    Args:
        more: samples and judges the given number of further prompts.
        budget: prompts to ask for at most.
    """
    wanted, judged = len(first.tasks), first
    while (missing := wanted - judged.useful) > 0 and budget > 0:
        share = max(judged.useful / len(judged.tasks), MIN_USEFUL_SHARE)
        count = min(math.ceil(missing / share), budget)
        judged = judged.followed_by(more(count))
        budget -= count
    return judged

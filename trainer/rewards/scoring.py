"""The rewards of a run: what the configuration names, over a pool of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shared.protocol import Rollout, Sample
from trainer.errors import RewardError
from trainer.reward_parts import Item, Part
from trainer.rewards.outcome import Failed, Outcome
from trainer.rewards.pool import WorkerPool
from trainer.rewards.worker import Setup

if TYPE_CHECKING:  # both import torch, which a worker has no use for
    from trainer.config import RewardConfig
    from trainer.prompts import Task


@dataclass(frozen=True)
class Reward:
    """Scores samples; made by :func:`open_reward`, and a context manager that ends the workers.

    Attributes:
        parts: the reward functions, in the order of ``Score.parts``.
    """

    parts: tuple[Part, ...]
    pool: WorkerPool

    def score(self, pairs: Sequence[tuple[Task, Sample]]) -> list[Outcome]:
        """One outcome for each sample, in order."""
        items = {
            place: Item(task.prompt, sample.text, task.reference, sample)
            for place, (task, sample) in enumerate(pairs)
            if sample.text is not None
        }
        scored = dict(zip(items, self.pool.score([*items.values()]), strict=True))
        no_text = Failed("the sample has no text")
        return [scored.get(place, no_text) for place in range(len(pairs))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def open_reward(config: RewardConfig) -> Reward:
    """Start a worker with what a configuration names; others follow when they are needed.

    Raises:
        RewardError: no such built-in, file or function, wrong options, or the file raises.
    """
    parts = config.parts()
    pool = WorkerPool(Setup(parts, config.timeout_s, config.memory_mb), config.workers)
    pool.start()
    return Reward(parts, pool)


def score_rollout(reward: Reward, tasks: Sequence[Task], rollout: Rollout) -> list[list[Outcome]]:
    """Outcomes by group and sample, in the rollout's order: ``outcomes[group][sample]``."""
    pairs = [
        (task, sample)
        for task, group in zip(tasks, rollout.groups, strict=True)
        for sample in group.samples
    ]
    outcomes = iter(reward.score(pairs))
    return [[next(outcomes) for _ in group.samples] for group in rollout.groups]


def refuse_no_verdict(reward: Reward, outcomes: Sequence[Sequence[Outcome]]) -> None:
    """Raise if not one sample could be scored: that is not a hard sample but a broken function.

    Raises:
        RewardError: with the reason that was given most often.
    """
    every = [outcome for group in outcomes for outcome in group]
    reasons = Counter(outcome.reason for outcome in every if isinstance(outcome, Failed))
    if not every or reasons.total() < len(every):
        return
    reason, _ = reasons.most_common(1)[0]
    named = ", ".join(part.function for part in reward.parts)
    raise RewardError(
        f"none of {len(every)} samples could be scored, most often: {reason}",
        advice=f"fix the reward ({named}), then start the run as before: nothing was trained",
    )

"""How good the served policy is on held-out problems.

Everything is asked of ``/rollout``, so what is measured is what the server serves. Accuracy is the
mean of the reward that training uses; with ``numeric`` or ``exact`` that is the share of right
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.client import RolloutClient
from shared.protocol import Rollout
from trainer.config import Config
from trainer.prompts import Task
from trainer.rewards import Failed, Outcome, Reward, Score, score_rollout


@dataclass(frozen=True)
class Accuracy:
    """One measurement.

    Attributes:
        accuracy: mean reward of the samples that could be scored; 0 when there are none.
        scored: how many those are.
        errors: samples on which the reward failed; they are in no mean.
        version: the oldest policy that answered.
    """

    accuracy: float
    scored: int
    errors: int
    version: int


@dataclass(frozen=True)
class Evaluation:
    """Greedy accuracy, and sampled accuracy when it was asked for.

    Attributes:
        step: finished steps of the run.
    """

    step: int
    greedy: Accuracy
    sampled: Accuracy | None

    def __str__(self) -> str:
        parts = [f"greedy {_describe(self.greedy)}"]
        if self.sampled:
            parts.append(f"sampled {_describe(self.sampled)}")
        return f"held-out accuracy: {', '.join(parts)} (v{self.greedy.version})"


def _describe(accuracy: Accuracy) -> str:
    errors = f", {accuracy.errors} reward errors" if accuracy.errors else ""
    return f"{accuracy.accuracy:.1%} of {accuracy.scored}{errors}"


def evaluate(
    client: RolloutClient, config: Config, tasks: Sequence[Task], reward: Reward, *, step: int
) -> Evaluation:
    """Measure the served policy: greedily, and at the training temperature if configured."""
    greedy = measure(client, config, tasks, reward, group_size=1, temperature=0.0)
    count = config.evaluation.samples
    if not count:
        return Evaluation(step, greedy, None)
    temperature = config.rollout.temperature
    sampled = measure(client, config, tasks, reward, group_size=count, temperature=temperature)
    return Evaluation(step, greedy, sampled)


def measure(
    client: RolloutClient,
    config: Config,
    tasks: Sequence[Task],
    reward: Reward,
    *,
    group_size: int,
    temperature: float,
) -> Accuracy:
    """Accuracy over ``group_size`` answers to every task."""
    rollout = ask(client, config, tasks, group_size=group_size, temperature=temperature)
    flat = [outcome for group in score_rollout(reward, tasks, rollout) for outcome in group]
    version = min(sample.version for sample in rollout.samples)
    return summarise(flat, version)


def ask(
    client: RolloutClient,
    config: Config,
    tasks: Sequence[Task],
    *,
    group_size: int,
    temperature: float,
) -> Rollout:
    """Answers to every task, drawn as in training but for temperature and ``max_tokens``."""
    settings = config.rollout.sampling() | {"temperature": temperature}
    if config.evaluation.max_tokens:
        settings["max_tokens"] = config.evaluation.max_tokens
    return client.rollout(
        [task.prompt for task in tasks], group_size=group_size, purpose="eval", **settings
    )


def summarise(outcomes: Sequence[Outcome], version: int) -> Accuracy:
    """Mean of the scores; failures are counted and left out of it."""
    scores = [outcome.value for outcome in outcomes if isinstance(outcome, Score)]
    errors = sum(isinstance(outcome, Failed) for outcome in outcomes)
    return Accuracy(sum(scores) / max(len(scores), 1), len(scores), errors, version)

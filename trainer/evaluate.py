"""How good the served policy is on held-out problems.

Everything is asked of ``/rollout``, so what is measured is what the server serves. Accuracy is the
mean of the reward that training uses; with ``numeric`` or ``exact`` that is the share of right
answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared.calls import PromptLike
from shared.errors import Overloaded
from shared.protocol import Rollout
from trainer.background import in_background, wait_for
from trainer.config import Config
from trainer.errors import MismatchError
from trainer.prompts import Task
from trainer.rewards import Failed, Outcome, Reward, Score, score_rollout
from trainer.servers import ServerPool

_ATTEMPTS = 3
_MAX_PAUSE_S = 10.0

Rollouts = Callable[..., Rollout]
"""Answers prompts, with the arguments of :meth:`shared.client.RolloutClient.rollout`."""


@dataclass(frozen=True)
class Accuracy:
    """One measurement.

    Attributes:
        accuracy: mean reward of the samples that could be scored; NaN when there are none.
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
    mean = f"{accuracy.accuracy:.1%}" if accuracy.scored else "unknown"
    return f"{mean} of {accuracy.scored}{errors}"


def evaluate(
    rollouts: Rollouts, config: Config, tasks: Sequence[Task], reward: Reward, *, step: int
) -> Evaluation:
    """Measure the served policy: greedily, and at the training temperature if configured."""
    greedy = measure(rollouts, config, tasks, reward, group_size=1, temperature=0.0)
    count = config.evaluation.samples
    if not count:
        return Evaluation(step, greedy, None)
    temperature = config.rollout.temperature
    sampled = measure(rollouts, config, tasks, reward, group_size=count, temperature=temperature)
    return Evaluation(step, greedy, sampled)


def of_policy(
    servers: ServerPool, step: int, prompts: Sequence[PromptLike], **settings: Any
) -> Rollout:
    """Answers of the policy after ``step``, the latest that was published, from whichever server.

    For the thread that trains: servers that come back meanwhile are brought up to date.

    Raises:
        MismatchError: they were of other weights, and of others again when asked again.
        TitoError: no server could answer.
    """
    for _ in range(_ATTEMPTS):
        answer = in_background(partial(servers.rollout, prompts, **settings), "tito-evaluation")
        wait_for([answer], meanwhile=servers.ensure)
        rollout = answer.result()
        # Training takes older weights into account; here they would pass for those of the step.
        if not any(servers.published.staleness(s, step + 1) for s in rollout.samples):
            return rollout
    raise MismatchError(
        f"the policy after step {step} was to be evaluated, and older ones have answered",
        advice="look at the servers' logs: their engines go back to earlier weights",
    )


def patient(rollouts: Rollouts, seconds: float) -> Rollouts:
    """The same, but asked again while the server is busy, for no more than some seconds.

    What it returns raises Overloaded when there was no room in all that time.
    """

    def asked(prompts: Sequence[PromptLike], **settings: Any) -> Rollout:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return rollouts(prompts, **settings)
            except Overloaded as error:
                pause = min(error.retry_after or 1.0, _MAX_PAUSE_S)
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)

    return asked


def measure(
    rollouts: Rollouts,
    config: Config,
    tasks: Sequence[Task],
    reward: Reward,
    *,
    group_size: int,
    temperature: float,
) -> Accuracy:
    """Accuracy over ``group_size`` answers to every task."""
    rollout = ask(rollouts, config, tasks, group_size=group_size, temperature=temperature)
    flat = [outcome for group in score_rollout(reward, tasks, rollout) for outcome in group]
    version = min(sample.version for sample in rollout.samples)
    return summarise(flat, version)


def ask(
    rollouts: Rollouts,
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
    return rollouts(
        [task.prompt for task in tasks], group_size=group_size, purpose="eval", **settings
    )


def summarise(outcomes: Sequence[Outcome], version: int) -> Accuracy:
    """Mean of the scores; failures are counted and left out of it."""
    scores = [outcome.value for outcome in outcomes if isinstance(outcome, Score)]
    errors = sum(isinstance(outcome, Failed) for outcome in outcomes)
    mean = sum(scores) / len(scores) if scores else math.nan
    return Accuracy(mean, len(scores), errors, version)

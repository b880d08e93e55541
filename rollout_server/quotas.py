"""What waits, what runs, and what is said to those for whom there is no room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout_server.throughput import Throughput
from shared.errors import Overloaded, Problem


class Cost(NamedTuple):
    """What a group takes.

    Attributes:
        samples: of the group.
        tokens: that they may take at most: for each the prompt's, and ``max_tokens``.
    """

    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits over all callers.

    Attributes:
        queued_samples: that may wait.
        queued_tokens: that may wait.
        running_samples: handed to the engine at once; the last group may exceed it.
    """

    queued_samples: int
    queued_tokens: int
    running_samples: int


@dataclass(slots=True, eq=False)
class Load:
    """What waits and what runs, of everybody or of one caller."""

    throughput: Throughput
    queued_samples: int = 0
    queued_tokens: int = 0
    running_samples: int = 0

    def enter(self, cost: Cost) -> None:
        """Groups begin to wait."""
        self.queued_samples += cost.samples
        self.queued_tokens += cost.tokens

    def leave(self, cost: Cost) -> None:
        """Groups wait no longer."""
        self.queued_samples -= cost.samples
        self.queued_tokens -= cost.tokens

    def start(self, cost: Cost) -> None:
        """A group that waited runs."""
        self.leave(cost)
        self.running_samples += cost.samples
        self.throughput.start(cost.samples)

    def end(self, cost: Cost, finished: bool) -> None:
        """It runs no longer."""
        self.running_samples -= cost.samples
        self.throughput.end(cost.samples, cost.tokens, finished=finished)


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound on a queue, how full it is, and what somebody wants to add.

    Attributes:
        name: of the setting.
        unit: samples or tokens.
        most: what may wait.
        queued: what does.
        asked: what more would.
        seconds_for: how long it takes until so many have ended.
    """

    name: str
    unit: str
    most: int
    queued: int
    asked: int
    seconds_for: Callable[[int], float]

    @classmethod
    def of_samples(cls, name: str, most: int, load: Load, asked: Cost) -> Limit:
        """A bound on samples."""
        wait = load.throughput.seconds_for_samples
        return cls(name, "samples", most, load.queued_samples, asked.samples, wait)

    @classmethod
    def of_tokens(cls, name: str, most: int, load: Load, asked: Cost) -> Limit:
        """A bound on tokens."""
        wait = load.throughput.seconds_for_tokens
        return cls(name, "tokens", most, load.queued_tokens, asked.tokens, wait)

    @property
    def excess(self) -> int:
        """How much has to go before there is room."""
        return self.queued + self.asked - self.most

    def problem(self, allowed: int) -> Problem:
        """What a caller is told."""
        return Problem(self.name, f"{self.asked} {self.unit}", f"up to {allowed}")


def overloaded(full: Sequence[Limit]) -> Overloaded:
    """The refusal for now, which says how full the queue is, and when to come again."""
    shown = ", ".join(f"{limit.queued} of {limit.most} {limit.unit}" for limit in full)
    return Overloaded(
        f"the queue is full: {shown} are taken",
        problems=[limit.problem(limit.most - limit.queued) for limit in full],
        retry_after=max(limit.seconds_for(limit.excess) for limit in full),
        details={limit.name: {"most": limit.most, "queued": limit.queued} for limit in full},
    )


def total_of(groups: Sequence[Cost]) -> Cost:
    """What all groups take together."""
    return Cost(sum(cost.samples for cost in groups), sum(cost.tokens for cost in groups))

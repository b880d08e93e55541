"""Figures over the server's whole life, in a bounded number of intervals.

When there would be too many intervals, each two neighbours become one, twice as long. So the oldest
figures stay, as coarse as the newest ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.protocol import Purpose, Sample

_FIRST_WIDTH_S = 2.0
MAX_INTERVALS = 240


@dataclass(slots=True)
class Interval:
    """Sums of what happened in it.

    Attributes:
        groups, samples, length, truncated: of training; ``length`` is the tokens of all samples.
        tokens: of all completions that ended, whenever they began.
        staleness: the highest: versions published while a group was sampled.
        queued: the most samples that were seen waiting.
    """

    groups: int = 0
    samples: int = 0
    length: int = 0
    tokens: int = 0
    truncated: int = 0
    reward_sum: float = 0.0
    rewards: int = 0
    staleness: int = 0
    queued: int = 0

    def merge(self, later: Interval) -> None:
        """Take the next interval in."""
        self.groups += later.groups
        self.samples += later.samples
        self.length += later.length
        self.tokens += later.tokens
        self.truncated += later.truncated
        self.reward_sum += later.reward_sum
        self.rewards += later.rewards
        self.staleness = max(self.staleness, later.staleness)
        self.queued = max(self.queued, later.queued)


class History:
    """Intervals in which something happened.

    Args:
        start: seconds since the epoch.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._width_s = _FIRST_WIDTH_S
        self._intervals: dict[int, Interval] = {}
        self._newest = 0

    def add_group(
        self,
        now: float,
        samples: Sequence[Sample],
        purpose: Purpose,
        *,
        staleness: int,
        queued: int,
    ) -> None:
        """A group is finished."""
        at = self._at(now)
        tokens = sum(len(sample.completion_ids) for sample in samples)
        at.tokens += tokens
        at.queued = max(at.queued, queued)
        if purpose is Purpose.TRAIN:
            at.groups += 1
            at.samples += len(samples)
            at.length += tokens
            at.truncated += sum(sample.finish_reason == "length" for sample in samples)
            at.staleness = max(at.staleness, staleness)

    def add_rewards(self, now: float, rewards: Iterable[float | None]) -> None:
        """Samples were scored."""
        at = self._at(now)
        for reward in rewards:
            if reward is not None:
                at.reward_sum += reward
                at.rewards += 1

    def add_queue(self, now: float, queued: int) -> None:
        """Somebody looked at the queue."""
        at = self._at(now)
        at.queued = max(at.queued, queued)

    def document(self) -> dict[str, Any]:
        """Plain data: means and rates of each interval, oldest first; None where there is none."""
        return {
            "start": self._start,
            "width": self._width_s,
            "points": [
                {
                    "at": self._start + index * self._width_s,
                    "groups": at.groups,
                    "tokens_per_second": at.tokens / self._width_s,
                    "length": at.length / at.samples if at.samples else None,
                    "truncated": at.truncated / at.samples if at.samples else None,
                    "reward": at.reward_sum / at.rewards if at.rewards else None,
                    "staleness": at.staleness if at.samples else None,
                    "queued": at.queued,
                }
                for index, at in sorted(self._intervals.items())
            ],
        }

    def _at(self, now: float) -> Interval:
        # A clock that was set back must not write into the past.
        while (index := self._index(now)) >= MAX_INTERVALS:
            self._coarsen()
        self._newest = index
        return self._intervals.setdefault(index, Interval())

    def _index(self, now: float) -> int:
        return max(int((now - self._start) / self._width_s), self._newest)

    def _coarsen(self) -> None:
        self._width_s *= 2
        merged: dict[int, Interval] = {}
        for index, interval in sorted(self._intervals.items()):
            if index // 2 in merged:
                merged[index // 2].merge(interval)
            else:
                merged[index // 2] = interval
        self._intervals = merged
        self._newest //= 2

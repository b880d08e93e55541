"""What there is to say about a group, and which groups somebody wants to see.

Facts take a pass over a group's tokens, so they are worked out when somebody looks, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rollout_server.recent import RecentGroup
from shared.lesson import distinct_answers, sample_problems
from shared.protocol import POLICY_NAME, Group

MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Facts:
    """About a group's samples, which do not change.

    Attributes:
        distinct: different completions.
        truncated: samples that hit max_tokens or the context.
        lengths: completion tokens of each sample.
        logprobs: mean log-probability of each sample's tokens, in nats; None without tokens.
        versions: the oldest and the newest that sampled a token.
        damaged: samples whose records are not what they must be.
        problem: what is wrong with the first of them.
    """

    distinct: int
    truncated: int
    lengths: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    versions: tuple[int, int]
    damaged: int
    problem: str | None


class FactBook:
    """Facts of groups, for as long as these are kept.

    Args:
        vocab_size: ids must be below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._facts: WeakKeyDictionary[RecentGroup, Facts] = WeakKeyDictionary()

    def of(self, group: RecentGroup) -> Facts:
        """The facts of a group. May be called in any thread."""
        facts = self._facts.get(group)
        if facts is None:
            self._facts[group] = facts = self._work_out(group.group)
        return facts

    def _work_out(self, group: Group) -> Facts:
        samples = group.samples
        versions = [span.version for sample in samples for span in sample.spans] or [0]
        problems = [] if self._is_sound(group) else self._problems(group)
        return Facts(
            distinct=distinct_answers(group),
            truncated=sum(sample.finish_reason == "length" for sample in samples),
            lengths=tuple(len(sample.completion_ids) for sample in samples),
            logprobs=tuple(
                float(np.mean(s.logprobs)) if len(s.logprobs) else None for s in samples
            ),
            versions=(min(versions), max(versions)),
            damaged=len(problems),
            problem=problems[0][0] if problems else None,
        )

    def _is_sound(self, group: Group) -> bool:
        """Whether no record has a problem, looked for in all of them as one, which is quicker."""
        samples = group.samples
        if not samples or any(len(s.completion_ids) != len(s.logprobs) for s in samples):
            return not samples
        whole = replace(
            samples[0],
            completion_ids=np.concatenate([sample.completion_ids for sample in samples]),
            logprobs=np.concatenate([sample.logprobs for sample in samples]),
        )
        return not sample_problems(whole, self._vocab_size)

    def _problems(self, group: Group) -> list[list[str]]:
        """Of each record that has any."""
        found = (sample_problems(sample, self._vocab_size) for sample in group.samples)
        return [problems for problems in found if problems]


@dataclass(frozen=True, slots=True)
class RewardFacts:
    """Over the samples of a group that were scored."""

    mean: float
    spread: float
    lowest: float
    highest: float


def reward_facts(group: RecentGroup) -> RewardFacts | None:
    """None if nobody has scored it."""
    told = () if group.rewards is None else group.rewards.rewards
    scored = [reward for reward in told if reward is not None]
    if not scored:
        return None
    mean, spread = float(np.mean(scored)), float(np.std(scored))
    return RewardFacts(mean, spread, min(scored), max(scored))


class GroupsQuery(BaseModel):
    """Query of ``GET /viewer/groups``: all of what is given must hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    truncated: bool | None = Field(None, description="Some sample hit max_tokens, or none did.")
    equal: bool | None = Field(None, description="All answers are the same, or not.")
    rewards: Literal["mixed", "flat", "none"] | None = Field(
        None, description="Rewards differ, are all the same, or have not come."
    )
    policy: str | None = Field(None, pattern=POLICY_NAME)
    version: int | None = Field(None, ge=0, description="Sampled some token.")
    purpose: Literal["train", "eval"] | None = None
    before: int | None = Field(None, ge=1, description="Only groups older than this one.")
    limit: int = Field(50, ge=1, le=MAX_SHOWN)

    def matches(self, group: RecentGroup, book: FactBook) -> bool:
        """Whether a group is among those asked for, its age aside."""
        if self.policy not in (None, group.rollout.policy):
            return False
        if self.purpose not in (None, group.rollout.purpose.value):
            return False
        if self.rewards is not None and self.rewards != _kind_of_rewards(group):
            return False
        return self._needs_no_facts or self._fits(book.of(group))

    @property
    def _needs_no_facts(self) -> bool:
        return self.truncated is None and self.equal is None and self.version is None

    def _fits(self, facts: Facts) -> bool:
        oldest, newest = facts.versions
        return (
            self.truncated in (None, facts.truncated > 0)
            and self.equal in (None, facts.distinct <= 1)
            and (self.version is None or oldest <= self.version <= newest)
        )


def _kind_of_rewards(group: RecentGroup) -> str:
    facts = reward_facts(group)
    if facts is None:
        return "none"
    return "mixed" if facts.highest > facts.lowest else "flat"


def select(
    groups: Iterable[RecentGroup], query: GroupsQuery, book: FactBook
) -> tuple[list[RecentGroup], int]:
    """The page of groups that a query asks for, newest first, and how many match it in all."""
    matching = [group for group in groups if query.matches(group, book)]
    older = [g for g in matching if query.before is None or g.seq < query.before]
    return older[: query.limit], len(matching)

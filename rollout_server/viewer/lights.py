"""The lesson's three checks over the newest training groups, as lights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from rollout_server.recent import RecentGroup
from rollout_server.viewer.facts import FactBook, Facts
from shared.lesson import (
    MAX_TRUNCATED_SHARE,
    MIN_VARIED_SHARE,
    RECORDS_ADVICE,
    ROOM_ADVICE,
    VARIETY_ADVICE,
)
from shared.protocol import Purpose

WINDOW = 256
"""Groups looked at."""


@dataclass(frozen=True, slots=True)
class Light:
    """One check.

    Attributes:
        title: what must hold.
        state: ``waiting`` until there are groups to judge.
        found: what was seen, in numbers.
        advice: what to do if it fails.
        share: the figure judged, 0 to 1.
        limit: the share at which the verdict turns.
    """

    name: str
    title: str
    state: Literal["passed", "failed", "waiting"]
    found: str
    advice: str
    share: float | None
    limit: float


def lights(newest_first: Sequence[RecentGroup], book: FactBook) -> list[Light]:
    """Records, variety and room, in the order in which to mend them."""
    training = (group for group in newest_first if group.rollout.purpose is Purpose.TRAIN)
    window = [(group, book.of(group)) for group in islice(training, WINDOW)]
    return [_records(window), _variety(window), _room(window)]


_Window = Sequence[tuple[RecentGroup, Facts]]


def _records(window: _Window) -> Light:
    expected = sum(group.rollout.group_size for group, _ in window)
    arrived = sum(len(facts.lengths) for _, facts in window)
    damaged = sum(facts.damaged for _, facts in window)
    problem = next((facts.problem for _, facts in window if facts.problem), None)
    intact = arrived - damaged
    found = f"{arrived} records of {expected}: {len(window)} prompts x group size"
    if problem:
        found = f"{damaged} damaged of {arrived}, e.g. {problem}"
    return _light(
        "records",
        "Records come through whole",
        found,
        RECORDS_ADVICE,
        share=intact / expected if expected else None,
        limit=1.0,
        passed=intact == expected,
    )


def _variety(window: _Window) -> Light:
    varied = sum(facts.distinct > 1 for _, facts in window)
    share = varied / len(window) if window else None
    return _light(
        "variety",
        "Answers within a group differ",
        f"in {varied} of {len(window)} groups; wanted: {MIN_VARIED_SHARE:.0%}",
        VARIETY_ADVICE,
        share=share,
        limit=MIN_VARIED_SHARE,
        passed=share is not None and share >= MIN_VARIED_SHARE,
    )


def _room(window: _Window) -> Light:
    samples = sum(len(facts.lengths) for _, facts in window)
    truncated = sum(facts.truncated for _, facts in window)
    share = truncated / samples if samples else None
    return _light(
        "room",
        "Answers end before max_tokens",
        f"{truncated} of {samples} samples were cut off; allowed: {MAX_TRUNCATED_SHARE:.0%}",
        ROOM_ADVICE,
        share=share,
        limit=MAX_TRUNCATED_SHARE,
        passed=share is not None and share <= MAX_TRUNCATED_SHARE,
    )


def _light(
    name: str,
    title: str,
    found: str,
    advice: str,
    *,
    share: float | None,
    limit: float,
    passed: bool,
) -> Light:
    if share is None:
        return Light(name, title, "waiting", "no training groups yet", advice, share, limit)
    return Light(name, title, "passed" if passed else "failed", found, advice, share, limit)

"""Three checks, in order, that a rollout must pass before it is worth training on.

    python -m trainer check http://127.0.0.1:8300

1. Records: prompts x group size came back, and every id is the one that was sent or sampled.
2. Variety: answers within a group differ, or there is nothing to compare.
3. Room: few answers hit max_tokens, or the policy is taught to be brief instead of right.

The first that fails makes those after it meaningless, so that is the one to fix. The training loop
runs the same functions on every rollout and prints what fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.text import Text

from shared.client import RolloutClient
from shared.lesson import (
    MAX_TRUNCATED_SHARE,
    MIN_VARIED_SHARE,
    RECORDS_ADVICE,
    ROOM_ADVICE,
    VARIETY_ADVICE,
    is_varied,
    sample_problems,
    truncated_share,
)
from shared.protocol import Rollout
from trainer.arithmetic import PLAIN_QUESTION, ArithmeticStream


@dataclass(frozen=True)
class Check:
    """Verdict of one check.

    Attributes:
        passed: whether it is safe to go on.
        found: what was seen, in numbers.
        advice: what to do when it failed.
    """

    name: str
    passed: bool
    found: str
    advice: str


def check_records(
    rollout: Rollout,
    *,
    prompts: int,
    group_size: int,
    vocab_size: int,
    sent_ids: Sequence[Sequence[int]] | None = None,
) -> Check:
    """Every record is there and intact.

    Args:
        prompts, group_size: as asked for.
        vocab_size: ids must be below it.
        sent_ids: the prompts, when they were sent as token ids; they must come back unchanged.
    """
    problems = [*_count_problems(rollout, prompts, group_size)]
    for sample in rollout.samples:
        problems += sample_problems(sample, vocab_size)
    if sent_ids is not None:
        problems += _echo_problems(rollout, sent_ids)
    expected = prompts * group_size
    found = f"{len(rollout.samples)} records of {expected}, ids and lengths as they must be"
    return Check(
        "records",
        not problems,
        found if not problems else "; ".join(problems[:3]),
        RECORDS_ADVICE,
    )


def _count_problems(rollout: Rollout, prompts: int, group_size: int) -> list[str]:
    problems = []
    if len(rollout.groups) != prompts:
        problems.append(f"{len(rollout.groups)} groups for {prompts} prompts")
    for index, group in enumerate(rollout.groups):
        if group.group_id != index:
            problems.append(f"group {index} has group_id {group.group_id}")
        if len(group.samples) != group_size:
            problems.append(f"group {index} has {len(group.samples)} samples, not {group_size}")
    return problems


def _echo_problems(rollout: Rollout, sent_ids: Sequence[Sequence[int]]) -> list[str]:
    return [
        f"group {group.group_id}: prompt_ids are not those sent"
        for group, sent in zip(rollout.groups, sent_ids, strict=False)
        if not np.array_equal(group.prompt_ids, sent)
    ]


def check_variety(rollout: Rollout) -> Check:
    """At least half of the groups hold two different answers."""
    varied = sum(is_varied(group) for group in rollout.groups)
    total = len(rollout.groups)
    return Check(
        "variety",
        varied >= MIN_VARIED_SHARE * total,
        f"answers differ in {varied} of {total} groups",
        VARIETY_ADVICE,
    )


def check_room(rollout: Rollout) -> Check:
    """At most 15% of the samples hit max_tokens."""
    share = truncated_share(rollout.samples)
    return Check(
        "room",
        share <= MAX_TRUNCATED_SHARE,
        f"{share:.0%} of samples hit max_tokens; allowed: {MAX_TRUNCATED_SHARE:.0%}",
        ROOM_ADVICE,
    )


def check_rollout(
    rollout: Rollout,
    *,
    prompts: int,
    group_size: int,
    vocab_size: int,
    sent_ids: Sequence[Sequence[int]] | None = None,
) -> list[Check]:
    """All three, in order; arguments as for :func:`check_records`."""
    records = check_records(
        rollout, prompts=prompts, group_size=group_size, vocab_size=vocab_size, sent_ids=sent_ids
    )
    return [records, check_variety(rollout), check_room(rollout)]


def check_server(
    client: RolloutClient, *, questions: Sequence[str], group_size: int, max_tokens: int
) -> list[Check]:
    """Ask a server the questions and check what comes back.

    The questions are rendered by the server's own chat template first and then sent again as token
    ids, because only ids can be compared with what returns.
    """
    chats = [[{"role": "user", "content": question}] for question in questions]
    rendered = client.rollout(chats, group_size=1, max_tokens=1, text=False)
    sent_ids = [group.prompt_ids.tolist() for group in rendered.groups]
    rollout = client.rollout(sent_ids, group_size=group_size, max_tokens=max_tokens, text=False)
    return check_rollout(
        rollout,
        prompts=len(questions),
        group_size=group_size,
        vocab_size=client.info().vocab_size,
        sent_ids=sent_ids,
    )


def default_questions(count: int) -> list[str]:
    """Arithmetic that a small model gets right sometimes."""
    stream = ArithmeticStream(max_operand=20, operations=("+",), question=PLAIN_QUESTION)
    return [str(problem.messages[0]["content"]) for problem in stream.batch(0, count)]


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """One line for each check, with advice below the first that failed."""
    failed = next((check for check in checks if not check.passed), None)
    for number, check in enumerate(checks, start=1):
        mark, style = ("ok    ", "green") if check.passed else ("FAILED", "red")
        console.print(Text.assemble((f"{number} {mark} ", style), f"{check.name}: {check.found}"))
        if check is failed:
            console.print(Text(f"  what to do: {check.advice}"))

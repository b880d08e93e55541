from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from shared.client import RolloutClient
from shared.protocol import Rollout, Sample
from trainer.checks import (
    Check,
    check_records,
    check_rollout,
    check_room,
    check_server,
    check_variety,
    default_questions,
    print_checks,
)

MakeSample = Callable[..., Sample]
MakeRollout = Callable[..., Rollout]
PROMPT = [1, 2, 3]


@pytest.fixture
def good(make_sample: MakeSample, make_rollout: MakeRollout) -> Rollout:
    return make_rollout(
        [[make_sample(g, (g, s)) for s in range(4)] for g in range(5)],
    )


def records(rollout: Rollout, **changes: Any) -> Check:
    expected: dict[str, Any] = {
        "prompts": 5, "group_size": 4, "vocab_size": 10, "sent_ids": [PROMPT] * 5,
    }  # fmt: skip
    return check_records(rollout, **{**expected, **changes})


def test_a_good_rollout_passes_all(good: Rollout) -> None:
    checks = check_rollout(good, prompts=5, group_size=4, vocab_size=10, sent_ids=[PROMPT] * 5)
    assert [check.passed for check in checks] == [True] * 3
    assert [check.name for check in checks] == ["records", "variety", "room"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompts": 6}, "5 groups for 6 prompts"),
        ({"group_size": 5}, "group 0 has 4 samples, not 5"),
        ({"vocab_size": 4}, "outside the vocabulary of 4"),
        ({"sent_ids": [PROMPT] * 4 + [[1, 2]]}, "group 4: prompt_ids are not those sent"),
        ({"sent_ids": [[0, *PROMPT]] * 5}, "prompt_ids are not those sent"),
    ],
)
def test_records_that_differ_from_what_was_asked(
    good: Rollout, change: dict[str, Any], says: str
) -> None:
    check = records(good, **change)
    assert not check.passed
    assert says in check.found


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "2 completion ids with 1 logprobs"),
        ({"logprobs": np.array([0.5, -1], np.float32)}, "above 0 or not finite"),
        ({"logprobs": np.array([np.nan, -1], np.float32)}, "above 0 or not finite"),
        ({"completion_ids": np.array([-1, 2], np.int32)}, "outside the vocabulary"),
    ],
)
def test_damaged_samples_are_found(
    good: Rollout, make_rollout: MakeRollout, damage: dict[str, Any], says: str
) -> None:
    groups = [list(group.samples) for group in good.groups]
    groups[2][1] = replace(groups[2][1], **damage)
    check = records(make_rollout(groups))
    assert not check.passed
    assert f"group 2: {says}" in check.found or says in check.found


def test_swapped_groups_are_found(good: Rollout) -> None:
    assert not records(replace(good, groups=good.groups[::-1])).passed


def test_variety_needs_half_of_the_groups(
    make_sample: MakeSample, make_rollout: MakeRollout
) -> None:
    def rollout(varied: int) -> Rollout:
        return make_rollout(
            [[make_sample(g, (1,)), make_sample(g, (1 + (g < varied),))] for g in range(4)]
        )

    assert not check_variety(rollout(1)).passed
    assert check_variety(rollout(2)).passed
    assert check_variety(rollout(1)).found == "answers differ in 1 of 4 groups"


def test_same_text_from_other_tokens_counts_as_different(
    make_sample: MakeSample, make_rollout: MakeRollout
) -> None:
    group = [make_sample(0, (1, 2), text="a"), make_sample(0, (3,), text="a")]
    assert check_variety(make_rollout([group])).passed


def test_room_allows_fifteen_per_cent(make_sample: MakeSample, make_rollout: MakeRollout) -> None:
    def rollout(truncated: int) -> Rollout:
        reasons = ["length"] * truncated + ["stop"] * (20 - truncated)
        return make_rollout([[make_sample(finish_reason=reason) for reason in reasons]])

    assert check_room(rollout(3)).passed
    assert not check_room(rollout(4)).passed


def test_advice_is_given_for_the_first_failure_alone() -> None:
    out = io.StringIO()
    checks = [
        Check("a", True, "fine", "A"),
        Check("b", False, "[bad]", "B"),
        Check("c", False, "", "C"),
    ]
    print_checks(Console(file=out, soft_wrap=True), checks)
    lines = out.getvalue().splitlines()
    assert lines == ["1 ok     a: fine", "2 FAILED b: [bad]", "  what to do: B", "3 FAILED c: "]


def test_a_real_server_returns_the_ids_that_it_was_sent(server_url: str) -> None:
    with RolloutClient(server_url) as client:
        records, *_ = check_server(
            client, questions=default_questions(4), group_size=4, max_tokens=16
        )
    assert records.passed, records.found
    assert records.found.startswith("16 records of 16")

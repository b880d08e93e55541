from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.protocol import Rollout, Sample
from trainer.errors import LedgerError
from trainer.ledger import Fate, account, append, fate_of, fates_of_group
from trainer.rewards import Failed, Outcome, Score, TimedOut

GOOD, BAD, BROKEN, LATE = Score(1.0), Score(0.0), Failed("boom"), TimedOut("late")


@pytest.mark.parametrize(
    ("outcomes", "fates", "group"),
    [
        ([GOOD, BAD, BAD], [Fate.TRAINED] * 3, Fate.TRAINED),
        ([GOOD, GOOD], [Fate.ZERO_VARIANCE] * 2, Fate.ZERO_VARIANCE),
        ([GOOD], [Fate.SINGLETON], Fate.SINGLETON),
        ([BROKEN, GOOD], [Fate.REWARD_ERROR, Fate.SINGLETON], Fate.SINGLETON),
        ([BROKEN, GOOD, BAD], [Fate.REWARD_ERROR, Fate.TRAINED, Fate.TRAINED], Fate.TRAINED),
        ([BROKEN, BROKEN], [Fate.REWARD_ERROR] * 2, Fate.REWARD_ERROR),
        ([LATE, GOOD, BAD], [Fate.REWARD_TIMEOUT, Fate.TRAINED, Fate.TRAINED], Fate.TRAINED),
    ],
)
def test_fates(
    make_sample: Callable[..., Sample], outcomes: list[Outcome], fates: list[Fate], group: Fate
) -> None:
    found = fates_of_group([make_sample() for _ in outcomes], outcomes)
    assert found == fates
    assert fate_of(found) == group


def test_unusable_samples_do_not_count_as_peers(make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample(finish_reason="abort"), make_sample(completion=()), make_sample()]
    assert fates_of_group(samples, [GOOD, BAD, BAD]) == [
        Fate.ABORTED,
        Fate.EMPTY,
        Fate.SINGLETON,
    ]


def test_stale_samples_are_no_peers_whatever_they_scored(
    make_sample: Callable[..., Sample],
) -> None:
    samples = [make_sample(version=v) for v in (1, 4, 4)]
    found = fates_of_group(samples, [GOOD, BAD, BAD], is_stale=lambda s: s.version < 4)
    assert found == [Fate.STALE, Fate.ZERO_VARIANCE, Fate.ZERO_VARIANCE]
    whole = fates_of_group(samples, [GOOD, BAD, BAD], is_stale=lambda _: True)
    assert (set(whole), fate_of(whole)) == ({Fate.STALE}, Fate.STALE)


@pytest.fixture
def step(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> dict[str, Any]:
    """A step with one trained group, one without variance and one broken reward."""
    groups = [
        [make_sample(0, (1, 2, 3)), make_sample(0, (4,))],
        [make_sample(1, (1, 2)), make_sample(1, (3, 4))],
        [make_sample(2, (1,)), make_sample(2, (2,) * 5)],
    ]
    outcomes: list[list[Outcome]] = [[GOOD, BAD], [GOOD, GOOD], [BROKEN, GOOD]]
    fates = [fates_of_group(group, scores) for group, scores in zip(groups, outcomes, strict=True)]
    return {
        "step": 3, "prompts": 3, "group_size": 2, "rollout": make_rollout(groups), "fates": fates,
        "outcomes": outcomes, "loss_tokens": 4, "updates": 1,
    }  # fmt: skip


def test_accounts_add_up(step: dict[str, Any], tmp_path: Path) -> None:
    ledger = account(**step)
    assert ledger.groups == {"trained": 1, "zero_variance": 1, "singleton": 1}
    assert ledger.samples == {
        "trained": 2, "zero_variance": 2, "reward_error": 1, "singleton": 1,
    }  # fmt: skip
    assert ledger.tokens == {"trained": 4, "zero_variance": 4, "reward_error": 1, "singleton": 5}
    assert ledger.reward_errors == {"boom": 1}
    append(tmp_path / "ledger.jsonl", ledger)
    append(tmp_path / "ledger.jsonl", ledger)
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["tokens"]["singleton"] == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompts": 4}, "prompts and groups differ: 4 and 3"),
        ({"group_size": 3}, "samples asked for and received differ: 9 and 6"),
        ({"loss_tokens": 5}, "tokens trained and tokens that bore loss differ: 4 and 5"),
        ({"loss_tokens": 0}, "tokens trained and tokens that bore loss differ: 4 and 0"),
    ],
)
def test_accounts_that_do_not_add_up_raise(
    step: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    with pytest.raises(LedgerError, match=says):
        account(**{**step, **change})


def test_a_lost_sample_is_noticed(step: dict[str, Any]) -> None:
    step["fates"][2].pop()
    with pytest.raises(LedgerError, match="samples received and accounted for differ: 6 and 5"):
        account(**step)


def test_a_lost_group_is_noticed(step: dict[str, Any]) -> None:
    step["fates"].pop()
    with pytest.raises(LedgerError, match="prompts and groups differ: 3 and 2"):
        account(**step)


def test_a_ledger_tampered_with_does_not_pass(step: dict[str, Any]) -> None:
    ledger = account(**step)
    with pytest.raises(LedgerError, match="tokens received and accounted for"):
        replace(ledger, received_tokens=99).check()

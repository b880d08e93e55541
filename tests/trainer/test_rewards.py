from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from shared.protocol import Rollout, Sample
from trainer.errors import RewardError
from trainer.prompts import Task
from trainer.rewards import Failed, Score, last_number, load_reward, score_rollout, score_sample


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("5-3=2", "2"),
        ("3-5=-2", "-2"),
        ("10-7", "7"),
        ("so x = -7", "-7"),
        ("\N{MINUS SIGN}7", "-7"),
        ("$1,234,567.50!", "1234567.50"),
        ("1,2345", "2345"),
        ("3.14", "3.14"),
        ("1, 2, 3", "3"),
        ("#### 18", "18"),
        ("007", "7"),
    ],
)
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no digits", "-", "١٢"])
def test_no_number(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("name", "text", "reference", "value"),
    [
        ("numeric", "it is 4.0", "4", 1.0),
        ("numeric", "4 or rather 5", "4", 0.0),
        ("numeric", "four", "4", 0.0),
        ("numeric", "18", "She sells 9 a day.\n#### 18", 1.0),
        ("exact", " yes\n", "yes", 1.0),
        ("exact", "yes.", "yes", 0.0),
    ],
)
def test_built_in_scores(
    make_sample: Callable[..., Sample], name: str, text: str, reference: str, value: float
) -> None:
    outcome = score_sample(load_reward(name), Task("q", reference), make_sample(text=text))
    assert outcome == Score(value)


@pytest.mark.parametrize("name", ["numeric", "exact"])
def test_without_a_reference_there_is_an_error_not_a_zero(
    make_sample: Callable[..., Sample], name: str
) -> None:
    assert isinstance(score_sample(load_reward(name), Task("q", None), make_sample()), Failed)


def test_own_function_sees_everything(tmp_path: Path, make_sample: Callable[..., Sample]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def length(*, prompt, text, reference, sample):\n"
        "    return len(sample.completion_ids) + len(prompt) + len(text) + len(reference)\n",
        encoding="utf-8",
    )
    reward = load_reward(f"{file}:length")
    sample = make_sample(completion=(1, 2, 3), text="abc")
    assert score_sample(reward, Task("qq", "r"), sample) == Score(3 + 2 + 3 + 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('x')", "KeyError"),
        ("return float('nan')", "not a finite number"),
        ("return float('-inf')", "not a finite number"),
        ("return None", "TypeError"),
        ("return '1.0'", "must return a number"),
        ("import sys; return [1] * 0 or {}", "TypeError"),
    ],
)
def test_whatever_goes_wrong_is_typed(
    tmp_path: Path, make_sample: Callable[..., Sample], body: str, reason: str
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(f"def f(**_):\n    {body}\n", encoding="utf-8")
    outcome = score_sample(load_reward(f"{file}:f"), Task("q", None), make_sample())
    assert isinstance(outcome, Failed)
    assert reason in outcome.reason


def test_a_sample_without_text_cannot_be_scored(make_sample: Callable[..., Sample]) -> None:
    assert isinstance(
        score_sample(load_reward("exact"), Task("q", "7"), make_sample(text=None)), Failed
    )


def test_outcomes_keep_the_order_of_the_rollout(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    rollout = make_rollout(
        [[make_sample(text="1"), make_sample(text="2")], [make_sample(1, text="2")]]
    )
    tasks = [Task("a", "2"), Task("b", "2")]
    outcomes = score_rollout(load_reward("exact"), tasks, rollout)
    assert outcomes == [[Score(0.0), Score(1.0)], [Score(1.0)]]
    with pytest.raises(ValueError, match="zip"):
        score_rollout(load_reward("exact"), tasks[:1], rollout)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nonsense", "allowed: numeric, exact or"),
        ("missing.py:f", "does not exist"),
        (":f", "unknown"),
    ],
)
def test_unknown_rewards(name: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        load_reward(name)


@pytest.mark.parametrize(
    ("content", "says"), [("x = 1", "no function 'f'"), ("1 / 0", "cannot be imported")]
)
def test_unusable_reward_files(tmp_path: Path, content: str, says: str) -> None:
    file: Any = tmp_path / "r.py"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(RewardError, match=says):
        load_reward(f"{file}:f")

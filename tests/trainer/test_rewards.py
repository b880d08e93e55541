"""What rewards say of a text, and what can come of asking them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from shared.protocol import Rollout, Sample
from trainer.config import RewardConfig
from trainer.config_file import load_config, parse_config, to_toml
from trainer.errors import ConfigError, RewardError
from trainer.prompts import Task
from trainer.rewards import Failed, Outcome, Score, TimedOut, open_reward, score_rollout
from trainer.rewards.functions import last_number, overlong_penalty
from trainer.rewards.load import BUILT_IN
from trainer.rewards.outcome import combine, verdict

ScoreTexts = Callable[..., list[Outcome]]


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
    ("name", "text", "reference", "options", "value"),
    [
        ("numeric", "it is 4.0", "4", {}, 1.0),
        ("numeric", "4 or rather 5", "4", {}, 0.0),
        ("numeric", "four", "4", {}, 0.0),
        ("numeric", "18", "She sells 9 a day.\n#### 18", {}, 1.0),
        ("numeric", "3.14", "3.14159", {}, 0.0),
        ("numeric", "3.14", "3.14159", {"tolerance": 0.001}, 1.0),
        ("numeric", "-3.14", "3.14159", {"tolerance": 0.001}, 0.0),
        ("exact", " yes\n", "yes", {}, 1.0),
        ("exact", "yes.", "yes", {}, 0.0),
        ("math", r"so it is $\boxed{0.5}$", r"$\frac{1}{2}$", {}, 1.0),
        ("math", r"\boxed{(x+1)^2}", "x^2+2x+1", {}, 1.0),
        ("math", r"$\sqrt{8}$", r"2\sqrt{2}", {}, 1.0),
        ("math", r"$\sqrt{8}$", r"\sqrt{2}", {}, 0.0),
        ("math", "I do not know", "72", {}, 0.0),
        ("math", r"\frac{", "72", {}, 0.0),
        ("format", "<think>a</think>\n<answer>b</answer>", None, {}, 1.0),
        ("format", "well, <think>a</think><answer>b</answer>", None, {}, 0.0),
        ("format", "<answer>b</answer><think>a</think>", None, {}, 0.0),
        ("format", "<think>a<think></think></think><answer>b</answer>", None, {}, 0.0),
        ("format", "<x>a</x>", None, {"tags": ["x"]}, 1.0),
        ("regex", "is 12.", None, {"pattern": r"\d+"}, 1.0),
        ("regex", "is 12.", None, {"pattern": r"\d+", "whole": True}, 0.0),
        ("regex", "a\nb", None, {"pattern": "a.b", "whole": True}, 1.0),
    ],
)
def test_built_in_scores(
    make_sample: Callable[..., Sample],
    name: str,
    text: str,
    reference: str | None,
    options: dict[str, Any],
    value: float,
) -> None:
    sample = make_sample(text=text)
    found = BUILT_IN[name](prompt="q", text=text, reference=reference, sample=sample, **options)
    assert found == value


@pytest.mark.parametrize("reference", [None, "", "no number, no mathematics"])
@pytest.mark.parametrize("name", ["numeric", "math"])
def test_a_reference_that_is_unreadable_is_an_error(
    make_sample: Callable[..., Sample], name: str, reference: str | None
) -> None:
    with pytest.raises(ValueError, match="reference"):
        BUILT_IN[name](prompt="q", text="7", reference=reference, sample=make_sample())


def test_length_penalty_falls_linearly_within_the_cache(
    make_sample: Callable[..., Sample],
) -> None:
    penalties = [overlong_penalty(n, max_tokens=10, cache=4) for n in range(0, 12)]
    assert penalties == [0, 0, 0, 0, 0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    sample = make_sample(completion=range(9))
    found = BUILT_IN["length_penalty"](
        prompt="q", text="", reference=None, sample=sample, max_tokens=10, cache=4
    )
    assert found == -0.75


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "not a finite number"),
        (-math.inf, "not a finite number"),
        (None, "TypeError"),
        ("1.0", "must return a number"),
        (b"1", "must return a number"),
        ([], "TypeError"),
    ],
)
def test_what_is_no_finite_number_is_no_score(value: Any, reason: str) -> None:
    outcome = verdict(value)
    assert isinstance(outcome, Failed)
    assert reason in outcome.reason


def test_a_failed_part_leaves_no_score() -> None:
    names, weights = ["a", "b"], [2.0, -0.5]
    both = combine(names, weights, [Score(1.0), Score(3.0)])
    assert both == Score(0.5)
    assert isinstance(both, Score)
    assert both.parts == (1.0, 3.0)
    assert combine(names, weights, [Score(1.0), Failed("x")]) == Failed("b: x")
    assert combine(names, weights, [TimedOut("late"), Score(1.0)]) == TimedOut("a: late")
    # Even where the part that failed weighs nothing: it is there to be watched.
    assert combine(["a"], [0.0], [Failed("x")]) == Failed("x")


def test_several_functions_are_weighed_and_kept_apart(score_texts: ScoreTexts) -> None:
    functions = [
        {"function": "exact", "weight": 2.0},
        {"name": "brackets", "function": "regex", "options": {"pattern": r"\[.*\]"}},
    ]
    both, one = score_texts(["[7]", "7"], "7", functions=functions)
    assert [both, one] == [Score(1.0), Score(2.0)]
    assert isinstance(both, Score)
    assert both.parts == (0.0, 1.0)


def test_own_function_sees_everything(tmp_path: Path, make_sample: Callable[..., Sample]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def length(*, prompt, text, reference, sample, extra=0):\n"
        "    tokens = len(sample.completion_ids) + int(sample.logprobs.sum() * -2)\n"
        "    return tokens + len(prompt) + len(text) + len(reference) + extra\n",
        encoding="utf-8",
    )
    sample = make_sample(completion=(1, 2, 3), text="abc")
    config = RewardConfig(function=f"{file}:length", options={"extra": 100})
    with open_reward(config) as reward:
        assert reward.score([(Task("qq", "r"), sample)]) == [Score(3 + 3 + 2 + 3 + 1 + 100)]


def test_outcomes_keep_the_order_of_the_rollout(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    rollout = make_rollout(
        [[make_sample(text="1"), make_sample(text=None)], [make_sample(1, text="2")]]
    )
    tasks = [Task("a", "1"), Task("b", "3")]
    with open_reward(RewardConfig(function="exact")) as reward:
        first, second = score_rollout(reward, tasks, rollout)
        assert first == [Score(1.0), Failed("the sample has no text")]
        assert second == [Score(0.0)]
        with pytest.raises(ValueError, match="zip"):
            score_rollout(reward, tasks[:1], rollout)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"function": "nonsense"}, "allowed: numeric, exact, math"),
        ({"function": "missing.py:f"}, "does not exist"),
        ({"function": ":f"}, "unknown"),
        ({"function": "http"}, "needs options.url"),
        ({"function": "exact", "options": {"case": 1}}, "exact takes: none"),
        ({"function": "regex"}, r"regex takes: pattern \(required\), whole"),
    ],
)
def test_unusable_rewards_are_found_before_anything_is_trained(
    section: dict[str, Any], says: str
) -> None:
    with pytest.raises(RewardError, match=says):
        open_reward(RewardConfig(**section))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("x = 1", "no function 'f'"),
        ("1 / 0", "cannot be imported"),
        (
            "def f(*, text, **_): return 1\nimport os; os._exit(5)",
            r"did not start \(exit status 5\)",
        ),
    ],
)
def test_unusable_reward_files(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "r.py"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(RewardError, match=says):
        open_reward(RewardConfig(function=f"{file}:f"))


# Configuration

TWO = {"functions": [{"function": "exact"}, {"name": "b", "function": "numeric", "weight": 0.5}]}


def test_a_list_of_functions_survives_being_written(tmp_path: Path) -> None:
    config = parse_config({"model": {"path": "m"}, "reward": TWO})
    copy = tmp_path / "config.toml"
    copy.write_text(to_toml(config), encoding="utf-8")
    assert load_config(copy) == config
    assert [(part.name, part.weight) for part in config.reward.parts()] == [
        ("exact", 1.0),
        ("b", 0.5),
    ]


def test_without_a_word_it_is_numeric() -> None:
    (part,) = RewardConfig().parts()
    assert (part.function, part.weight) == ("numeric", 1.0)


@pytest.mark.parametrize(
    ("section", "where", "says"),
    [
        ({**TWO, "function": "exact"}, "reward", "but not both"),
        ({"functions": [{"function": "exact"}] * 2}, "reward", "give each a name of its own"),
        (
            {"functions": [{"functoin": "x", "function": "y"}]},
            "reward.functions.0.functoin",
            "function?",
        ),
        ({"functions": [{"weight": 1}]}, "reward.functions.0.function", "must be set"),
    ],
)
def test_contradictory_rewards_are_refused(section: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": {"path": "m"}, "reward": section})
    (problem,) = caught.value.problems
    assert problem.where == where
    assert says in json.dumps(problem.allowed)

"""The arithmetic stream: addressable, reproducible, and split by operands."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from trainer.arithmetic import (
    HELD_OUT_ONE_IN,
    PLAIN_QUESTION,
    ArithmeticStream,
    Problem,
    split_of,
)


def test_a_problem_is_a_question_and_its_answer() -> None:
    problem = Problem(12, "-", 30)
    assert problem.messages == [{"role": "user", "content": "12-30=?"}]
    assert problem.answer == "-18"
    assert Problem(7, "*", 6).answer == "42"
    plain = Problem(12, "+", 7, PLAIN_QUESTION)
    assert plain.messages[0]["content"] == "What is 12 + 7? Answer with just the number."


def test_a_problem_depends_on_seed_and_position_alone() -> None:
    stream = ArithmeticStream(seed=3)
    ahead = stream[1000]
    assert stream.batch(998, 5)[2] == ahead
    assert ArithmeticStream(seed=3)[1000] == ahead
    assert ArithmeticStream(seed=4).batch(0, 20) != stream.batch(0, 20)


def test_the_stream_is_the_same_in_another_process() -> None:
    code = "from trainer.arithmetic import ArithmeticStream as S; print(S('held_out')[7])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == str(ArithmeticStream("held_out")[7])


def test_problems_respect_the_options() -> None:
    stream = ArithmeticStream(max_operand=12, operations=("*",), question="{b}{op}{a}")
    for problem in stream.batch(0, 200):
        assert problem.op == "*"
        assert {problem.a, problem.b} <= set(range(13))
        assert problem.messages[0]["content"] == f"{problem.b}*{problem.a}"


@pytest.mark.parametrize("seed", [0, 1])
def test_no_held_out_problem_nor_its_mirror_is_trained_on(seed: int) -> None:
    trained = {(p.a, p.op, p.b) for p in ArithmeticStream("train", seed).batch(0, 3000)}
    held_out = {(p.a, p.op, p.b) for p in ArithmeticStream("held_out", 1 - seed).distinct(300)}
    mirrored = {(b, op, a) for a, op, b in held_out}
    assert len(trained) > 1500
    assert not trained & (held_out | mirrored)


def test_about_one_problem_in_ten_is_held_out() -> None:
    every = [split_of(a, op, b) for a, op, b in product(range(51), "+-", range(51))]
    assert every.count("held_out") / len(every) == pytest.approx(1 / HELD_OUT_ONE_IN, abs=0.02)


@pytest.mark.parametrize("op", ["+", "-", "*"])
def test_the_smallest_range_has_held_out_problems(op: str) -> None:
    assert ArithmeticStream("held_out", max_operand=9, operations=(op,))[0].op == op


def test_distinct_problems_come_in_stream_order_without_repeats() -> None:
    stream = ArithmeticStream("held_out")
    few, many = stream.distinct(20), stream.distinct(300)
    assert len(set(many)) == 300
    assert many[:20] == few
    assert few[0] == stream[0]


def test_asking_for_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="too many"):
        ArithmeticStream("held_out", max_operand=9).distinct(50)


@pytest.mark.parametrize("operations", [(), ("+", "/")])
def test_unknown_operations_are_an_error(operations: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="operations"):
        ArithmeticStream(operations=operations)


def test_a_range_too_small_to_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_operand"):
        ArithmeticStream(max_operand=8)


def test_positions_before_the_start_are_an_error() -> None:
    with pytest.raises(IndexError):
        ArithmeticStream()[-1]

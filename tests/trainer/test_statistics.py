from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.statistics import mean_over_problems, pass_at_k, wilson


@given(samples=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(
    samples: int, data: st.DataObject
) -> None:
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    marks = [True] * right + [False] * (samples - right)
    subsets = [any(chosen) for chosen in itertools.combinations(marks, k)]
    assert pass_at_k(samples, right, k) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(4, 2, k)


def test_wilson_has_the_values_of_the_textbook() -> None:
    """Brown, Cai and DasGupta (2001) and every calculator give these for 95%."""
    found = wilson(8, 10)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    none = wilson(0, 20)
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.1611, abs=1e-4)
    assert str(wilson(1, 2)) == "50.0% [9.5%, 90.5%]"


def test_the_bootstrap_is_repeatable_and_covers_the_mean() -> None:
    values = [0.0, 0.25, 0.5, 1.0] * 10
    found = mean_over_problems(values)
    assert found == mean_over_problems(values)
    assert found.value == pytest.approx(0.4375)
    # The normal interval, which 40 values are enough for.
    half = 1.96 * math.sqrt(sum((v - 0.4375) ** 2 for v in values) / 40 / 40)
    assert found.low == pytest.approx(0.4375 - half, abs=0.02)
    assert found.high == pytest.approx(0.4375 + half, abs=0.02)


def test_problems_that_agree_still_leave_doubt() -> None:
    assert mean_over_problems([0.0] * 20) == wilson(0, 20)
    assert mean_over_problems([1.0] * 20) == wilson(20, 20)


def test_without_data_there_is_no_number() -> None:
    assert math.isnan(mean_over_problems([]).value)
    assert str(wilson(0, 0)) == "-"

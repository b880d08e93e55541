"""Shares with their uncertainty: what an evaluation on a few dozen problems can say.

Intervals are for 95%. Sources: pass@k, Chen et al., "Evaluating Large Language Models Trained on
Code" (2107.03374), eq. 1; the score interval, E. B. Wilson, "Probable Inference, the Law of
Succession, and Statistical Inference" (1927); the bootstrap, B. Efron, "Bootstrap Methods: Another
Look at the Jackknife" (1979), by percentiles and over problems, since answers to one problem are
alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959964
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A share and its interval; all NaN without data."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


NOTHING = Estimate(math.nan, math.nan, math.nan)


def wilson(right: int, total: int) -> Estimate:
    """The share ``right / total`` with Wilson's score interval, which is sound near 0 and 1 too."""
    if total == 0:
        return NOTHING
    share, z2 = right / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that one of ``k`` of the samples, drawn without replacement, is right.

    ``1 - C(n - c, k) / C(n, k)``: unbiased, unlike ``1 - (1 - c / n)^k``.

    Raises:
        ValueError: there are fewer than ``k`` samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def mean_over_problems(values: Sequence[float]) -> Estimate:
    """Mean of one number between 0 and 1 for each problem, with a bootstrap interval.

    Where all problems agree on 0 or 1 there is nothing to resample, and Wilson's interval for as
    many single tries is given, which is wider than the truth.
    """
    if not values:
        return NOTHING
    numbers = np.asarray(values)
    if (numbers == numbers[0]).all() and numbers[0] in (0.0, 1.0):
        return wilson(int(numbers.sum()), len(numbers))
    draw = np.random.default_rng(0)  # the same data give the same interval
    means = numbers[draw.integers(0, len(numbers), (_RESAMPLES, len(numbers)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(numbers.mean()), float(low), float(high))

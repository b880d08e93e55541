"""What comes of scoring one sample: a score, or a reason why there is none.

Outcome
|-- Score      a finite number
`-- Failed     the reward gave no verdict: it raised, died, or returned what is not a number
    `-- TimedOut   it was still at work when its time was over

A sample without a verdict is never given a zero: a broken reward must not look like a bad answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """The reward's verdict.

    Attributes:
        value: what is maximised: the weighted sum of the parts.
        parts: what each reward function said, unweighted, in the configuration's order.
    """

    value: float
    parts: tuple[float, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no verdict; the sample must not be trained on."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut(Failed):
    """There is no verdict within the deadline."""


Outcome = Score | Failed


def verdict(value: Any) -> Outcome:
    """What a reward function returned, as a score if it is a finite number.

    A string is refused although ``float("1.0")`` would accept it: it is a mistake in the reward.
    """
    if isinstance(value, str | bytes):
        return Failed(f"TypeError: a reward must return a number, not {value!r:.80}")
    try:
        number = float(value)
    except Exception as error:  # __float__ of whatever came back
        return failure(error)
    return Score(number) if math.isfinite(number) else Failed(f"not a finite number: {number}")


def failure(error: BaseException) -> Failed:
    """What a raised exception stands for."""
    reason = f"{type(error).__name__}: {error}"[:500]
    # Half a surrogate pair, as texts cut in the middle have, cannot be sent or written.
    return Failed(reason.encode("utf-8", "backslashreplace").decode())


def combine(names: Sequence[str], weights: Sequence[float], parts: Sequence[Outcome]) -> Outcome:
    """One outcome of several: the weighted sum, or the first failure if any part has none.

    Leaving out the part that failed would silently give this sample another scale than its peers.
    """
    for name, part in zip(names, parts, strict=True):
        if isinstance(part, Failed):
            return part if len(parts) == 1 else type(part)(f"{name}: {part.reason}")
    values = tuple(part.value for part in parts if isinstance(part, Score))
    return Score(math.fsum(w * v for w, v in zip(weights, values, strict=True)), values)

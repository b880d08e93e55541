"""Scores for samples: built-in rewards by name, or a function of the user's own.

A reward is one function, called once for each sample::

    def reward(*, prompt, text, reference, sample) -> float: ...

``prompt`` is what was asked (text or chat messages), ``text`` the decoded completion, ``reference``
the data's answer as a string or None, ``sample`` the whole :class:`shared.protocol.Sample`. In a
config it is ``numeric``, ``exact`` or ``path/to/file.py:function``.

What comes of scoring a sample is a typed outcome. An exception or a value that is not a finite
number is a :class:`Failed`, never a score of zero: a broken reward must not look like a bad answer.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from shared.protocol import Rollout, Sample
from trainer.errors import RewardError
from trainer.prompts import Messages, Task


class Reward(Protocol):
    """Any callable that scores one sample; higher is better."""

    def __call__(
        self, *, prompt: str | Messages, text: str, reference: str | None, sample: Sample
    ) -> float: ...


@dataclass(frozen=True, slots=True)
class Score:
    """The reward's verdict: a finite number."""

    value: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The reward gave no verdict; the sample must not be trained on."""

    reason: str


Outcome = Score | Failed

# A minus after a digit is an operator (12-5), and a comma counts only between thousands.
_NUMBER = re.compile(r"(?:(?<![0-9)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_number(text: str) -> Decimal | None:
    """The last decimal number in ``text``, or None. ``1,234.50`` and a real minus sign are read."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def numeric(*, text: str, reference: str | None, **_: object) -> float:
    """1 when the last number of the text equals the last number of the reference, else 0.

    Raises:
        ValueError: there is no number in the reference.
    """
    expected = last_number(reference or "")
    if expected is None:
        raise ValueError(f"the reference has no number: {reference!r:.80}")
    return float(last_number(text) == expected)


def exact(*, text: str, reference: str | None, **_: object) -> float:
    """1 when text and reference are the same apart from surrounding white space, else 0.

    Raises:
        ValueError: there is no reference.
    """
    if reference is None:
        raise ValueError("there is no reference")
    return float(text.strip() == reference.strip())


BUILT_IN: dict[str, Reward] = {"numeric": numeric, "exact": exact}


def load_reward(name: str) -> Reward:
    """The reward that a config names.

    Args:
        name: a key of ``BUILT_IN``, or ``path/to/file.py:function``. The file is executed.

    Raises:
        RewardError: no such built-in, file or function, or the file raises.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path, _, function = name.rpartition(":")
    if not path or not function:
        raise RewardError(
            f"reward {name!r} is unknown; "
            f"allowed: {', '.join(BUILT_IN)} or path/to/file.py:function"
        )
    found = getattr(_load_module(Path(path)), function, None)
    if not callable(found):
        raise RewardError(f"{path} has no function {function!r}")
    return cast(Reward, found)


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"{path} cannot be imported: {error!r}") from error
    return module


def score_sample(reward: Reward, task: Task, sample: Sample) -> Outcome:
    """Call the reward once; whatever goes wrong inside it becomes a :class:`Failed`."""
    if sample.text is None:
        return Failed("the sample has no text")
    try:
        value = _as_float(
            reward(prompt=task.prompt, text=sample.text, reference=task.reference, sample=sample)
        )
    except Exception as error:  # a user's code: anything may come out of it
        return Failed(f"{type(error).__name__}: {error}")
    return Score(value) if math.isfinite(value) else Failed(f"not a finite number: {value}")


def _as_float(value: Any) -> float:
    # float("1.0") would succeed, but a string is a mistake in the reward, not a number.
    if isinstance(value, str | bytes):
        raise TypeError(f"a reward must return a number, not {value!r:.80}")
    return float(value)


def score_rollout(reward: Reward, tasks: Sequence[Task], rollout: Rollout) -> list[list[Outcome]]:
    """Outcomes by group and sample, in the rollout's order: ``outcomes[group][sample]``."""
    return [
        [score_sample(reward, task, sample) for sample in group.samples]
        for task, group in zip(tasks, rollout.groups, strict=True)
    ]

"""What rewards are given, as plain data that can be sent to a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.protocol import Sample


@dataclass(frozen=True, slots=True)
class Part:
    """One reward of a run.

    Attributes:
        name: for metrics and messages.
        function: a key of ``BUILT_IN``, ``http``, or ``path/to/file.py:function``.
        weight: factor of its value in the sum.
        options: keyword arguments for every call.
    """

    name: str
    function: str
    weight: float
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """What a reward function gets to see of one sample."""

    prompt: Any
    text: str
    reference: str | None
    sample: Sample

"""How a bench times something, and how it tells what it found: one JSON line for each result."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

median = statistics.median


def seconds(work: Callable[[], object]) -> float:
    """By the clock, of some work once."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Median of the ratios within each repeat."""
    return median(a / b for a, b in zip(these, those, strict=True))


def report(what: str, **found: Any) -> None:
    """One result as one line; floats have five significant digits."""
    print(json.dumps({"bench": what, **_rounded(found)}), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value

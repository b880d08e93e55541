"""How a bench tells its results: one JSON line each."""

from __future__ import annotations

import json
import statistics
from typing import Any

median = statistics.median


def report(what: str, **numbers: Any) -> None:
    """One result as one line."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"bench": what, **rounded}), flush=True)

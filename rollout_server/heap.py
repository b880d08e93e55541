"""Keeps Python's garbage collector from stopping the event loop.

Reference counts free nearly everything at once; the collector is there for cycles. A full
collection walks through every list and dict of the process while nothing else runs, and most of
these belong to libraries and stay for good. Large requests make it think that it is time for one.
"""

from __future__ import annotations

import gc

_THRESHOLDS = (2_000, 10, 2_500)
"""New objects until the youngest are looked through, how often that happens until the middle-aged
are, and how often that until all are: about once in fifty million new objects."""


def freeze_heap() -> None:
    """Never look again at what is there now, and seldom at everything else."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)

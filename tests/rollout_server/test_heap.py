"""What the collector looks at, and how often."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from rollout_server.heap import freeze_heap


class Node:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def frozen() -> Iterator[None]:
    thresholds = gc.get_threshold()
    before = gc.get_freeze_count()
    freeze_heap()
    assert gc.get_freeze_count() > before
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("frozen")
def test_cycles_made_later_are_still_found() -> None:
    found = weakref.ref(Node())
    assert found() is not None
    gc.collect()
    assert found() is None


@pytest.mark.usefixtures("frozen")
def test_a_large_request_starts_no_full_collection() -> None:
    before = gc.get_stats()[2]["collections"]
    request = [[token] for token in range(500_000)]
    assert len(request) == 500_000
    assert gc.get_stats()[2]["collections"] == before
    assert gc.get_stats()[0]["collections"] > 0

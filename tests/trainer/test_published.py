from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.protocol import Sample, Span
from trainer.errors import MismatchError
from trainer.published import Published

OLD, NEW = "d" * 32, "e" * 32


def test_a_sample_is_as_old_as_its_oldest_token(make_sample: Callable[..., Sample]) -> None:
    published = Published({OLD: 3})
    published.note(NEW, 5)
    # Versions are a server's own: this one has restarted since, and counts from 1 again.
    spans = (Span(9, OLD, 0, 1), Span(1, NEW, 1, 2))
    mixed = replace(make_sample(), spans=spans)
    assert published.staleness(mixed, 6) == 2
    assert published.staleness(replace(mixed, spans=spans[1:]), 6) == 0
    assert published.of([mixed]) == {OLD: 3, NEW: 5}


def test_weights_that_a_step_did_not_change_are_not_stale(
    make_sample: Callable[..., Sample],
) -> None:
    published = Published()
    for step in range(4):
        published.note(OLD, step)
    assert published.staleness(make_sample(), 4) == 0


def test_a_single_token_of_unknown_weights_is_refused(make_sample: Callable[..., Sample]) -> None:
    published = Published({OLD: 4})
    spans = (Span(4, OLD, 0, 1), Span(5, NEW, 1, 2))
    with pytest.raises(MismatchError, match=r"sampled from version 5 \(e+\)"):
        published.staleness(replace(make_sample(), spans=spans), 5)

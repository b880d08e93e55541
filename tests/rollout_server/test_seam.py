"""Stop strings that lie across the seam between a completion's beginning and its rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engine import Completion, VersionSpan
from rollout_server.seam import cut_at_stop


def decode(ids: Sequence[int]) -> str:
    """One id is one byte."""
    return bytes(ids).decode("utf-8", "replace")


def completion(ids: Sequence[int]) -> Completion:
    half = len(ids) // 2
    spans = (VersionSpan(3, 0, half), VersionSpan(4, half, len(ids)))
    return Completion(list(ids), [-float(i) for i in range(len(ids))], "length", spans)


def cut(begun: bytes, added: bytes, *stops: str) -> Completion:
    return cut_at_stop(begun, completion(added), stops, decode)


@pytest.mark.parametrize(
    ("begun", "added", "stop", "left"),
    [
        (b"ab<", b"/end>xyz", "</end>", b"/end>"),
        (b"ab</end", b">xyz", "</end>", b">"),
        (b"a", b"bcab", "ab", b"b"),
        ("x\u20ac".encode()[:2], "\u20ac".encode()[1:] + b"yz", "x\u20ac", "\u20ac".encode()[1:]),
        ("\u20ac".encode()[:1], "\u20ac".encode()[1:] + b"yz", "\u20ac", "\u20ac".encode()[1:]),
        (b"ab\n", b"\nQ", "\n\n", b"\n"),
    ],
)
def test_a_stop_string_that_was_split_ends_the_completion(
    begun: bytes, added: bytes, stop: str, left: bytes
) -> None:
    made = cut(begun, added, stop)
    assert bytes(made.token_ids) == left
    assert made.finish_reason == "stop"
    assert len(made.logprobs) == len(left)
    assert made.spans[-1].end == len(left)
    assert all(span.start < span.end for span in made.spans)


@pytest.mark.parametrize(
    ("begun", "added", "stops"),
    [
        (b"abc", b"defghi", ["cX", "Xd"]),
        (b"</end>", b"more text", ["</end>"]),  # whole before the seam: that is the caller's affair
        (b"abc", b"defghi", []),
        (b"abc", b"", ["cd"]),
        (b"ab\xff\xff", b"\xfe\xfdcd", ["bc"]),
    ],
)
def test_what_does_not_lie_across_the_seam_changes_nothing(
    begun: bytes, added: bytes, stops: list[str]
) -> None:
    whole = completion(added)
    assert cut_at_stop(begun, whole, stops, decode) is whole


@given(
    st.text("ab\u20ac", max_size=12),
    st.integers(0, 40),
    st.text("ab\u20ac", min_size=1, max_size=4),
)
def test_the_parts_end_where_the_whole_would_have(text: str, at: int, stop: str) -> None:
    """Wherever a completion is split, what is left is what stopping in one go would have left."""
    ids = text.encode()
    first = next((n for n in range(len(ids) + 1) if stop in decode(ids[:n])), len(ids))
    split = at % (len(ids) + 1)
    if split >= first:
        return  # it would have ended before the split
    # The engine by itself sees the stop strings that lie behind the seam.
    seen = next(
        (n for n in range(len(ids) - split + 1) if stop in own_text(ids, split, n)),
        len(ids) - split,
    )
    made = cut(ids[:split], ids[split : split + seen], stop)
    assert split + len(made.token_ids) == first


def own_text(ids: bytes, split: int, length: int) -> str:
    """Text that the engine takes for that of its own tokens: what they add to the text before."""
    before = decode(ids[:split]).rstrip("\ufffd")
    return decode(ids[: split + length])[len(before) :]

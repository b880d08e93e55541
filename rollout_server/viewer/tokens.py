"""The text of each token of a completion, as it stands in the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_HALF_A_CHARACTER = "\ufffd"
"""What the bytes of a character that is not complete are decoded to."""
_MOST_IN_ONE_PIECE = 8
"""Tokens after which a character that is still not complete never will be."""
_CONTEXT = 4
"""Tokens before a piece that may change how it is written, e.g. its leading space."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``[start, end)``, which write whole characters together; mostly one token."""

    start: int
    end: int
    text: str


def pieces(ids: Sequence[int], decode: Decode) -> list[Piece]:
    """Cut a completion into the shortest pieces that are whole characters.

    Args:
        decode: text of ids, with special tokens.
    """
    found: list[Piece] = []
    start = 0
    before, written = ids[:0], 0
    for end in range(1, len(ids) + 1):
        text = decode([*before, *ids[start:end]])[written:]
        whole = not text.endswith(_HALF_A_CHARACTER)
        if whole or end == len(ids) or end - start == _MOST_IN_ONE_PIECE:
            found.append(Piece(start, end, text))
            start = end
            before = ids[max(0, start - _CONTEXT) : start]
            written = len(decode(before))
    return found

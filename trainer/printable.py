"""Text of models, made safe to look at: every character that cannot be seen is named instead."""

from __future__ import annotations

from collections.abc import Iterator

_LAYOUT = "\n\t"


def parts(text: str) -> Iterator[tuple[str, bool]]:
    """Runs of characters, and whether each can be seen.

    Controls, format characters (which turn the direction of text, or have no width), unassigned
    and private ones cannot, as Python's ``str.isprintable`` has it; line breaks and tabs stay.
    """
    start = 0
    for at, char in enumerate(text):
        if not (char.isprintable() or char in _LAYOUT):
            if at > start:
                yield text[start:at], True
            yield char, False
            start = at + 1
    if start < len(text):
        yield text[start:], True


def printable(text: str) -> str:
    """For a terminal, which a model must not be able to drive: ``\\x1b`` and the like."""
    return "".join(
        part if seen else part.encode("unicode_escape").decode() for part, seen in parts(text)
    )

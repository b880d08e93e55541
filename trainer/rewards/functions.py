"""The built-in reward functions. Each is written as a user's own would be.

Options are keyword arguments after the four that every reward gets. Where a reference is needed
and missing or unreadable, the function raises: that is a fault of the data, not a wrong answer.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from shared.protocol import Sample

# A minus after a digit is an operator (12-5), and a comma counts only between thousands.
_NUMBER = re.compile(r"(?:(?<![0-9)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_number(text: str) -> Decimal | None:
    """The last decimal number in ``text``, or None. ``1,234.50`` and a real minus sign are read."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def numeric(*, text: str, reference: str | None, tolerance: float = 0.0, **_: object) -> float:
    """1 when the last number of the text equals the last number of the reference, else 0.

    Args:
        tolerance: how far apart they may be, as a share of the reference's magnitude.

    Raises:
        ValueError: there is no number in the reference.
    """
    expected, found = last_number(reference or ""), last_number(text)
    if expected is None:
        raise ValueError(f"the reference has no number: {reference!r:.80}")
    if found is None:
        return 0.0
    return float(abs(found - expected) <= abs(expected) * Decimal(str(tolerance)))


def exact(*, text: str, reference: str | None, **_: object) -> float:
    """1 when text and reference are the same apart from surrounding white space, else 0.

    Raises:
        ValueError: there is no reference.
    """
    if reference is None:
        raise ValueError("there is no reference")
    return float(text.strip() == reference.strip())


def equivalent(*, text: str, reference: str | None, **_: object) -> float:
    r"""1 when the answers are mathematically equal (``\frac12`` and 0.5), by math-verify, else 0.

    The library's own limits of time are off: they need signals, and turn into a silent zero where
    there are none. The worker's deadline holds instead.

    Raises:
        ValueError: the reference is not mathematics.
    """
    from math_verify import verify

    expected = _mathematics(_delimited(reference or ""))
    if not expected:
        raise ValueError(f"the reference is not mathematics: {reference!r:.80}")
    found = _mathematics(text)
    return float(verify(expected, found, timeout_seconds=None, raise_on_error=True))


def _delimited(reference: str) -> str:
    r"""A reference that is a bare formula, such as ``2\sqrt{2}``, between dollar signs.

    Without them the library reads its first number alone. With words it is a text with an answer.
    """
    words = re.search(r"[A-Za-z]{3}", re.sub(r"\\[A-Za-z]+", "", reference))
    plain = "$" in reference or r"\boxed" in reference or _NUMBER.fullmatch(reference.strip())
    return reference if words or plain or not reference.strip() else f"${reference}$"


def _mathematics(text: str) -> list[Any]:
    from math_verify import parse

    # It warns once for each of its functions that a deadline is needed; there is one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def layout(*, text: str, tags: tuple[str, ...] = ("think", "answer"), **_: object) -> float:
    """1 when the text is the given XML-like tags in order, each once, and nothing else, else 0."""
    counts = [(text.count(f"<{tag}>"), text.count(f"</{tag}>")) for tag in tags]
    in_order = r"\s*".join(rf"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags)
    whole = re.fullmatch(rf"\s*{in_order}\s*", text, re.DOTALL)
    return float(whole is not None and all(count == (1, 1) for count in counts))


def regex(*, text: str, pattern: str, whole: bool = False, **_: object) -> float:
    """1 when ``pattern`` is found in the text (with ``whole``: matches all of it), else 0."""
    compiled = _compiled(pattern)
    return float(bool(compiled.fullmatch(text) if whole else compiled.search(text)))


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def length_penalty(*, sample: Sample, max_tokens: int, cache: int, **_: object) -> float:
    """0 up to ``max_tokens - cache`` completion tokens, then falling linearly to -1.

    DAPO's soft overlong punishment (2503.14476, equation 13).
    """
    return overlong_penalty(len(sample.completion_ids), max_tokens=max_tokens, cache=cache)


def overlong_penalty(length: int, *, max_tokens: int, cache: int) -> float:
    """Between 0 and -1, see :func:`length_penalty`; lengths in tokens."""
    return -min(max((length - (max_tokens - cache)) / cache, 0.0), 1.0)

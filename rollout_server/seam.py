"""Completions that were begun before: their text, and stop strings that lie across the seam.

The engine sees the beginning as part of the prompt. It looks for stop strings in what it adds, so
those that begin before the seam are looked for here, once it has finished. Tokens behind one are
dropped: none of those before depend on them, so the sample is the one that stopping there gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout_server.engine import Completion

_HALF_A_CHARACTER = "\ufffd"
"""What the bytes of a character that is not complete are decoded to."""

Decode = Callable[[Sequence[int]], str]


def cut_at_stop(
    begun: Sequence[int], added: Completion, stops: Sequence[str], decode: Decode
) -> Completion:
    """The completion up to the token that completes a stop string begun before the seam, if any.

    Args:
        begun: ids before the seam.
        added: what the engine went on with.
        stops: strings that end a completion.
        decode: text of ids.
    """
    # Half a character at the seam becomes a whole one, which is then partly of the new tokens.
    seam = len(decode(begun).rstrip(_HALF_A_CHARACTER))
    reach = max(map(len, stops), default=0)
    for length in range(1, len(added.token_ids) + 1):
        text = decode([*begun, *added.token_ids[:length]])
        if any(text.find(stop, max(0, seam - len(stop) + 1)) >= 0 for stop in stops):
            return _cut(added, length)
        if len(text.rstrip(_HALF_A_CHARACTER)) >= seam + reach:
            break  # from here on the engine's own search sees all of a stop string
    return added


def _cut(completion: Completion, length: int) -> Completion:
    spans = (replace(s, end=min(s.end, length)) for s in completion.spans if s.start < length)
    return Completion(
        completion.token_ids[:length], completion.logprobs[:length], "stop", tuple(spans)
    )

"""How fast the engine gets work done, so that "try again later" can say when."""

from __future__ import annotations

import math
from collections.abc import Callable

_TIME_CONSTANT_S = 30.0
"""Work that ended this many busy seconds ago counts 1/e of what ends now."""
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 3600.0


class Throughput:
    """Samples and tokens that end per second of busy time, as an exponentially decayed mean.

    Time in which nothing runs does not count: an idle server is not a slow one.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._then = clock()
        self._running = 0
        self._busy_s = self._samples = self._tokens = 0.0

    def start(self, samples: int) -> None:
        """Samples begin to run."""
        self._advance()
        self._running += samples

    def end(self, samples: int, tokens: int, *, finished: bool) -> None:
        """Samples no longer run; what was cancelled says nothing about the engine's speed."""
        self._advance()
        self._running -= samples
        if finished:
            self._samples += samples
            self._tokens += tokens

    def seconds_for_samples(self, samples: int) -> float:
        """How long it takes until that many have ended, within bounds.

        Before any has, as long as the first ones have been running for.
        """
        return self._seconds_for(samples, self._samples)

    def seconds_for_tokens(self, tokens: int) -> float:
        """The same for tokens."""
        return self._seconds_for(tokens, self._tokens)

    def _seconds_for(self, wanted: int, ended: float) -> float:
        self._advance()
        wait = self._busy_s * wanted / ended if ended else self._busy_s
        return min(max(math.ceil(wait), _MIN_WAIT_S), _MAX_WAIT_S)

    def _advance(self) -> None:
        now = self._clock()
        elapsed, self._then = now - self._then, now
        if self._running:
            kept = math.exp(-elapsed / _TIME_CONSTANT_S)
            self._samples *= kept
            self._tokens *= kept
            self._busy_s = self._busy_s * kept + (1 - kept) * _TIME_CONSTANT_S

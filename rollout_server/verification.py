"""What is looked at in a channel's buffer before it is loaded: digests, and values not finite.

The look begins while the buffer is still being filled, so that little is left to do at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rollout_server.tensor_check import TensorLook
from shared.channel import Layout

_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        hashes: XXH3-128 of each tensor's bytes, in hex, in the layout's order.
        not_finite: names of the tensors with NaN or infinite values.
    """

    hashes: list[str]
    not_finite: list[str]


class Verification(Protocol):
    """Looks at one buffer, again and again. One look at a time."""

    def begin(self) -> None:
        """Forget what was seen: the buffer is filled anew."""
        ...

    def arrived(self, end: int) -> None:
        """So many bytes of it are there; returns before they have been looked at."""
        ...

    def finished(self) -> Verdict:
        """What was found, once all bytes are there."""
        ...

    def close(self) -> None:
        """Look at nothing more."""
        ...


class HostVerification:
    """In the host's memory, by threads of its own.

    Args:
        flat: the buffer.
        layout: of it.
    """

    def __init__(self, flat: Tensor, layout: Layout) -> None:
        self._bytes, self._layout = flat.numpy().data, layout
        self._threads = ThreadPoolExecutor(_THREADS, "tito-verify")
        self._pending: list[Future[None]] = []
        self.begin()

    def begin(self) -> None:
        wait(self._pending)  # a transfer that broke off may have left some
        self._looks = [TensorLook(spec, spec.dtype) for spec in self._layout.specs]
        self._pending = []
        self._next, self._seen = 0, 0

    def arrived(self, end: int) -> None:
        for index, low, high in self._parts(self._seen, end):
            begun = self._pending[-1] if low > self._layout.offsets[index] else None
            self._pending.append(self._threads.submit(self._look, index, low, high, begun))
        self._seen = end

    def _look(self, index: int, low: int, high: int, begun: Future[None] | None) -> None:
        if begun is not None:
            begun.result()  # a tensor is hashed from its first byte to its last
        self._looks[index].update(self._bytes[low:high])

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The tensors that have some of these bytes, and which."""
        layout = self._layout
        while self._next < len(layout.specs):
            low = layout.offsets[self._next]
            high = low + layout.specs[self._next].nbytes
            if low < end:
                yield self._next, max(low, start), min(high, end)
            if high > end:
                return
            self._next += 1

    def finished(self) -> Verdict:
        for look in self._pending:
            look.result()
        results = [look.result() for look in self._looks]
        broken = [result.problem.where for result in results if result.problem is not None]
        return Verdict([result.hash for result in results], broken)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

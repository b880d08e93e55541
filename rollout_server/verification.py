"""What is looked at in a channel's buffer before it is loaded: digests, and values not finite.

The look begins while the buffer is still being filled, so that little is left to do at the end.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rollout_server.digest_pieces import DIGEST_BYTES, Pieces
from rollout_server.tensor_check import check_piece
from shared.channel import Layout

_THREADS = min(4, os.cpu_count() or 1)
_PIECES_AT_ONCE = 32  # worth a thread's while


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        hashes: of each tensor's bytes, in the layout's order.
        not_finite: names of the tensors with NaN or infinite values.
    """

    hashes: list[str]
    not_finite: list[str]

    @classmethod
    def of(cls, layout: Layout, pieces: Pieces, digests: bytes, broken: set[int]) -> Verdict:
        """From the digests of all pieces, and which tensors are not finite."""
        hashes = pieces.hashes(digests, len(layout.specs))
        return cls(hashes, [layout.specs[index].name for index in sorted(broken)])


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
        self._pieces = Pieces.of(layout)
        self._digests = bytearray(DIGEST_BYTES * len(self._pieces.ends))
        self._threads = ThreadPoolExecutor(_THREADS, "tito-verify")
        self._pending: list[Future[set[int]]] = []
        self._next = 0

    def begin(self) -> None:
        wait(self._pending)  # a transfer that broke off may have left some
        self._pending, self._next = [], 0

    def arrived(self, end: int) -> None:
        first, self._next = self._next, self._pieces.complete(end)
        for low in range(first, self._next, _PIECES_AT_ONCE):
            high = min(low + _PIECES_AT_ONCE, self._next)
            self._pending.append(self._threads.submit(self._look, low, high))

    def _look(self, low: int, high: int) -> set[int]:
        """Digests of some pieces; the tensors among theirs that are not finite."""
        broken = set()
        for row in range(low, high):
            tensor, start, end = self._pieces.row(row)
            dtype = self._layout.specs[tensor].dtype
            digest, is_finite = check_piece(self._bytes[start:end], dtype)
            self._digests[DIGEST_BYTES * row : DIGEST_BYTES * (row + 1)] = digest
            if not is_finite:
                broken.add(tensor)
        return broken

    def finished(self) -> Verdict:
        broken = set().union(*(look.result() for look in self._pending))
        return Verdict.of(self._layout, self._pieces, bytes(self._digests), broken)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

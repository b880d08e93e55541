"""Stopping a run in good order: the first Ctrl-C or SIGTERM is a request, the second an end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


@dataclass
class Stop:
    """Whether somebody wants the run to stop."""

    requested: bool = False


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Until the block ends, a first signal is only noted; a second raises KeyboardInterrupt.

    In another thread than the main one, where there are no signals, nothing is ever requested.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        # Not through sys.stderr: the signal may have come in the middle of a print.
        os.write(_STDERR, b"\nstopping after this step; once more to quit at once\n")

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

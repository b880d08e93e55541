"""Work beside the thread that trains."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a thread of its own; the future has what it returns or raises.

    The thread is a daemon, unlike those of an executor: a process that is told to quit at once does
    not wait for answers that nobody will read.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # whoever waits for the future shall see it
            future.set_exception(error)
        else:
            future.set_result(result)

    # What is asked there belongs to the span under which it was asked for.
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return future

"""Work beside the thread that trains."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
_LOOK_S = 0.25


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


def wait_for(answers: Iterable[Future[Any]], *, meanwhile: Callable[[], None]) -> None:
    """Wait for all answers, and do ``meanwhile`` every now and then.

    Raises:
        Exception: what the first that failed raised, or ``meanwhile``.
    """
    missing = set(answers)
    while missing:
        meanwhile()
        done, missing = wait(missing, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()

"""Inside the engine's process: pause, load, stamp and resume by one call.

Each call from the server waits for two processes to wake, and generation stands still meanwhile.
What is loaded lies in the workers' buffers already, so the server need not be asked in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

SWITCH = "tito_switch"
"""The call's name in the engine's process."""

Stages = dict[str, float]
"""Seconds that each stage took."""


def allow_switch() -> None:
    """Teach the engine of this process the call."""
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, SWITCH, _switch)


def _switch(
    engine: Any, mode: str, buffer: str, version: int, go_on: bool
) -> Stages | Future[Stages]:
    """Pause, load what a buffer holds, label tokens from now on, resume.

    If anything fails, the engine stays paused.

    Args:
        engine: vLLM's ``EngineCoreProc``.
        mode: of the pause; one that ends by itself, since nobody can call this off.
        buffer: its name.
        version: of what is in it.
        go_on: whether to resume at all.

    Returns:
        Seconds of ``pause``, ``load`` and ``resume``; later, if a step is under way.
    """
    begun = time.perf_counter()

    def load() -> Stages:
        idle = time.perf_counter()
        engine.collective_rpc("tito_buffer_load", kwargs={"name": buffer})
        engine.set_weight_version(str(version))
        loaded = time.perf_counter()
        if go_on:
            _resume(engine)
        resumed = time.perf_counter()
        return {"pause": idle - begun, "load": loaded - idle, "resume": resumed - loaded}

    paused = engine.pause_scheduler(mode, clear_cache=True)
    if paused is None:
        return load()
    done: Future[Stages] = Future()
    paused.add_done_callback(partial(_then, load, done))
    return done


def _then(load: Callable[[], Stages], done: Future[Stages], paused: Future[None]) -> None:
    try:
        paused.result()
        done.set_result(load())
    except Exception as error:  # the server shall see it
        done.set_exception(error)


def _resume(engine: Any) -> None:
    from vllm.v1.engine import EngineCoreRequestType

    engine.resume_scheduler()
    # Its loop tells of the end of a pause just before it waits for a request, whatever there is
    # to do by then.
    engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

"""The one call that pauses, loads, stamps and resumes, in vLLM's own loop over calls and steps.

Scheduler, workers and steps are stand-ins; that nothing is generated meanwhile, and that the loop
goes on afterwards, is vLLM's code and ours.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from rollout_server.switching import SWITCH, allow_switch
from tests.rollout_server.support import eventually


class Scheduler:
    """It has one more step to schedule, unless it is paused."""

    pause_state = PauseState.UNPAUSED
    steps_left = 1

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_requests(self) -> bool:
        return self.steps_left > 0 and self.pause_state is PauseState.UNPAUSED


class Core(EngineCoreProc):  # type: ignore[misc]
    """vLLM's engine process without a model.

    Args:
        steps_under_way: that have to end before it is idle.

    Attributes:
        events: what it has done, in order.
        load_error: raised by loads.
    """

    def __init__(self, *, steps_under_way: int) -> None:
        self.events: list[str] = []
        self.load_error: Exception | None = None
        self.scheduler = Scheduler()
        self.model_executor = SimpleNamespace(collective_rpc=self._called)
        self.input_queue: Any = queue.Queue()
        self.output_queue: Any = queue.Queue()
        self.aborts_queue: Any = queue.Queue()
        self.batch_queue: Any = deque(range(steps_under_way))
        self.engines_running, self.process_input_queue_block = False, True
        self.shutdown_state = EngineShutdownState.RUNNING
        self._idle_state_callbacks: list[Any] = []

    def _called(self, method: str, *given: Any) -> list[None]:
        if method == "tito_buffer_load":
            self.events.append(f"load {given[-1]['name']}")
            if self.load_error is not None:
                raise self.load_error
        return [None]

    def _reset_caches(self, *_: Any, **__: Any) -> None:
        self.events.append("idle")

    def set_weight_version(self, weight_version: str) -> None:
        self.events.append(f"stamp {weight_version}")

    def step(self) -> None:
        self.events.append("step")
        if self.batch_queue:
            self.batch_queue.pop()
        else:
            self.scheduler.steps_left -= 1

    def loop(self) -> None:
        """As ``run_busy_loop``."""
        while self.is_running():
            self._process_input_queue()
            if self.has_work():
                self.step()

    def stop(self) -> None:
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))


@contextlib.contextmanager
def asked(core: Core, *, go_on: bool = True) -> Iterator[Any]:
    """The answer to a switch; the loop goes on inside."""
    allow_switch()
    call = (0, 1, SWITCH, ["keep", "buffer", 7, go_on])
    core.input_queue.put((EngineCoreRequestType.UTILITY, call))
    thread = threading.Thread(target=core.loop, daemon=True)
    thread.start()
    try:
        yield core.output_queue.get(timeout=10)[1].utility_output
    finally:
        core.stop()
        thread.join(10)


@pytest.mark.parametrize("under_way", [0, 2])
def test_steps_end_before_the_load_and_go_on_after_the_stamp(under_way: int) -> None:
    core = Core(steps_under_way=under_way)
    expected = [*["step"] * under_way, "idle", "load buffer", "stamp 7", "step"]
    with asked(core) as answer:
        eventually(lambda: core.events == expected)
    assert answer.failure_message is None
    assert list(answer.result.result) == ["pause", "load", "resume"]


@pytest.mark.parametrize("under_way", [0, 2])
def test_a_load_that_fails_leaves_the_engine_paused_and_the_version_as_it_was(
    under_way: int,
) -> None:
    core = Core(steps_under_way=under_way)
    core.load_error = RuntimeError("some parameters differ")
    with asked(core) as answer:
        assert "some parameters differ" in answer.failure_message
    assert core.events == [*["step"] * under_way, "idle", "load buffer"]
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL


def test_an_engine_that_somebody_has_paused_stays_so() -> None:
    core = Core(steps_under_way=1)
    with asked(core, go_on=False) as answer:
        assert answer.failure_message is None
    assert core.events == ["step", "idle", "load buffer", "stamp 7"]

"""Functions that hang, crash, eat memory or wait: what becomes of their samples and of others'."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.protocol import Sample
from trainer.config import RewardConfig
from trainer.prompts import Task
from trainer.rewards import Failed, Outcome, Score, TimedOut, open_reward

ScoreTexts = Callable[..., list[Outcome]]

FUNCTIONS = """
import asyncio, ctypes, os, random, time
import numpy as np

def by_text(*, text, **_):
    if text == "hang":
        while True: pass
    if text == "hang in C":
        ctypes.PyDLL(None).sleep(1000)      # without letting go of the interpreter
    if text == "exit": os._exit(3)
    if text == "crash": ctypes.string_at(0)
    if text == "memory": bytearray(1 << 40)
    if text == "much memory": return len([bytearray(1 << 20) for _ in range(100)])
    if text == "raise": raise KeyError("x")
    if text == "surrogate": raise KeyError("\\ud800")
    if text == "quit": raise SystemExit(1)
    return len(text)

async def waiting(*, text, **_):
    if text == "hang": await asyncio.sleep(1000)
    if text == "block": time.sleep(1000)
    if text == "exit": os._exit(3)
    if text == "own": raise TimeoutError("of my own")
    await asyncio.sleep(0.2)
    return len(text)

def drawn(**_):
    return random.random() + np.random.rand()

def process(**_):
    return os.getpid()

def environment(*, text, **_):
    return float(os.environ["FOR_REWARDS"])
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


def test_whatever_goes_wrong_costs_one_sample(file: Path, score_texts: ScoreTexts) -> None:
    texts = [
        "a",
        "hang",
        "bb",
        "exit",
        "crash",
        "memory",
        "much memory",
        "raise",
        "quit",
        "surrogate",
        "ccc",
    ]
    outcomes = score_texts(
        texts, function=f"{file}:by_text", timeout_s=8.0, workers=2, memory_mb=64
    )
    late = TimedOut("no verdict within 8 s (reward.timeout_s)")
    died = "the worker died while it scored this sample"
    assert outcomes == [
        Score(1.0),
        late,
        Score(2.0),
        Failed(f"{died} (exit status 3)"),
        Failed(f"{died} (signal {signal.SIGSEGV.value})"),
        Failed("MemoryError: "),
        Failed("MemoryError: "),
        Failed("KeyError: 'x'"),
        Failed("SystemExit: 1"),
        Failed(r"KeyError: '\ud800'"),
        Score(3.0),
    ]


def test_a_function_that_never_lets_go_is_ended(file: Path, score_texts: ScoreTexts) -> None:
    first, second = score_texts(
        ["hang in C", "a"], function=f"{file}:by_text", timeout_s=1.0, workers=1
    )
    assert isinstance(first, TimedOut)
    assert second == Score(1.0)


def test_asynchronous_functions_wait_together(file: Path, score_texts: ScoreTexts) -> None:
    texts = [*["four"] * 60, "hang", "own"]
    start = time.monotonic()
    outcomes = score_texts(texts, function=f"{file}:waiting", timeout_s=3.0, workers=1)
    # One after the other they would wait for 12 seconds, and as long again for "hang".
    assert time.monotonic() - start < 12
    assert outcomes[:60] == [Score(4.0)] * 60
    assert outcomes[60:] == [
        TimedOut("no verdict within 3 s (reward.timeout_s)"),
        Failed("TimeoutError: of my own"),
    ]


def test_one_that_blocks_the_others_of_its_chunk_is_found(
    file: Path, score_texts: ScoreTexts
) -> None:
    outcomes = score_texts(
        ["a", "block", "exit", "bb"], function=f"{file}:waiting", timeout_s=1.0, workers=2
    )
    assert outcomes[0] == Score(1.0)
    assert isinstance(outcomes[1], TimedOut)
    assert outcomes[2] == Failed("the worker died while it scored this sample (exit status 3)")
    assert outcomes[3] == Score(2.0)


def test_synchronous_and_asynchronous_parts_mix(file: Path, score_texts: ScoreTexts) -> None:
    functions = [{"function": f"{file}:waiting"}, {"function": f"{file}:by_text", "weight": 10}]
    assert score_texts(["a", "raise"], functions=functions) == [
        Score(11.0),
        Failed("by_text: KeyError: 'x'"),
    ]


def test_outcomes_do_not_depend_on_who_scored_what(
    file: Path, make_sample: Callable[..., Sample]
) -> None:
    pairs = [(Task("q", None), make_sample(completion=(n, n + 1))) for n in range(40)]

    def score(workers: int) -> list[Outcome]:
        with open_reward(RewardConfig(function=f"{file}:drawn", workers=workers)) as reward:
            return reward.score(pairs)

    once = score(1)
    assert once == score(3)
    assert len({str(outcome) for outcome in once}) == 40


def test_workers_are_kept_from_call_to_call(file: Path, make_sample: Callable[..., Sample]) -> None:
    pair = (Task("q", None), make_sample())
    with open_reward(RewardConfig(function=f"{file}:process", workers=1)) as reward:
        first, second = reward.score([pair]), reward.score([pair])
    assert first == second
    assert first != [Score(os.getpid())]


def test_functions_see_the_environment(
    file: Path, score_texts: ScoreTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOR_REWARDS", "3")
    assert score_texts(["a"], function=f"{file}:environment") == [Score(3.0)]


PARENT = """
import sys, threading, time
from trainer.config import RewardConfig
from trainer.rewards import open_reward
from trainer.prompts import Task
from tests.trainer.conftest import _sample

reward = open_reward(RewardConfig(function=sys.argv[1] + ":by_text", timeout_s=1000))
(worker,) = reward.pool._workers
pair = (Task("q", None), _sample(text="hang in C"))
threading.Thread(target=reward.score, args=([pair],), daemon=True).start()
while not worker.chunk:
    time.sleep(0.01)
print(worker.pid, flush=True)
time.sleep(1000)
"""


def test_workers_end_with_a_parent_that_is_killed(file: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
        parent.kill()
    deadline = time.monotonic() + 30
    while _alive(worker):
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

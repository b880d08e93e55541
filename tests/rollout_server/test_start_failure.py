"""An engine that does not start: the reason comes from its process, and with it what to do."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_server.__main__ import _tell
from rollout_server.settings import ServerSettings
from rollout_server.start_failure import (
    EngineDidNotStart,
    advice_for,
    keep_reason,
    reason_told,
)

SETTINGS = ServerSettings(model="m")
TOO_SMALL = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
    "initializing the engine."
)
PROCESS = """
import logging
from rollout_server.start_failure import keep_reason

keep_reason()
log = logging.getLogger("vllm.v1.engine.core")
log.error("an error before")
for message, error in [
    ("lost", KeyError("unrelated")),
    ("WorkerProc failed to start.", ValueError("no\\nmemory")),
    ("EngineCore failed to start.", RuntimeError("see above")),
]:
    try:
        raise error
    except Exception:
        log.exception(message)
"""


@pytest.fixture(autouse=True)
def vllm_log() -> Iterator[logging.Logger]:
    log = logging.getLogger("vllm")
    before = [*log.handlers]
    yield log
    log.handlers[:] = before


def test_the_first_reason_of_the_engines_processes_is_told() -> None:
    def start() -> None:
        subprocess.run([sys.executable, "-c", PROCESS], check=True, capture_output=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(EngineDidNotStart) as caught, reason_told(SETTINGS):
        start()
    assert str(caught.value) == "ValueError: no memory"
    assert str(caught.value.__cause__).startswith("Engine core")


def test_advice_about_settings_that_the_server_does_not_have_is_left_out() -> None:
    with pytest.raises(EngineDidNotStart) as caught, reason_told(SETTINGS):
        raise ValueError(TOO_SMALL)
    assert str(caught.value) == "ValueError: No available memory for the cache blocks."
    assert caught.value.advice.startswith("lower --max-model-len")


def test_without_one_it_is_what_was_raised() -> None:
    with pytest.raises(EngineDidNotStart, match=r"^ValueError: bad flag$"), reason_told(SETTINGS):
        raise ValueError("bad flag")


def test_a_process_that_is_nobodys_keeps_nothing(vllm_log: logging.Logger) -> None:
    before = len(vllm_log.handlers)
    with reason_told(SETTINGS):
        pass
    keep_reason()
    assert len(vllm_log.handlers) == before


# The reasons are vLLM's, torch's and the kernel's own words.
@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (
            "ValueError: Free memory on device cuda:0 (10.0/139.8 GiB) on startup is less than "
            "desired GPU memory utilization (0.3, 41.94 GiB).",
            "lower --memory-share (now 0.3), or end ",
        ),
        (
            f"ValueError: {TOO_SMALL}",
            "lower --max-model-len (now 1024), or raise --kv-cache-gib or --memory",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (1024), 4.0 "
            "GiB KV cache is needed",
            "lower --max-model-len (now 1024), or raise --kv-cache-gib or --memory",
        ),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "lower --kv-cache-gib"),
        (
            "RuntimeError: Engine core initialization failed. Failed core proc(s): "
            "{'EngineCore': -9}",
            "lower --kv-cache-gib",
        ),
        ("ValueError: something else", "the engine's own log is above"),
    ],
)
def test_what_to_do(reason: str, advice: str) -> None:
    assert advice_for(reason, SETTINGS).startswith(advice)


def test_the_process_ends_with_two_lines() -> None:
    with pytest.raises(SystemExit) as caught:
        _tell(EngineDidNotStart("ValueError: no", "do this"))
    assert caught.value.code == (
        "rollout-server: the engine did not start: ValueError: no\n  do this"
    )
    with pytest.raises(SystemExit) as caught:
        _tell(PermissionError(13, "Permission denied", str(Path("/spool"))))
    first, second = str(caught.value.code).splitlines()
    assert first == "rollout-server: cannot serve: [Errno 13] Permission denied: '/spool'"
    assert second == "  --log-level debug shows where this was raised"

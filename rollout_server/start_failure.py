"""Why an engine did not start, and what to do about it.

vLLM tells the process that starts an engine no more than that it failed; the reason is in the log
of one of the engine's processes. Each of these keeps the first reason that it logs in a file, and
the server reads it from there.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout_server.settings import ServerSettings

_VARIABLE = "TITO_ENGINE_START_FAILURE"
_FAILED_TO_START = "failed to start"
"""In what vLLM logs, with the exception, when an engine's process gives up."""
_ITS_ADVICE = re.compile(r" (?:Try increasing|Decrease GPU memory|Increase GPU memory)")
"""Where vLLM begins to speak of its own settings, which are not the server's flags."""


class EngineDidNotStart(RuntimeError):
    """The reason on one line.

    Attributes:
        advice: what to do about it.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


class _Keeper(logging.Handler):
    """Writes the first exception with which a process fails to start."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        # A worker fails before the process that waits for it, which then has less to say.
        if error is not None and _FAILED_TO_START in record.getMessage() and not _read(self._path):
            with suppress(OSError):  # of a server that waits no longer
                self._path.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


def keep_reason() -> None:
    """In a process of the engine: keep why it does not start, if the server wants to know."""
    if path := os.environ.get(_VARIABLE):
        logging.getLogger("vllm").addHandler(_Keeper(Path(path)))


@contextmanager
def reason_told(settings: ServerSettings) -> Iterator[None]:
    """Around the construction of an engine.

    Raises:
        EngineDidNotStart: instead of any other exception, which is its cause.
    """
    with tempfile.TemporaryDirectory(prefix="tito-start-") as directory:
        path = Path(directory, "reason")
        os.environ[_VARIABLE] = str(path)
        try:
            yield
        except Exception as error:
            kept = _read(path) or f"{type(error).__name__}: {error}"
            reason = " ".join(kept.split())
            what = _ITS_ADVICE.split(reason)[0]
            raise EngineDidNotStart(what, advice_for(reason, settings)) from error
        finally:
            os.environ.pop(_VARIABLE, None)


def advice_for(reason: str, settings: ServerSettings) -> str:
    """What to do, as far as the words of vLLM and torch tell."""
    said, share = reason.lower(), f"--memory-share (now {settings.memory_share:g})"
    if "free memory on device" in said or "available memory on node" in said:
        return f"lower {share}, or end what else takes that memory"
    if "memory for the cache blocks" in said or "max seq len" in said:
        length = f"--max-model-len (now {settings.max_model_len})"
        return f"lower {length}, or raise --kv-cache-gib or {share}"
    # -9: the kernel ended a process, for which lack of memory is its usual reason.
    if any(sign in said for sign in ("out of memory", "can't allocate memory", ": -9}")):
        return (
            f"lower --kv-cache-gib, --max-num-seqs (now {settings.max_num_seqs}) or {share}, or "
            f"take a smaller model, or end what else takes that memory"
        )
    return "the engine's own log is above; --log-level debug shows where this was raised"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""

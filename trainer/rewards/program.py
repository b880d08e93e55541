"""Starting, watching and ending programs in :mod:`trainer.jail`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PROGRAM = (
    "import sys; root = sys.argv[1]; sys.path.insert(0, root); "
    "from trainer.jail.launch import main; sys.path.remove(root); sys.exit(main(int(sys.argv[2])))"
)
_ROOT = str(Path(__file__).parents[2])
MAX_OUTPUT = 4 << 20
"""Bytes of standard output, or of a message, that are read; a program that says more has failed."""


class JailError(Exception):
    """The program could not be confined, which says nothing about the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What programs may use.

    Attributes:
        seconds: of wall-clock time for all tests of a sample, and of CPU time for each process.
        memory_mb: address space of each process.
        processes: how many the program may have at once.
        confine: whether in namespaces of its own; without, it has the network and the files of the
            user who runs the trainer.
    """

    seconds: float = 4.0
    memory_mb: int = 512
    processes: int = 32
    confine: bool = True


def passed_tests(source: str, tests: Sequence[str], limits: Limits) -> int:
    """How many of the tests, pieces of Python, the program passes.

    Program and tests run in two processes, each in a jail of its own.

    Raises:
        JailError: one of them could not be confined.
        ValueError: the tests cannot be run.
    """
    (program_end, test_end), (worker_end, verdict_end) = socket.socketpair(), socket.socketpair()
    with program_end, test_end, worker_end, verdict_end, ExitStack() as stack:
        serve = {"role": "serve", "source": source, "channel": program_end.fileno()}
        stack.enter_context(_jailed(serve, limits))
        program_end.close()
        verdict = {"channel": verdict_end.fileno(), "peer": test_end.fileno()}
        stack.enter_context(_jailed({"role": "test", "tests": [*tests], **verdict}, limits))
        test_end.close()
        verdict_end.close()
        said = _read(worker_end.fileno(), time.monotonic() + limits.seconds)
    # Nothing, when time was over or the program's answers were too much for the tests' process.
    found = json.loads(said) if said else {"passed": 0}
    if "broken" in found:
        raise ValueError(found["broken"])
    return int(found["passed"])


def passed_cases(source: str, cases: Sequence[tuple[str, str]], limits: Limits) -> int:
    """For how many pairs of input and expected output the program prints the output.

    White space at the ends of lines and of the whole does not count.

    Raises:
        JailError: the program could not be confined.
    """
    deadline, passed = time.monotonic() + limits.seconds, 0
    for given, expected in cases:
        output = _output(source, given, limits, deadline)
        passed += output is not None and _lines(output) == _lines(expected)
    return passed


def _output(source: str, given: str, limits: Limits, deadline: float) -> str | None:
    """What the program prints, or None when it fails, says too much or takes too long."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(given.encode())
        stdin.seek(0)
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE}
        with _jailed({"role": "script", "source": source}, limits, **pipes) as process:
            assert process.stdout is not None
            said = _read(process.stdout.fileno(), deadline)
            # It may have closed its output and go on.
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            if said is None or process.returncode != 0:
                return None
    return said.decode(errors="replace")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _read(fd: int, deadline: float) -> bytes | None:
    """Everything until the end; None when that is late or too much."""
    said = b""
    poll = select.poll()  # not select(), which knows no descriptors above 1023
    poll.register(fd, select.POLLIN)
    while len(said) <= MAX_OUTPUT:
        if not poll.poll(1000 * max(deadline - time.monotonic(), 0)):
            return None
        more = os.read(fd, 1 << 16)
        if not more:
            return said
        said += more
    return None


@contextmanager
def _jailed(
    options: dict[str, Any], limits: Limits, **pipes: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its jail, killed with all that it started at the end."""
    with tempfile.TemporaryDirectory(prefix="tito-jail-") as directory, ExitStack() as stack:
        status, status_end = os.pipe()
        stack.callback(os.close, status)
        given = os.memfd_create("options")
        everything = {**options, **asdict(limits), "status": status_end, "directory": directory}
        os.write(given, json.dumps(everything).encode())
        os.lseek(given, 0, os.SEEK_SET)
        passed = [options[name] for name in ("channel", "peer") if name in options]
        process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _PROGRAM, _ROOT, str(given)],
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **pipes},
            stderr=subprocess.PIPE,
            env={},
            pass_fds=[given, status_end, *passed],
            start_new_session=True,
        )
        os.close(given)
        os.close(status_end)
        stack.callback(_end, process)
        if not os.read(status, 1):
            assert process.stderr is not None
            raise JailError(process.stderr.read().decode(errors="replace").strip()[-300:])
        yield process


def _end(process: subprocess.Popen[bytes]) -> None:
    # Its session has everything it started, and in a jail the kernel ends the rest.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


@cache
def confinement_problem() -> str | None:
    """Why programs cannot be confined on this machine; None when they can."""
    try:
        passed_cases("", [("", "")], Limits(seconds=30.0))
    except JailError as error:
        return str(error).splitlines()[-1] if str(error) else "no reason given"
    return None

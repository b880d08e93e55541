"""Worker processes that score samples, and outlive nothing that a reward function does.

Samples go out in chunks, because a message for each would cost more than a cheap reward; results
come back one by one, so that a deadline is a sample's own. A worker that hangs or dies is replaced,
and the sample that it was at is the only one that has no verdict. The order of outcomes is that of
the samples, and the outcomes do not depend on which worker did what.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from socket import socketpair

import msgpack

from trainer.errors import RewardError
from trainer.reward_parts import Item
from trainer.rewards.outcome import Failed, Outcome
from trainer.rewards.worker import (
    DONE,
    READY,
    UNUSABLE,
    Setup,
    decode,
    timed_out,
)

START_TIMEOUT_S = 120.0
"""A worker imports a user's file, and that may import anything."""

GRACE_S = 2.0
"""How much longer a worker gets that has deadlines of its own for asynchronous functions."""

PATIENCE_S = 0.1
"""Another worker is started once samples have waited this long; cheap rewards are done by then."""

MAX_CHUNK = 64
CHUNKS_PER_WORKER = 4
"""Several, so that no worker is left alone with a long rest."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from trainer.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class _Worker:
    """One process as the parent sees it.

    Attributes:
        ready: whether it has loaded the functions.
        chunk: places of the samples that it was given.
        done: how many of them it has answered.
        deadline: on the monotonic clock; infinite while it waits for work.
    """

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socketpair()
        lifeline, self._life = os.pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="tito-reward-")
        # Threads of numeric libraries would fight over the cores that the workers share.
        changes = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(lifeline)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **changes, "TMPDIR": self._directory.name},
                pass_fds=[theirs.fileno(), lifeline],
                start_new_session=True,  # Ctrl-C is the trainer's business
            )
        os.close(lifeline)
        self.socket = ours
        self._to_worker = Connection(os.dup(ours.fileno()), readable=False)
        self._unpacker = msgpack.Unpacker()
        self._send(setup)
        self.ready = False
        self.chunk: list[int] = []
        self.done = 0
        self.deadline = time.monotonic() + START_TIMEOUT_S

    @property
    def pid(self) -> int:
        return self._process.pid

    def give(self, chunk: list[int], items: Sequence[Item], deadline: float) -> None:
        """Send samples."""
        self.chunk, self.done, self.deadline = chunk, 0, deadline
        self._send([items[place] for place in chunk])

    def _send(self, message: object) -> None:
        # One that has just died is found out when its channel is read.
        with suppress(OSError):
            self._to_worker.send(message)

    def hear(self) -> Iterator[object]:
        """What it has said, to be called when its socket can be read.

        Raises:
            EOFError: it has closed the channel.
            OSError, ValueError, msgpack.UnpackException: the channel is broken.
        """
        said = self.socket.recv(1 << 16)
        if not said:
            raise EOFError
        self._unpacker.feed(said)
        yield from self._unpacker

    def end(self, *, wait_s: float = 0.0) -> str:
        """End it, after ``wait_s`` seconds if it still lives then; returns how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        status = self._process.wait()
        self._to_worker.close()
        self.socket.close()
        os.close(self._life)
        self._directory.cleanup()
        return f"signal {-status}" if status < 0 else f"exit status {status}"


@dataclass
class _Round:
    """The samples of one call, and how far they are."""

    items: Sequence[Item]
    queue: deque[list[int]]
    started: float = field(default_factory=time.monotonic)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return len(self.outcomes) == len(self.items)


class WorkerPool:
    """Workers for one list of reward functions.

    Args:
        workers: most processes at a time.
    """

    def __init__(self, setup: Setup, workers: int) -> None:
        self._setup, self._most = setup, workers
        self._workers: list[_Worker] = []
        self._concurrent = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the first worker and load the functions in it.

        Raises:
            RewardError: they cannot be loaded.
        """
        try:
            self._workers.append(_Worker(self._setup))
            nothing = _Round([], deque())
            while not self._workers[0].ready:
                self._attend(nothing)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.pop().end()

    def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome for each item, in order. Calls from several threads take turns.

        Raises:
            RewardError: a worker that replaces another cannot load the functions any more.
        """
        with self._lock:
            work = _Round(items, self._chunks(len(items)))
            try:
                while not work.finished:
                    self._staff(work)
                    self._hand_out(work)
                    self._attend(work)
            except BaseException:
                self.close()  # they are at samples that nobody waits for any more
                raise
            return [work.outcomes[place] for place in range(len(items))]

    def _chunks(self, count: int) -> deque[list[int]]:
        shares = self._most * (1 if self._concurrent else CHUNKS_PER_WORKER)
        size = min(MAX_CHUNK, max(1, math.ceil(count / shares)))
        return deque([*range(start, min(start + size, count))] for start in range(0, count, size))

    def _staff(self, work: _Round) -> None:
        """Start a worker if there is none, and more when samples have waited."""
        waited = time.monotonic() - work.started > PATIENCE_S
        spare = sum(not worker.chunk for worker in self._workers)
        room = len(self._workers) < self._most
        if not self._workers or (waited and room and spare < len(work.queue)):
            self._workers.append(_Worker(self._setup))

    def _hand_out(self, work: _Round) -> None:
        for worker in self._workers:
            if work.queue and worker.ready and not worker.chunk:
                worker.give(work.queue.popleft(), work.items, self._deadline())

    def _deadline(self) -> float:
        return time.monotonic() + self._setup.timeout_s + (GRACE_S if self._concurrent else 0.0)

    def _attend(self, work: _Round) -> None:
        """Wait for the next thing that happens, and deal with it."""
        pause = min(worker.deadline for worker in self._workers) - time.monotonic()
        pause = min(pause, PATIENCE_S if work.queue else math.inf)
        sockets = [worker.socket for worker in self._workers]
        ready = wait(sockets, None if pause == math.inf else max(pause, 0.0))
        for worker in [*self._workers]:
            try:
                for message in worker.hear() if worker.socket in ready else ():
                    self._hear(worker, message, work)
            except (EOFError, OSError, ValueError, msgpack.UnpackException):
                self._lose(worker, work, None)
        # What has arrived in time counts, however late this process looked.
        for worker in [*self._workers]:
            if worker.socket not in ready and time.monotonic() >= worker.deadline:
                self._lose(worker, work, timed_out(self._setup.timeout_s))

    def _hear(self, worker: _Worker, message: object, work: _Round) -> None:
        kind, detail, outcome = decode(message)
        if kind == UNUSABLE:
            raise RewardError(detail, advice="fix reward.function, its options or its file")
        if kind == READY:
            worker.ready, self._concurrent, worker.deadline = True, bool(detail), math.inf
            return
        worker.deadline = self._deadline()
        if kind == DONE and outcome is not None:
            # In order, which is what makes the first without an outcome the one to blame.
            if detail != worker.done or detail >= len(worker.chunk):
                raise ValueError("not a message of a worker")
            work.outcomes[worker.chunk[detail]] = outcome
            worker.done += 1
        if worker.done == len(worker.chunk):
            worker.chunk, worker.done, worker.deadline = [], 0, math.inf

    def _lose(self, worker: _Worker, work: _Round, verdict: Outcome | None) -> None:
        """Remove a worker; the sample that it was at gets the verdict, others another worker."""
        self._workers.remove(worker)
        how = worker.end(wait_s=0.0 if verdict else GRACE_S)
        if not worker.ready:
            raise RewardError(
                f"a reward worker did not start ({how})",
                advice="its error is printed above; if there is none, raise reward.memory_mb",
            )
        left = worker.chunk[worker.done :]
        if self._concurrent and len(left) > 1:
            # Any of them may be the one: each by itself.
            work.queue.extendleft([place] for place in reversed(left))
        elif left:
            died = Failed(f"the worker died while it scored this sample ({how})")
            work.outcomes[left[0]] = verdict or died
            if left[1:]:
                work.queue.appendleft(left[1:])

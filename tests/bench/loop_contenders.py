"""Who takes part in ``bench_loop.py``, each in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tests.bench.loop_trl import prepare_trl
from tests.bench.results import median
from trainer.config import Config
from trainer.curve import read_records
from trainer.policy import load_policy
from trainer.train import train

OURS = {
    "sync": ("server.sleep=0", "train.max_staleness=0"),
    "sleep1": ("server.sleep=1", "train.max_staleness=0"),
    "sleep2": ("server.sleep=2", "train.max_staleness=0"),
    "async": ("server.sleep=0", "train.max_staleness=1"),
    "half": ("server.sleep=1", "train.max_staleness=0", "model.dtype=bfloat16"),
}
"""What each changes in the configuration."""
_END_S = 60.0
"""Patience with evaluations and checkpoints."""

Found = dict[str, Any]
Run = Callable[[Config, float], Found]
"""Makes the steps, or as many as there are seconds for."""


class Contender:
    """A run in a process of its own, whose memory goes with it; it starts at once.

    Args:
        engine: vLLM's settings, for one that has its engine in its process.
    """

    def __init__(self, name: str, config: Config, engine: Found) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        prepare = _prepare_ours if name in OURS else prepare_trl
        self._process = context.Process(target=_contend, args=(theirs, prepare, config, engine))
        self._process.start()
        theirs.close()
        self._told: Found | None = None

    def wait_ready(self, seconds: float) -> None:
        """Wait until it can go on, or cannot."""
        self._told = self._told or self._hear(seconds)

    def refuse(self, why: str) -> None:
        """There is no server for it, if it needs one."""
        if self.name in OURS:
            self._told = {"error": why}

    def run(self, config: Config, limit: float) -> Found:
        """What it found; its ``error`` if it failed."""
        if not self._told:
            self._pipe.send((config, limit))
            self._told = self._hear(limit + _END_S)
        self.end()
        return self._told

    def _hear(self, seconds: float) -> Found:
        with contextlib.suppress(EOFError):
            if not self._pipe.poll(seconds):
                self.end()
                return {"error": f"nothing was heard for {seconds:.0f} s"}
            heard: Found = self._pipe.recv()
            return heard
        return {"error": "it died"}

    def end(self) -> None:
        """It has no more turn."""
        self._process.kill()
        self._process.join()


def _contend(pipe: Connection, prepare: Any, config: Config, engine: Found) -> None:
    os.dup2(2, 1)  # results alone go to standard output
    try:
        run: Run = prepare(config, engine)
        pipe.send({})
        pipe.send(run(*pipe.recv()))
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"[:2000]})
    # What vLLM leaves running in this process would keep it.
    sys.stderr.flush()
    os._exit(0)


def _prepare_ours(config: Config, _: Found) -> Run:
    """Do once what is slow when it is done for the first time."""
    load_policy(config.model.path, device="cuda" if torch.cuda.is_available() else "cpu")
    return _run_ours


def _run_ours(config: Config, limit: float) -> Found:
    """One run against a server that is up; its own records say how it went."""
    # It ends with the step that it is in, as if it were told to by a person.
    timer = threading.Timer(limit, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    train(config, console=Console(file=sys.stderr, width=200))
    timer.cancel()
    output = Path(config.train.output)
    steps = read_records(output / "metrics.jsonl")
    evaluations = read_records(output / "evaluation.jsonl")
    parts = [[s[f"{p}_seconds"] for s in steps] for p in ("rollout", "update", "publish")]
    seconds = [sum(step) for step in zip(*parts, strict=True)]
    idle = {
        f"{who}_idle": sum(s[f"{who}_idle_seconds"] for s in steps) / sum(seconds)
        for who in ("trainer", "sampler")
    }
    return {
        "seconds": seconds,
        "rewards": [s["reward_mean"] for s in steps],
        "accuracies": [(e["step"], e["greedy"]["accuracy"]) for e in evaluations],
        "sampling_updating_publishing": [median(part) for part in parts],
        "kl_sampler": [s["kl_sampler"] for s in steps],
        **idle,
    }

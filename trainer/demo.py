"""The demonstration: a tiny policy learns arithmetic through a server and a trainer.

    python -m trainer demo [--out runs/demo] [--server URL --model DIRECTORY]

Two processes that talk HTTP: ``rollout_server``, started here unless one that serves the tiny
policy is named, and the training loop of ``trainer.train`` with ``trainer/configs/demo.toml``. It
fails unless held-out accuracy rises.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from shared.client import RolloutClient
from shared.errors import EngineUnavailable, ServerUnreachable
from trainer.config import Config
from trainer.config_file import load_config
from trainer.curve import before_and_after, read_curve, read_records, save_curve, terminal_curve
from trainer.errors import TrainerError
from trainer.tiny_policy import ensure_tiny_policy
from trainer.train import train

CONFIG = Path(__file__).parent / "configs" / "demo.toml"

MIN_RISE = 0.3
MIN_AFTER = 0.8

# Two cores are enough for both sides, which take turns; more threads would fight over them.
SERVER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
CONTEXT = 256
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Summary:
    """``summary.json``.

    Attributes:
        before, after: greedy accuracy on the same held-out problems.
        steps: optimizer steps that were published.
        seconds: from the command to the result, all included.
        training_seconds: of those, training with its evaluations.
        versions_seen: of the policies that answered, oldest first.
    """

    before: float
    after: float
    steps: int
    seconds: float
    training_seconds: float
    final_version: int
    versions_seen: list[int]
    passed: bool


@dataclass(frozen=True)
class Served:
    """A rollout server that runs already, and the tiny policy that it was started with."""

    url: str
    model: Path


def run_demo(
    out: Path, console: Console, overrides: Sequence[str] = (), served: Served | None = None
) -> int:
    """Run everything; returns the exit code, 0 when accuracy rose enough."""
    started = time.perf_counter()
    run = _empty_run(out)
    with _server(out, console) if served is None else nullcontext(served) as server:
        config = demo_config(server.model, server.url, run, overrides)
        training = time.perf_counter()
        if not train(config, console=console):
            return 130
        training_seconds = time.perf_counter() - training
    summary = summarise(run, time.perf_counter() - started, training_seconds)
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=2), encoding="utf-8")
    _show(console, out, run, summary)
    return 0 if summary.passed else 1


@contextmanager
def _server(out: Path, console: Console) -> Iterator[Served]:
    _say(console, "making the tiny policy, or taking it from the cache")
    policy = ensure_tiny_policy(_cache_directory())
    _say(console, f"starting the rollout server; its log is {out / 'server.log'}")
    with rollout_server(policy, out / "server.log") as url:
        yield Served(url, policy)


def demo_config(policy: Path, url: str, run: Path, overrides: Sequence[str] = ()) -> Config:
    """``demo.toml`` with what is only known now."""
    known = {"model.path": str(policy), "server.url": url, "train.output": str(run)}
    # JSON's strings are TOML's, so a path may contain anything.
    return load_config(CONFIG, [f"{k}={json.dumps(v)}" for k, v in known.items()] + [*overrides])


def _empty_run(out: Path) -> Path:
    run = out / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    return run


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tito"


@contextmanager
def rollout_server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """A rollout server in a process of its own, ended with the block whatever happens in it.

    Args:
        model: that it serves.
        log: file for what it prints.
        flags: of the server, besides or instead of the demo's.

    Raises:
        TrainerError: it did not start; the message has the end of its log.
    """
    port = _free_port()
    command = [sys.executable, "-m", "rollout_server", "--model", str(model), "--port", str(port)]
    # So small a model gains less from CUDA graphs than it takes to compile and capture them.
    command += ["--max-model-len", str(CONTEXT), "--eager"]
    # A share of a GPU that others use too might not be free, and is not needed.
    command += ["--kv-cache-gib", "1", "--memory-share", "0.1", *flags]
    with _terminable(), log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | SERVER_ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A group of its own, because the engine has processes too and all must end.
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log)
            yield url
        finally:
            _stop(process)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with RolloutClient(url) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                client.wait_ready(timeout=1.0)
            except (ServerUnreachable, EngineUnavailable):
                continue
            return
    last_lines = "\n  ".join(log.read_text(errors="replace").splitlines()[-5:])
    raise TrainerError(f"the rollout server did not start; {log} ends with\n  {last_lines}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    # Whatever of the group is left, the engine's processes included, if they outlived the server.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what is open gets closed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_with_parent() -> None:
    """In the child: ask Linux for SIGTERM when the parent dies, even by SIGKILL."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def summarise(run: Path, seconds: float, training_seconds: float) -> Summary:
    """The result of a run, from its files.

    Raises:
        TrainerError: its accuracy before or after is not known.
    """
    metrics = read_records(run / "metrics.jsonl")
    evaluations = read_records(run / "evaluation.jsonl")
    before, after = before_and_after(run)
    versions = {m["sampled_version"] for m in metrics}
    versions |= {e["greedy"]["version"] for e in evaluations}
    return Summary(
        before=before,
        after=after,
        steps=sum(m["updates"] > 0 for m in metrics),
        seconds=round(seconds, 1),
        training_seconds=round(training_seconds, 1),
        final_version=metrics[-1]["version"],
        versions_seen=sorted(versions),
        passed=after - before >= MIN_RISE and after >= MIN_AFTER,
    )


def _show(console: Console, out: Path, run: Path, summary: Summary) -> None:
    curve = read_curve(run)
    save_curve(curve, out / "curve.png")
    console.print(Text.from_ansi(terminal_curve(curve, width=min(console.width, 100))))
    where = "GPU" if torch.cuda.is_available() else "CPU"
    _say(
        console,
        f"held-out accuracy {summary.before:.1%} -> {summary.after:.1%} in {summary.steps} steps, "
        f"{summary.seconds:.0f} s on {where}, {len(summary.versions_seen)} policy versions seen",
        "bold green" if summary.passed else "bold red",
    )
    if not summary.passed:
        _say(console, f"wanted: a rise of at least {MIN_RISE:.0%}, to at least {MIN_AFTER:.0%}")
    _say(console, f"see {out / 'curve.png'}, {out / 'summary.json'} and {run}")


def _say(console: Console, message: str, style: str = "") -> None:
    console.print(Text(message, style=style))

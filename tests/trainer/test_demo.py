from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.text import Text

from trainer.curve import Curve, read_curve, save_curve, terminal_curve
from trainer.demo import demo_config, rollout_server, run_demo, summarise
from trainer.errors import TrainerError


def write_run(directory: Path, *, before: float | None, after: float | None) -> Path:
    metrics = [
        {"step": s, "updates": int(s != 2), "reward_mean": None if s == 2 else 0.25 * s,
         "version": s, "sampled_version": s - 1}
        for s in (1, 2, 3)
    ]  # fmt: skip
    evaluations = [
        {"step": step, "greedy": {"accuracy": accuracy, "version": version}}
        for step, accuracy, version in ((0, before, 0), (3, after, 3))
    ]
    for name, records in (("metrics", metrics), ("evaluation", evaluations)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [
        (0.4, 0.85, True),
        (0.5, 0.8, True),
        (0.6, 0.85, False),  # rose by less than 0.3
        (0.3, 0.75, False),  # did not reach 0.8
        (0.9, 0.4, False),
    ],
)
def test_summary_and_verdict(tmp_path: Path, before: float, after: float, passed: bool) -> None:
    summary = summarise(write_run(tmp_path, before=before, after=after), 12.34, 10.0)
    assert summary.passed is passed
    assert (summary.before, summary.after, summary.steps) == (before, after, 2)
    assert (summary.final_version, summary.versions_seen) == (3, [0, 1, 2, 3])


def test_without_a_verdict_there_is_no_summary(tmp_path: Path) -> None:
    for before, after, steps in ((0.4, None, "3"), (None, 0.9, "0"), (None, None, "0 and 3")):
        run = write_run(tmp_path, before=before, after=after)
        with pytest.raises(TrainerError, match=f"after step {steps} could be scored"):
            summarise(run, 12.34, 10.0)


def test_curve_is_drawn_in_both_forms(tmp_path: Path) -> None:
    curve = read_curve(write_run(tmp_path, before=0.4, after=0.9))
    assert curve == Curve([(1, 0.25), (3, 0.75)], [(0, 0.4), (3, 0.9)])
    save_curve(curve, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    drawn = Text.from_ansi(terminal_curve(curve, width=70)).plain
    assert "held-out accuracy" in drawn
    assert max(map(len, drawn.splitlines())) == 70
    assert {".", "#"} <= set(drawn)


def test_paths_and_urls_reach_the_configuration_whatever_they_contain(tmp_path: Path) -> None:
    odd = tmp_path / 'a "b" é'
    config = demo_config(odd, "http://127.0.0.1:1", tmp_path / "run", ["train.steps=1"])
    assert config.model.path == str(odd)
    assert (config.train.steps, config.server.url) == (1, "http://127.0.0.1:1")


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with pytest.raises(TrainerError, match=r"did not start.*server\.log ends with"):  # noqa: SIM117
        with rollout_server(tmp_path / "no-model", log):
            pytest.fail("it must not be ready")
    assert log.stat().st_size > 0


@pytest.mark.slow
def test_the_server_ends_with_the_block_whatever_happens(
    untrained_model: Path, tmp_path: Path
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def watched(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", watched)
        with pytest.raises(RuntimeError, match="on purpose"):  # noqa: PT012, SIM117
            with rollout_server(untrained_model, tmp_path / "server.log") as url:
                assert httpx.get(f"{url}/readyz").status_code == 200
                raise RuntimeError("on purpose")
    assert started[0].poll() is not None
    assert _is_gone(started[0].pid)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/readyz")


def _is_gone(group: int) -> bool:
    """Whether no process of a group is left; the dead ones of others are reaped after a while."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


HOLDER = """
import sys, time
from pathlib import Path
from trainer.demo import rollout_server

with rollout_server(Path(sys.argv[1]), Path(sys.argv[2])) as url:
    print(url, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_server_ends_with_its_owner(
    untrained_model: Path, tmp_path: Path, end: signal.Signals
) -> None:
    command = [sys.executable, "-c", HOLDER, str(untrained_model), str(tmp_path / "server.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        owner.send_signal(end)
        owner.wait(60)
    for _ in range(100):
        try:
            httpx.get(f"{url}/healthz")
        except httpx.TransportError:
            return
        time.sleep(0.3)
    pytest.fail("the server is still there")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_teaches_arithmetic(tmp_path: Path) -> None:
    out = io.StringIO()
    code = run_demo(tmp_path / "demo", Console(file=out, soft_wrap=True, width=100))
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert code == 0, out.getvalue()
    assert summary["after"] >= 0.8
    assert summary["after"] - summary["before"] >= 0.3
    assert len(summary["versions_seen"]) == summary["steps"] + 1
    assert summary["final_version"] == summary["versions_seen"][-1]
    assert (tmp_path / "demo" / "curve.png").exists()

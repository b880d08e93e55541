from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from shared.lesson import truncated_share
from shared.protocol import Sample
from trainer.curve import read_curve
from trainer.evaluate import Accuracy, Evaluation
from trainer.metrics import StepMetrics, mean_length, reward_statistics
from trainer.progress import ProgressLog, forget_later_steps, step_line
from trainer.rewards import Failed, Score
from trainer.trackers import TensorBoard

METRICS = StepMetrics(
    step=3, reward_mean=0.5, reward_spread=0.25, useful_groups=0.75, truncated=0.1, length=12.0,
    updates=1,
    loss=1e-9, kl_sampler=0.01,
    kl_reference=math.nan, ratio=1.002, clipped=0.03, gradient_norm=0.4, learning_rate=1e-5,
    sampled_version=6,
    staleness=0, version=7, tokens_per_second=1234.4, rollout_seconds=1.0, update_seconds=2.0,
    publish_seconds=0.1, trained_length=11.0, trainer_idle_seconds=1.1, sampler_idle_seconds=2.0,
)  # fmt: skip
NAN = math.nan
IDLE = replace(
    METRICS, step=4, updates=0, loss=NAN, kl_sampler=NAN, ratio=NAN, clipped=NAN, gradient_norm=NAN
)


def test_line_shows_the_signals_and_not_the_loss() -> None:
    line = step_line(METRICS, 10).plain
    assert line == (
        "step  3/10  reward 0.500 ±0.25  useful  75%  truncated 10%  length 12.0  kl(old) 0.0100  "
        "ratio 1.002  clipped 3.0%  1234 tok/s  stale 0  v7"
    )


def test_a_crash_while_records_are_dropped_leaves_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = "".join(json.dumps({"step": step}) + "\n" for step in range(4))
    path.write_text(lines, encoding="utf-8")

    def crash(*_: object) -> None:
        raise OSError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="no power"):
            forget_later_steps(path, 1)
    assert path.read_text(encoding="utf-8") == lines
    forget_later_steps(path, 1)
    assert path.read_text(encoding="utf-8") == lines[: len(lines) // 2]
    forget_later_steps(path, -1)
    assert path.read_text(encoding="utf-8") == ""


def test_line_names_the_reference_when_there_is_one() -> None:
    assert (
        "  kl(ref) 0.0200  kl(old) 0.0100"
        in step_line(replace(METRICS, kl_reference=0.02), 9).plain
    )


def test_line_flags_truncation_above_the_bound_and_steps_without_an_update() -> None:
    assert "truncated 15%  " in step_line(replace(METRICS, truncated=0.15), 10).plain
    assert "truncated 16%!" in step_line(replace(METRICS, truncated=0.16), 10).plain
    line = step_line(IDLE, 10).plain
    assert "no update" in line
    assert "nan" not in line


def test_statistics_leave_failures_out() -> None:
    assert reward_statistics([[Score(1.0), Failed("x")], [Score(0.0)]]) == (0.5, 0.5)
    assert all(math.isnan(value) for value in reward_statistics([[Failed("x")]]))


def test_shares_of_samples(make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample(finish_reason="length"), make_sample(completion=(1,) * 6, version=2)]
    assert truncated_share(samples) == 0.5
    assert truncated_share([]) == 0.0
    assert mean_length(samples) == 4.0


def run(directory: Path, *metrics: StepMetrics, resumed_step: int = 0) -> str:
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False)
    with (
        closing(TensorBoard(directory, resumed_step)) as board,
        ProgressLog(
            directory, 10, resumed_step=resumed_step, console=console, trackers=[board]
        ) as log,
    ):
        for step in metrics:
            log.step(step)
        log.say("[red]not markup[/red]")
        with log.phase("sampling"):
            pass
    return out.getvalue()


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_files_hold_every_figure_as_plain_json(tmp_path: Path) -> None:
    printed = run(tmp_path, METRICS, IDLE)
    assert "[red]not markup[/red]" in printed
    assert "\x1b" not in printed
    first, second = read(tmp_path)
    assert first["tokens_per_second"] == 1234.4
    assert second["loss"] is None
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/reward_mean")] == [3, 4]
    assert [event.step for event in board.Scalars("train/ratio")] == [3]


def test_a_resumed_run_takes_back_what_it_will_do_again(tmp_path: Path) -> None:
    run(tmp_path, METRICS, IDLE)
    again = replace(IDLE, reward_mean=0.9)
    run(tmp_path, again, resumed_step=3)
    assert [(line["step"], line["reward_mean"]) for line in read(tmp_path)] == [(3, 0.5), (4, 0.9)]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st', encoding="utf-8")
    forget_later_steps(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_evaluations_are_kept_and_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    found = Evaluation(4, Accuracy(0.25, 8, 0, 5), Accuracy(0.5, 16, 1, 5))
    console = Console(file=out, soft_wrap=True)
    with (
        closing(TensorBoard(tmp_path, 0)) as tracker,
        ProgressLog(tmp_path, 9, console=console, trackers=[tracker]) as log,
    ):
        log.evaluation(found)
    assert json.loads((tmp_path / "evaluation.jsonl").read_text()) == asdict(found)
    assert "greedy 25.0% of 8, sampled 50.0% of 16, 1 reward errors (v5)" in out.getvalue()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("evaluation/sampled")] == [0.5]


def test_a_lasting_problem_is_told_once(tmp_path: Path) -> None:
    out = io.StringIO()
    with ProgressLog(tmp_path, 9, console=Console(file=out, soft_wrap=True)) as log:
        for problem in ("bad", "bad", None, "bad again", None):
            log.problem("room", problem)
    assert out.getvalue().splitlines() == ["warning: room: bad", "warning: room: bad again"]


@pytest.mark.parametrize("terminal", [True, False])
def test_colour_only_on_a_terminal(terminal: bool) -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=terminal).print(step_line(METRICS, 10))
    assert ("\x1b" in out.getvalue()) is terminal


def test_an_unknown_accuracy_is_null_in_the_file_and_no_figure(tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []

    class Keeping:
        def log(self, figures: Mapping[str, float], step: int) -> None:  # noqa: ARG002
            logged.append(dict(figures))

        def close(self) -> None:
            pass

    known, unknown = Accuracy(0.5, 4, 0, 3), Accuracy(NAN, 0, 4, 3)
    with ProgressLog(tmp_path, 9, trackers=[Keeping()]) as log:
        log.evaluation(Evaluation(1, known, unknown))
        log.evaluation(Evaluation(2, unknown, None))
    assert logged == [{"evaluation/greedy": 0.5}, {}]

    def refuse(name: str) -> float:
        raise AssertionError(name)

    lines = (tmp_path / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert (first["greedy"]["accuracy"], first["sampled"]["accuracy"]) == (0.5, None)
    assert (second["greedy"]["accuracy"], second["sampled"]) == (None, None)
    # What reads the file goes on with the others.
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    assert read_curve(tmp_path).accuracy == [(1, 0.5)]

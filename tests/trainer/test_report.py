from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shared.protocol import Rollout, Sample
from tests.rollout_server.viewer_support import HOSTILE
from trainer import ledger
from trainer.batches import save_batch
from trainer.config import Config
from trainer.config_file import to_toml
from trainer.errors import DataError
from trainer.evaluate import Accuracy, Evaluation
from trainer.ledger import Fate
from trainer.metrics import StepMetrics
from trainer.printable import printable
from trainer.progress import ProgressLog
from trainer.report import write_report
from trainer.report.charts import Series, bar_chart, line_chart
from trainer.report.markup import join, table, tag, text
from trainer.report.record import read_run
from trainer.report.samples import select
from trainer.rewards import Failed, Outcome, Score

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Document(HTMLParser):
    """Elements and text of a page; fails where one is not closed or closes another."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def metrics(step: int, **changes: Any) -> StepMetrics:
    figures: dict[str, Any] = {field.name: 0.5 for field in fields(StepMetrics)}
    figures |= {"step": step, "version": step + 1, "sampled_version": step, "staleness": 0}
    figures |= {"updates": 1, "masked_by_length": {}, "rewards": {}, "reward_mean": step / 10}
    return StepMetrics(**(figures | changes))


@pytest.fixture
def write_run(
    tmp_path: Path,
    make_config: Callable[..., Config],
    make_sample: Callable[..., Sample],
    make_rollout: Callable[..., Rollout],
) -> Callable[..., Path]:
    """A run in which group 0 always has one prompt, and group 1 one of its own each step."""

    def write(steps: int = 3, *, keep: int = 10, answers: Sequence[str] = ("7", "8")) -> Path:
        run = tmp_path / "a <run>"
        run.mkdir(exist_ok=True)
        (run / "config.toml").write_text(to_toml(make_config()))
        (run / "objective.txt").write_text("loss = sum of w < 1\n")
        with ProgressLog(run, steps) as log:
            log.evaluation(Evaluation(0, Accuracy(0.25, 4, 0, 0), None))
            for step in range(1, steps + 1):
                prompts = ([1, 2, 3], [9, 9, step])
                rollout = make_rollout([
                    [make_sample(g, prompt=prompt, text=a, version=step) for a in answers]
                    for g, prompt in enumerate(prompts)
                ])  # fmt: skip
                first: list[Outcome] = [Score(step / 10), Failed("it raised <b>")]
                second: list[Outcome] = [Score(0.0), Score(1.0 - step / 10)]
                outcomes = [first, second]
                fates = [[Fate.SINGLETON, Fate.REWARD_ERROR], [Fate.TRAINED, Fate.TRAINED]]
                save_batch(run / "batches", step=step, rollout=rollout, outcomes=outcomes,
                           fates=fates, keep=keep)  # fmt: skip
                accounts = ledger.account(
                    step=step, prompts=2, group_size=2, rollout=rollout, fates=fates,
                    outcomes=outcomes, loss_tokens=4, updates=1,
                )  # fmt: skip
                ledger.append(run / "ledger.jsonl", accounts)
                log.step(metrics(step))
            log.evaluation(Evaluation(steps, Accuracy(0.75, 4, 0, steps), None))
        return run

    return write


def report_of(run: Path) -> tuple[str, Document]:
    page = write_report(run).read_text(encoding="utf-8")
    return page, Document(page)


def test_a_report_has_all_of_a_run(write_run: Callable[..., Path]) -> None:
    page, document = report_of(write_run())
    headings = re.findall(r"<h2>(.*?)<small>", page)
    assert headings == ["Curves", "Ledger", "Samples", "What was run", "All figures"]
    assert "25.0% \N{RIGHTWARDS ARROW} 75.0%" in document.text
    assert "0.1 \N{RIGHTWARDS ARROW} 0.3" in document.text
    assert "loss = sum of w < 1" in document.text
    assert 'path = "m"' in document.text
    assert "it raised <b>" in document.text
    titles = re.findall(r"<figcaption><b>(.*?)</b>", page)
    assert {"Reward", "Truncated", "Seconds of a step", "Samples of a step"} <= set(titles)
    assert "step 2, held-out" not in document.text
    assert "step 3, held-out, greedy: 0.75" in document.text
    row = re.search(r"<td>trained</td>(.*?)</tr>", page)
    assert row is not None
    assert re.findall(r"<td>([\d.,%]+)</td>", row[1]) == ["3", "6", "50.0%", "12"]


def test_it_needs_nothing_and_runs_nothing(write_run: Callable[..., Path]) -> None:
    page, document = report_of(write_run(answers=(HOSTILE, HOSTILE)))
    assert document.text.count("<script>window.stolen = 1</script>") >= 2
    for unseen in ("\x1b", "\u202e", "\u200b", "\x07", "\U000e0041"):
        assert unseen not in page
        assert f"U+{ord(unseen):04X}" in document.text
    names = {name for name, _ in document.elements}
    assert not names & {"script", "img", "link", "iframe", "object", "form"}
    attributes = {name for _, given in document.elements for name in given}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"src", "href"}
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://127.0.0.1:8300", "")
    assert "https://" not in page


def test_best_worst_and_repeated_prompts(write_run: Callable[..., Path]) -> None:
    chosen = select(read_run(write_run(steps=5)).batches())
    # The prompt that comes again is shown at its best and at its worst, and each other one once.
    assert [(g.step, round(g.mean, 2)) for g in chosen.best] == [(5, 0.5), (1, 0.45), (2, 0.4)]
    assert [(g.step, round(g.mean, 2)) for g in chosen.worst] == [(1, 0.1), (5, 0.25), (4, 0.3)]
    ((prompt, times),) = chosen.again
    assert prompt.prompt_ids.tolist() == [1, 2, 3]
    assert [(a.step, a.version, a.mean) for a in times] == [(s, s, s / 10) for s in range(1, 6)]
    assert times[0].answers == [("7", 1, 0.1), ("8", 1, None)]


def test_what_was_not_kept_is_left_out(write_run: Callable[..., Path]) -> None:
    run = write_run(keep=0)
    for name in ("ledger.jsonl", "evaluation.jsonl", "config.toml", "objective.txt"):
        (run / name).unlink()
    page, document = report_of(run)
    assert re.findall(r"<h2>(.*?)<small>", page) == ["Curves", "All figures"]
    assert "held-out" not in document.text


def test_a_step_without_a_reward_leaves_a_gap(write_run: Callable[..., Path]) -> None:
    run = write_run()
    with ProgressLog(run, 4, resumed_step=3) as log:
        nan = float("nan")
        log.step(metrics(4, reward_mean=nan, reward_spread=nan, updates=0, loss=nan))
    assert "step 4, training" not in report_of(run)[1].text


def test_no_run_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no run: there is no metrics.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="without a finished step"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        write_report(tmp_path)


def test_the_prompt_is_shown_if_its_tokenizer_is_here(
    write_run: Callable[..., Path], untrained_model: Path
) -> None:
    run = write_run()
    assert "A prompt of 3 tokens" in report_of(run)[1].text
    (run / "config.toml").write_text(f'[model]\npath = "{untrained_model}"\n')
    assert "A prompt of" not in report_of(run)[1].text


def test_only_tags_are_markup() -> None:
    assert (
        join(["<b>", tag("i", "<&>", title='"')]) == '&lt;b&gt;<i title="&quot;">&lt;&amp;&gt;</i>'
    )
    assert text("a\u202eb") == 'a<span class="unseen">U+202E</span>b'
    assert "&lt;x&gt;" in table(["<x>"], [["<x>"]])
    assert printable("a\x1b[2J\u200b\n") == "a\\x1b[2J\\u200b\n"


def test_charts_of_one_value_of_none_and_of_equal_ones() -> None:
    assert line_chart("x", Series("y", [])) is None
    assert bar_chart("x", {"y": [(1, 0.0)]}) is None
    for points in ([(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, -1.0), (9, 1e9)]):
        drawn = line_chart("x", Series("y", points, [0.5] * len(points)), limit=0.15)
        assert drawn is not None
        assert "nan" not in drawn
        assert "aria-label" in drawn


def test_every_metric_is_in_the_table(write_run: Callable[..., Path]) -> None:
    page, _ = report_of(write_run())
    plain = {name for name, value in asdict(metrics(1)).items() if not isinstance(value, dict)}
    for name in plain:
        assert f'<th scope="col">{name.replace("_", " ")}</th>' in page

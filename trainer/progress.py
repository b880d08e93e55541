"""What a person sees of a run: one line a step, ``metrics.jsonl``, and what trackers show.

The loss is written to the files and kept out of the line: while every sample comes from the policy
being trained, the ratio is 1, advantages of a group sum to 0, and the value of the loss is near 0
however much its gradient teaches. Rewards tell whether the run learns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from shared import tracing
from shared.lesson import MAX_TRUNCATED_SHARE
from trainer.evaluate import Evaluation
from trainer.files import replace_text
from trainer.metrics import StepMetrics
from trainer.trackers import Tracker

LOSS_NOTE = (
    "The loss is left out of these lines: for samples of the policy itself it is near 0 by "
    "construction, also while the policy learns. Watch the reward."
)


def step_line(metrics: StepMetrics, steps: int) -> Text:
    """The line for one step; what needs attention is in colour and marked with ``!``."""
    m = metrics
    line = Text(f"step {m.step:>{len(str(steps))}}/{steps}  ")
    line.append(f"reward {m.reward_mean:.3f} ±{m.reward_spread:.2f}", style="bold")
    line.append(f"  useful {m.useful_groups:4.0%}", style="yellow" if not m.useful_groups else "")
    mark, style = ("!", "red") if m.truncated > MAX_TRUNCATED_SHARE else ("", "")
    line.append(f"  truncated {m.truncated:.0%}{mark}", style)
    line.append(f"  length {m.length:.1f}")
    line.append(_update_part(m) if m.updates else "  no update")
    line.append(f"  {m.tokens_per_second:.0f} tok/s  stale {m.staleness}  v{m.version}", "dim")
    return line


def _update_part(m: StepMetrics) -> str:
    reference = "" if math.isnan(m.kl_reference) else f"  kl(ref) {m.kl_reference:.4f}"
    return f"{reference}  kl(old) {m.kl_sampler:.4f}  ratio {m.ratio:.3f}  clipped {m.clipped:.1%}"


class ProgressLog:
    """Writes a run's metrics to the console, ``metrics.jsonl`` and trackers; a context manager.

    Args:
        directory: where the files go.
        steps: how many the run will have.
        resumed_step: finished steps of the run that this one continues; later records, of steps
            that were lost and will be made again, are removed. -1 when it continues none: even a
            measurement before the first step is then made again.
        console: where lines go; plain text unless it is a terminal.
        trackers: get the same figures. One that fails is warned of, and costs nothing else.
    """

    def __init__(
        self,
        directory: Path,
        steps: int,
        *,
        resumed_step: int = 0,
        console: Console | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._directory = directory
        self._steps = steps
        self._told: set[str] = set()
        for name in ("metrics.jsonl", "ledger.jsonl", "evaluation.jsonl"):
            forget_later_steps(directory / name, resumed_step)
        self._metrics = (directory / "metrics.jsonl").open("a", encoding="utf-8")
        self._trackers = trackers

    def step(self, metrics: StepMetrics) -> None:
        """Record one step everywhere."""
        record = flat(asdict(metrics))
        self._metrics.write(json.dumps(_without_nan(record)) + "\n")
        self._metrics.flush()
        figures = {f"train/{name}": value for name, value in record.items() if name != "step"}
        self._track(figures, metrics.step)
        self.console.print(step_line(metrics, self._steps))

    def evaluation(self, found: Evaluation) -> None:
        """Record a measurement of accuracy."""
        with (self._directory / "evaluation.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(_without_nan(asdict(found))) + "\n")
        measured = {"greedy": found.greedy, "sampled": found.sampled}
        figures = {f"evaluation/{k}": v.accuracy for k, v in measured.items() if v is not None}
        self._track(figures, found.step)
        self.say(str(found), "bold green")

    def _track(self, figures: Mapping[str, float], step: int) -> None:
        known = {name: value for name, value in figures.items() if not math.isnan(value)}
        for tracker in self._trackers:
            name, failed = f"tracking, {type(tracker).__name__}", None
            try:
                tracker.log(known, step)
            except Exception as error:  # a service that is away must not cost the run
                failed = " ".join(str(error).split()) or type(error).__name__
            self.problem(name, failed)

    def say(self, message: str, style: str = "") -> None:
        """Print a line as it is: text of models and users is never read as markup."""
        self.console.print(Text(message, style=style))

    def problem(self, name: str, found: str | None) -> None:
        """Print a problem when it appears, not in every step that it lasts; None ends it."""
        if found is None:
            self._told.discard(name)
        elif name not in self._told:
            self._told.add(name)
            self.say(f"warning: {name}: {found}", "yellow")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the run is busy with: a span, and on a terminal a line while it lasts."""
        with tracing.span(name):
            if self.console.is_terminal:
                with self.console.status(name):
                    yield
            else:
                yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()


def forget_later_steps(path: Path, last_step: int) -> None:
    """Drop the records after ``last_step``, and a line that a crash cut off, from a JSONL file."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except ValueError:
            continue
    replace_text(path, "".join(kept))


def flat(record: dict[str, Any]) -> dict[str, float]:
    """One level: figures by name within a figure become ``figure/name``."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= {f"{name}/{part}": number for part, number in value.items()}
        else:
            found[name] = value
    return found


def _without_nan(value: Any) -> Any:
    # JSON has no NaN; a reader in another language must not choke on the file.
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value

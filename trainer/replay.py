"""Make a logged step again, without a server, and compare.

    python -m trainer replay runs/train --step 7

Starts from the newest checkpoint before the step, or from ``model.path``, and takes every step
since from its saved batch. On a CPU with as many threads, loss and gradient norm come out as they
were logged, to the last bit; where they do not, the software, the data or the machine has changed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console

from trainer.batches import load_batch
from trainer.checkpoint import checkpoints, read_state
from trainer.config import Config
from trainer.config_file import load_config
from trainer.errors import DataError
from trainer.learner import build_learner
from trainer.tally import Update
from trainer.update import learn, training_set

COMPARED = ("loss", "gradient_norm", "kl_sampler", "ratio")
TOLERANCE = 1e-3
"""Relative, for another machine's kernels; what is logged on this one has to match exactly."""


@dataclass(frozen=True)
class Figure:
    """A number of a step as it was logged and as it was computed now."""

    name: str
    logged: float
    replayed: float

    @property
    def equal(self) -> bool:
        """To the last bit; NaN, where there was no update, equals NaN."""
        both_nan = math.isnan(self.logged) and math.isnan(self.replayed)
        return both_nan or self.logged == self.replayed

    @property
    def close(self) -> bool:
        """Within what other kernels may differ by."""
        gap = abs(self.logged - self.replayed)
        return self.equal or gap <= TOLERANCE * max(abs(self.logged), 1e-6)

    def __str__(self) -> str:
        verdict = "equal" if self.equal else f"differ by {abs(self.logged - self.replayed):.2g}"
        return f"{self.name:<14}{self.logged!r:>25}{self.replayed!r:>25}  {verdict}"


@dataclass(frozen=True)
class Replay:
    """A step made again.

    Attributes:
        began: finished steps of the model that it started from; 0 for ``model.path``.
        tokens: that bore loss.
    """

    step: int
    began: int
    tokens: int
    figures: list[Figure]


def replay(run: Path, step: int) -> Replay:
    """Compute ``step`` of the run in directory ``run`` again.

    Raises:
        TitoError: the run has no such step, or a batch since the last checkpoint is missing.
    """
    logged = _logged(run / "metrics.jsonl", step)
    config = load_config(run / "config.toml", [])
    earlier = [c for c in checkpoints(run / "checkpoints") if read_state(c).step < step]
    start = earlier[-1] if earlier else None
    began = read_state(start).step if start else 0
    batches = run / "batches"
    for needed in range(began + 1, step + 1):
        load_batch(batches, needed)  # what is missing is said before a model is loaded
    # A bar would tear the lines that are printed.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    update = _steps(config, start, batches, range(began + 1, step + 1))
    figures = [Figure(name, logged[name], getattr(update, name)) for name in COMPARED]
    return Replay(step, began, update.loss_tokens, figures)


def _steps(config: Config, start: Path | None, batches: Path, steps: range) -> Update:
    learner = build_learner(config, start)
    update = Update()
    for step in steps:
        batch = load_batch(batches, step)
        chosen = training_set(batch.rollout, batch.outcomes, batch.fates, learner)
        update = learn(learner, chosen, config)
    return update


def _logged(metrics: Path, step: int) -> dict[str, float]:
    """The step's line of the log, with NaN where JSON had to say null."""
    if not metrics.exists():
        raise DataError(f"{metrics} does not exist: is {metrics.parent} a run's directory?")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    found: list[dict[str, Any]] = [line for line in lines if line["step"] == step]
    if not found:
        last = lines[-1]["step"] if lines else 0
        raise DataError(f"step {step} is not in {metrics}, which ends with step {last}")
    return {name: math.nan if value is None else value for name, value in found[-1].items()}


def print_replay(console: Console, run: Path, found: Replay) -> bool:
    """Say what came out; returns whether it is what was logged."""
    start = f"checkpoint step-{found.began:06d}" if found.began else "the model at the beginning"
    console.print(
        f"step {found.step} of {run}: {found.step - found.began} steps from {start}, "
        f"{found.tokens} tokens bore loss",
        markup=False,
    )
    console.print(f"{'':<14}{'logged':>25}{'replayed':>25}")
    for figure in found.figures:
        console.print(str(figure), markup=False)
    if all(figure.equal for figure in found.figures):
        console.print("the step is reproduced, to the last bit")
        return True
    if all(figure.close for figure in found.figures):
        console.print("reproduced but for rounding: another machine, or another number of threads")
        return True
    console.print("NOT reproduced: the software, a reward's data or the model's files have changed")
    return False

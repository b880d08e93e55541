"""A run's learning curve, as an image and in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError


@dataclass(frozen=True)
class Curve:
    """What there is to draw, each a list of ``(step, value)``.

    Attributes:
        reward: mean reward of the training samples of each step.
        accuracy: greedy accuracy on held-out problems, whenever it could be measured.
    """

    reward: list[tuple[int, float]]
    accuracy: list[tuple[int, float]]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_curve(run: Path) -> Curve:
    """The curve of a run from the files in its directory."""
    metrics = read_records(run / "metrics.jsonl")
    evaluations = read_records(run / "evaluation.jsonl")
    return Curve(
        [(m["step"], m["reward_mean"]) for m in metrics if m["reward_mean"] is not None],
        accuracies(evaluations),
    )


def accuracies(evaluations: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """``(step, greedy accuracy)`` of the evaluations in which some answer got a verdict."""
    found = [(e["step"], e["greedy"]["accuracy"]) for e in evaluations]
    return [(step, accuracy) for step, accuracy in found if accuracy is not None]


def before_and_after(run: Path) -> tuple[float, float]:
    """Greedy accuracy of a run's first and of its last evaluation.

    Raises:
        TrainerError: in one of the two no answer got a verdict.
    """
    evaluations = read_records(run / "evaluation.jsonl")
    known = dict(accuracies(evaluations))
    first, last = evaluations[0]["step"], evaluations[-1]["step"]
    if unknown := sorted({first, last} - known.keys()):
        steps = " and ".join(map(str, unknown))
        raise TrainerError(f"no answer of the evaluation after step {steps} could be scored")
    return known[first], known[last]


def save_curve(curve: Curve, path: Path) -> None:
    """Draw the curve into a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")  # a machine without a display must be able to draw too
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*curve.reward, strict=True), label="reward of training samples", alpha=0.6)
    axes.plot(*zip(*curve.accuracy, strict=True), "o-", label="held-out accuracy, greedy")
    axes.set(xlabel="step", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def terminal_curve(curve: Curve, *, width: int = 80, height: int = 18) -> str:
    """The curve in characters, with ANSI colours."""
    import plotext

    figure = plotext.figure.clear()
    # Two markers, because where there is no colour they are all that tells the lines apart.
    for points, marker, label in (
        (curve.reward, ".", "reward of training samples"),
        (curve.accuracy, "#", "held-out accuracy, greedy"),
    ):
        steps, values = map(list, zip(*points, strict=True))
        figure.draw(figure.signal(steps, values, marker=marker).lines().label(label))
    figure.ruler("y").lim(0, 1)
    figure.theme("simple")
    figure.plot_size(width, height)
    return str(figure.build())

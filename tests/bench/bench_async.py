"""What sampling ahead gains over taking turns, at which accuracy.

    python -m tests.bench.bench_async [--steps 20] [--repeats 3] [--staleness 1 2] [--model DIR]

The demonstration's policy learns the demonstration's sums from a real server on this machine, with
the same number of samples in each mode. Server and trainer have one thread each, so that on two
cores or more neither takes the other's time. Modes take turns within a repeat, which has a seed of
its own. Prints one JSON line for each result: medians over the repeats, and ratios to the
synchronous run of the same repeat.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tests.bench.results import median, report
from trainer.curve import before_and_after, read_records
from trainer.demo import demo_config, rollout_server
from trainer.tiny_policy import ensure_tiny_policy_at
from trainer.train import train


@dataclass(frozen=True)
class Outcome:
    """One training run.

    Attributes:
        seconds: of all steps, without evaluations and checkpoints.
        samples_per_second: trained or not.
        accuracy_before, accuracy_after: greedy, on held-out problems.
        trainer_idle, sampler_idle: shares of the time.
        staleness: mean over the steps, of the oldest sample.
        length, trained_length: tokens of a completion, mean over the steps.
    """

    seconds: float
    samples_per_second: float
    accuracy_before: float
    accuracy_after: float
    trainer_idle: float
    sampler_idle: float
    staleness: float
    length: float
    trained_length: float


def measure(
    model: Path, url: str, folder: Path, max_staleness: int, **train_options: Any
) -> Outcome:
    """Train once and read the run's own records."""
    options = {"max_staleness": max_staleness, "checkpoint_every": 0} | train_options
    overrides = [f"train.{name}={value}" for name, value in options.items()]
    overrides += ["evaluation.every=0", "server.publish_dtype=bfloat16"]
    config = demo_config(model, url, folder, overrides)
    assert train(config, console=Console(file=io.StringIO()))
    steps = read_records(folder / "metrics.jsonl")
    before, after = before_and_after(folder)
    seconds = sum(s["rollout_seconds"] + s["update_seconds"] + s["publish_seconds"] for s in steps)
    samples = config.rollout.prompts_per_step * config.rollout.group_size * len(steps)

    def mean(name: str) -> float:
        return statistics.fmean(step[name] for step in steps)

    return Outcome(
        seconds=seconds,
        samples_per_second=samples / seconds,
        accuracy_before=before,
        accuracy_after=after,
        trainer_idle=mean("trainer_idle_seconds") * len(steps) / seconds,
        sampler_idle=mean("sampler_idle_seconds") * len(steps) / seconds,
        staleness=mean("staleness"),
        length=mean("length"),
        trained_length=mean("trained_length"),
    )


def medians(outcomes: list[Outcome]) -> dict[str, float]:
    """Of each figure by itself."""
    records = [asdict(outcome) for outcome in outcomes]
    return {name: median(r[name] for r in records) for name in records[0]}


def main() -> None:
    """All modes in turn, then what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", type=Path, help="the tiny policy, made there if it is missing")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    outcomes: dict[int, list[Outcome]] = {bound: [] for bound in (0, *args.staleness)}
    with tempfile.TemporaryDirectory() as scratch:
        model = ensure_tiny_policy_at(args.model or Path(scratch) / "policy")
        with rollout_server(model, Path(scratch) / "server.log") as url:
            for seed in range(args.repeats):
                for bound, found in outcomes.items():
                    folder = Path(scratch) / f"run-{seed}-{bound}"
                    outcome = measure(model, url, folder, bound, steps=args.steps, seed=seed)
                    found.append(outcome)
                    report(f"run of max_staleness {bound}", seed=seed, **asdict(outcome))
    for bound, found in outcomes.items():
        report(f"max_staleness {bound}", repeats=args.repeats, **medians(found))
    for bound in args.staleness:
        pairs = list(zip(outcomes[0], outcomes[bound], strict=True))
        report(
            f"max_staleness {bound} against 0",
            speed=median(a.seconds / b.seconds for a, b in pairs),
            accuracy_difference=median(b.accuracy_after - a.accuracy_after for a, b in pairs),
        )


if __name__ == "__main__":
    main()

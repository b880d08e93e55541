"""One optimizer step of GRPO, beside TRL's GRPOTrainer on the same model and samples.

    pip install ".[trainer,bench]"
    python -m tests.bench.bench_trainer [--vocabulary 50000] [--samples 8] [--device cpu]
    python -m tests.bench.bench_trainer --dims 0.6b [--contenders NAME ...] [--profile FILE]

All get a Qwen3-shaped model of random weights, the same samples with the same rewards, one
micro-batch, the loss of DAPO without a KL term, and AdamW. Each runs in a process of its own, in
turn. Nothing is sampled: TRL takes the samples through its ``rollout_func``, and what it spends
before its first forward pass (padding, decoding, rewards, advantages) is not counted. That all
do the same work is checked: the norms of their first gradients must agree. ``plain`` is a model of
``transformers`` as it comes, on padded rows, with logits of all completion tokens at once, or with
those of 2048 tokens at a time and activation checkpointing.

With ``--dims`` model and vocabulary have the sizes of Qwen3-0.6B or 4B, and samples are 16 of about
1,000 tokens, on a GPU. FLOP utilisation counts 6 for each parameter and token, and in ``with
attention`` those of the causal half of the attention too, as a share of ``--peak``.

Prints one JSON line for each result, medians over all steps but each process's first two. Memory is
the peak of the resident set during the steps; ``grown`` leaves out what was there before them. On
a GPU the weights are bfloat16, and memory is what torch allocates there. ``--profile`` writes to a
file which kernels the steps of this trainer's contenders spend their time in.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.bench.models import save_random
from tests.bench.results import median, report
from tests.bench.trainer_contenders import CONTENDERS, TRL, run
from tests.bench.trainer_work import DTYPES, REAL, samples_of, shape_of

ROUNDS = {"cuda": 0.05, "cpu": 0.001}
"""How far gradients' norms may lie apart, in bfloat16 and in float32."""

Found = dict[str, Any]
"""What a contender's process tells, see ``trainer_steps.Steps.result``."""


class Comparison:
    """Runs the contenders that were asked for, in turn, and reports what they tell.

    Args:
        model: directory for the model.
    """

    def __init__(self, arguments: argparse.Namespace, model: str) -> None:
        self._arguments, self._model = arguments, model
        self._cuda = arguments.device == "cuda"
        samples = samples_of(arguments)
        self._lengths = [len(s.prompt_ids) + len(s.completion_ids) for s in samples]
        self._runs: dict[str, list[Found]] = {name: [] for name in arguments.contenders}
        self._parameters = save_random(
            Path(model), shape_of(arguments), DTYPES[arguments.device], arguments.device
        )
        if self._cuda:
            torch.cuda.empty_cache()

    def report_work(self) -> None:
        """What all of them are given."""
        report(
            "samples",
            **shape_of(self._arguments),
            parameters=self._parameters,
            tokens=sum(self._lengths),
            padded=max(self._lengths) * len(self._lengths),
            longest=max(self._lengths),
            threads=torch.get_num_threads(),
            device=torch.cuda.get_device_name() if self._cuda else "cpu",
        )

    def run(self) -> None:
        """All of them, so many times."""
        with ThreadPoolExecutor(len(self._runs) if self._arguments.gate else 1) as pool:
            for _ in range(self._arguments.repeats):
                list(pool.map(self._once, self._runs))

    def _once(self, name: str) -> None:
        found = contend(name, self._model, self._arguments)
        if isinstance(found, str):
            report(name, failed=found)
        else:
            self._runs[name].append(found)
            report(name, **self._figures([found]))

    def report_medians(self) -> None:
        """Each by itself, and beside TRL.

        Raises:
            SystemExit: they did not do the same work.
        """
        all_found = {name: found for name, found in self._runs.items() if found}
        if self._arguments.repeats > 1:
            for name, found in all_found.items():
                report(f"{name}, median", **self._figures(found))
        medians = {name: summarise(found) for name, found in all_found.items()}
        norms = [numbers["gradient_norm"] for numbers in medians.values()]
        if max(norms) > (1 + ROUNDS[self._arguments.device]) * min(norms):
            raise SystemExit(f"they did not do the same work: gradient norms {norms}")
        keys = ("seconds", "cpu_seconds", "peak_mib", "grown_mib")
        for trl in [name for name in TRL if name in medians]:
            for name in [name for name in medians if name not in TRL]:
                report(f"{name} / {trl}", **{k: medians[name][k] / medians[trl][k] for k in keys})

    def _figures(self, found: Sequence[Found]) -> dict[str, float]:
        numbers = summarise(found)
        numbers["tokens_per_second"] = sum(self._lengths) / numbers["seconds"]
        return numbers | self._utilisation(numbers["seconds"]) if self._cuda else numbers

    def _utilisation(self, seconds: float) -> dict[str, float]:
        """Model FLOPs of a step, forward and backward, as shares of what the GPU could do.

        Attention multiplies queries with keys and weights with values: ``2 * 2 L^2 heads head_dim``
        FLOPs for a sequence of L tokens, of which the causal mask leaves half, and twice as many
        again in the backward pass.
        """
        shape = shape_of(self._arguments)
        width = shape["num_attention_heads"] * shape["head_dim"]
        squares = sum(length**2 for length in self._lengths)
        attention = 6 * shape["num_hidden_layers"] * width * squares
        model = 6 * self._parameters * sum(self._lengths)
        most = self._arguments.peak * 1e12 * seconds
        return {"utilisation": model / most, "with_attention": (model + attention) / most}


def summarise(found: Sequence[Found]) -> dict[str, float]:
    """Medians over all runs, of steps over all steps of all runs."""

    def all_of(key: str) -> list[float]:
        values = [one[key] for one in found]
        return [step for one in values for step in one] if isinstance(values[0], list) else values

    return {key: median(all_of(key)) for key in found[0]}


def contend(name: str, model: str, arguments: argparse.Namespace) -> Found | str:
    """Run one contender in a process of its own; if it fails, what it said last."""
    command = [sys.executable, "-m", "tests.bench.bench_trainer"]
    command += ["--contender", name, "--model", model]
    for option in ("vocabulary", "samples", "steps", "device", "dims", "gate", "profile"):
        if (value := getattr(arguments, option)) is not None:
            command += [f"--{option}", str(value)]
    environment = os.environ | {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        # What training needs comes in many sizes; without this some of it lies idle in pieces.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    limit = arguments.limit
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"took more than {limit} seconds"
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return done.stderr.strip().rpartition("\n")[2][:300]
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One optimizer step, beside TRL.")
    parser.add_argument("--dims", choices=REAL, help="sizes of a real model, on a GPU")
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--samples", type=int, help="a multiple of 4; 8, or 16 with --dims")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--steps", type=int, default=5, help="of each process; two are left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of the GPU, bfloat16")
    parser.add_argument("--profile", help="file that kernels' times are added to")
    parser.add_argument(
        "--gate",
        help="start all processes together, and let them take turns by locking this file",
    )
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each process")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dims:
        arguments.device = "cuda"
    arguments.samples = arguments.samples or (16 if arguments.dims else 8)
    arguments.contenders = arguments.contenders or (
        CONTENDERS if arguments.dims else ("tito", "tito padded", "trl")
    )
    return arguments


def main() -> None:
    """Compare, or be one of those that are compared."""
    arguments = _arguments()
    if arguments.contender is not None:
        print(json.dumps(run(arguments.contender, arguments)))
        return
    shared_memory = "/dev/shm" if arguments.device == "cuda" else None
    with tempfile.TemporaryDirectory(dir=shared_memory) as model:
        comparison = Comparison(arguments, model)
        comparison.report_work()
        comparison.run()
    comparison.report_medians()


if __name__ == "__main__":
    main()

"""A model spread over several GPUs against the same on one: figures, speed and memory.

    pip install ".[trainer]"
    python -m tests.bench.bench_sharded [--ranks 2] [--dims 0.6b] [--device cuda]

Random weights of Qwen3's dimensions take five optimizer steps on fixed samples: on one GPU, on one
with micro-batches of half the size, and under torchrun on several. The second says how far rounding
alone moves loss and gradient norm in bfloat16; the third should not be much further off.

Prints one JSON line for each, and one with the largest relative differences. Tokens per second are
the median over all steps but the first; ``loading_s`` is the time to make all tensors ready for
publishing, without sending them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.bench.models import DIMS, save_random
from tests.bench.results import median, report
from trainer.config_file import parse_config, to_toml

STEPS = Path(__file__).parents[1] / "trainer" / "sharded_steps.py"
TINY = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
DIMENSIONS = {"tiny": TINY, "0.6b": DIMS["0.6b"], "4b": DIMS["4b"]}
SINGLE = (sys.executable,)


def several(ranks: int) -> tuple[str, ...]:
    """Launches so many ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return (sys.executable, *launcher)


def write_config(model: Path, device: str, limit: int, lr: float) -> Path:
    """A run of that model, with micro-batches of at most ``limit`` tokens."""
    config = parse_config(
        {
            "model": {"path": str(model), "device": device, "dtype": "bfloat16"},
            "objective": {"name": "dapo", "clip_high": 0.2},
            "optimizer": {"lr": lr},
            "train": {"micro_batch_tokens": limit},
        }
    )
    file = model / f"{limit}.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    return file


def measure(
    launcher: tuple[str, ...], config: Path, args: argparse.Namespace, name: str
) -> list[dict[str, Any]]:
    """Reports a launch; returns the figures of its steps."""
    out = config.with_suffix(".pt")
    work = ["--without-weights", "--steps", "5", "--samples", str(args.samples)]
    lengths = ["--shortest", str(args.longest // 8), "--longest", str(args.longest)]
    ended = subprocess.run(
        [*launcher, str(STEPS), str(out), str(config), *work, *lengths],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (done,) = torch.load(out, weights_only=True)
    figures: list[dict[str, Any]] = done["figures"]
    report(
        f"trainer, {args.dims}, bfloat16, {name}",
        loss=[f["loss"] for f in figures],
        gradient_norm=[f["gradient_norm"] for f in figures],
        tokens_per_second=round(median(done["tokens_per_second"][1:])),
        peak_gib=sorted(float(x) for x in re.findall(r"at most ([\d.]+) GiB", ended.stdout)),
        loading_s=round(done["loading_s"], 3),
    )
    return figures


def difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """The largest of any step, relative to the largest figure."""
    return {
        name: max(abs(a[name] - b[name]) for a, b in zip(one, other, strict=True))
        / max(abs(a[name]) for a in one)
        for name in ("loss", "gradient_norm", "kl_sampler")
    }


def main() -> None:
    """Three launches, and how far they lie apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dims", choices=DIMENSIONS, default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1600)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch)
        save_random(model, DIMENSIONS[args.dims], torch.bfloat16, args.device)
        whole, half = (
            write_config(model, args.device, limit, args.lr)
            for limit in (args.micro_batch_tokens, args.micro_batch_tokens // 2)
        )
        one = measure(SINGLE, whole, args, "1 rank")
        spread = measure(several(args.ranks), whole, args, f"{args.ranks} ranks")
        split = measure(SINGLE, half, args, "1 rank, half the micro-batch")
    report(f"{args.ranks} ranks against 1, relative", **difference(one, spread))
    report("half the micro-batch against the whole, relative", **difference(one, split))


if __name__ == "__main__":
    main()

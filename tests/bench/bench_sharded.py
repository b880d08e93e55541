"""A model spread over several GPUs against the same on one: figures, speed and memory.

    pip install ".[trainer]"
    python tests/bench/bench_sharded.py [--ranks 2] [--dims 0.6b] [--device cuda]

Random weights of Qwen3's dimensions take five optimizer steps on fixed samples: on one GPU, on one
with micro-batches of half the size, and under torchrun on several. The second says how far rounding
alone moves loss and gradient norm in bfloat16; the third should not be much further off.

Prints one JSON line for each, and one with the largest relative differences. Tokens per second are
the median over all steps but the first; ``loading_s`` is the time to make all tensors ready for
publishing, without sending them.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.config_file import parse_config, to_toml
from trainer.tiny_policy import build_tokenizer

STEPS = Path(__file__).parents[1] / "trainer" / "sharded_steps.py"
DIMENSIONS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    },
    "0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4b": {
        "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip
SINGLE = (sys.executable,)


def several(ranks: int) -> tuple[str, ...]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return (sys.executable, *launcher)


def report(what: str, **numbers: Any) -> None:
    """One result as one line."""
    print(json.dumps({"bench": what, **numbers}), flush=True)


def write_model(dims: str, device: str, to: Path) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**DIMENSIONS[dims], tie_word_embeddings=True))
    model.bfloat16().save_pretrained(to)
    build_tokenizer().save_pretrained(to)


def write_config(model: Path, device: str, limit: int, lr: float) -> Path:
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
        tokens_per_second=round(statistics.median(done["tokens_per_second"][1:])),
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
    parser = argparse.ArgumentParser()
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
        write_model(args.dims, args.device, model)
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

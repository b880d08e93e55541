"""How fast a small model learns small sums, beside TRL with the same budget of samples.

    pip install ".[server,trainer,bench]"
    python -m tests.bench.bench_loop --model DIR [--config FILE] [--steps 30] [--target 0.8]
        [--contenders sync sleep1 sleep2 async trl] [--out DIR] [section.key=value ...]

Everybody gets the same prompts in the same order, groups of the same size, the same rewards, loss,
learning rate and number of optimizer steps, and an engine with the same settings. Ours is a server
and a trainer, two processes on this machine: in turns, with the server asleep while the trainer
steps, or sampling one step ahead. TRL's ``GRPOTrainer`` has vLLM within its own process
(``colocate``, asleep while it steps) on a GPU; on a CPU, where that does not run, it samples with
transformers. Each contender has a process of its own. All of them start at once, then they take
turns. Starting and evaluations are left out of the seconds. Prints one JSON line for each run, and
what they say meanwhile to standard error; one that fails or hangs does not cost the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.bench.loop_contenders import OURS, Contender, Found
from tests.bench.loop_trl import CONTEXT, MEMORY_SHARE
from tests.bench.results import median, report
from trainer.config import Config
from trainer.config_file import load_config
from trainer.demo import rollout_server
from trainer.errors import TrainerError

CONFIG = Path(__file__).parents[2] / "trainer" / "configs" / "smollm2_arithmetic.toml"
DEFAULT = ["sync", "async", "trl"]
NOWHERE = "http://127.0.0.1:1"
SMOOTHED_STEPS = 3
START_S = 300.0


def main() -> None:
    """Start all contenders, then let one after the other make its steps."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arguments = _arguments()
    with ExitStack() as stack:
        scratch = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scratch.mkdir(parents=True, exist_ok=True)
        flags, engine = _engine(_configured("sync", NOWHERE, scratch, arguments), arguments)
        contenders = [
            Contender(name, _configured(name, NOWHERE, scratch, arguments), engine)
            for name in arguments.contenders
        ]
        for contender in contenders:
            stack.callback(contender.end)
        url = _served(contenders, Path(arguments.model), scratch / "server.log", flags, stack)
        for contender in contenders:
            contender.wait_ready(START_S)
        while arguments.gate and not arguments.gate.exists():
            time.sleep(0.1)
        for contender in contenders:
            config = _configured(contender.name, url, scratch, arguments)
            _report(contender.name, contender.run(config, arguments.limit), arguments.target)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the small model")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.8, help="mean reward to be reached")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds of a run, at most")
    parser.add_argument("--contenders", nargs="+", choices=[*OURS, "trl"], default=DEFAULT)
    parser.add_argument("--out", type=Path, help="where the runs' files are kept")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, for nobody")
    parser.add_argument("--kv-gib", type=float, help="of each engine, instead of its share")
    parser.add_argument("--gate", type=Path, help="the first run waits until this file is there")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args()


def _configured(name: str, url: str, scratch: Path, arguments: argparse.Namespace) -> Config:
    """A contender's configuration; TRL takes from it what it has, too."""
    known = {"model.path": arguments.model, "server.url": url, "train.output": str(scratch / name)}
    settings = [f"{key}={json.dumps(value)}" for key, value in known.items()]
    settings += [f"train.steps={arguments.steps}", "evaluation.every=0"]
    settings += [*OURS.get(name, OURS["sync"]), *arguments.overrides]
    return load_config(arguments.config, settings)


def _engine(config: Config, arguments: argparse.Namespace) -> tuple[list[str], Found]:
    """The settings of both engines: flags of ours, arguments of vLLM's in TRL's process."""
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    flags = ["--dtype", config.server.publish_dtype, "--max-num-seqs", str(samples)]
    flags += ["--max-model-len", str(CONTEXT), "--memory-share", str(MEMORY_SHARE)]
    engine: Found = {"dtype": config.server.publish_dtype, "max_num_seqs": samples}
    if not arguments.eager and torch.cuda.is_available():
        flags.append("--no-eager")
    engine["enforce_eager"] = arguments.eager
    if arguments.kv_gib:
        flags += ["--kv-cache-gib", str(arguments.kv_gib)]
        engine["kv_cache_memory_bytes"] = int(arguments.kv_gib * 2**30)
    return flags, engine


def _served(
    contenders: Sequence[Contender], model: Path, log: Path, flags: list[str], stack: ExitStack
) -> str:
    """Address of the server for those that need one; where it does not start, they are out."""
    if any(contender.name in OURS for contender in contenders):
        try:
            return stack.enter_context(rollout_server(model, log, *flags))
        except TrainerError as error:
            for contender in contenders:
                contender.refuse(str(error))
    return NOWHERE


def _report(name: str, found: Found, target: float) -> None:
    numbers: Found = {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    if seconds := found.pop("seconds", None):
        rewards = found["rewards"]
        numbers |= {
            "steps": len(seconds),
            "seconds": sum(seconds),
            "seconds_of_a_step": median(seconds),
            f"seconds_to_reward_{target}": _reached_at(rewards, seconds, target),
            "last_rewards": statistics.fmean(rewards[-SMOOTHED_STEPS:]),
        }
    report(f"loop: {name}", **numbers, **found)


def _reached_at(rewards: Sequence[float], seconds: Sequence[float], target: float) -> float | None:
    """Seconds until the mean reward of some steps in a row was so high; None if it never was."""
    for end in range(SMOOTHED_STEPS, len(rewards) + 1):
        if statistics.fmean(rewards[end - SMOOTHED_STEPS : end]) >= target:
            return sum(seconds[:end])
    return None


if __name__ == "__main__":
    main()

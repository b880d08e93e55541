"""How fast a small model learns small sums, beside TRL with the same budget of samples.

    pip install ".[server,trainer,bench]"
    python tests/bench/bench_loop.py --model DIR [--config FILE] [--steps 30] [--target 0.8]
        [--contenders sync sleep1 sleep2 async trl] [section.key=value ...]

Everybody gets the same prompts in the same order, groups of the same size, the same rewards, loss,
learning rate and number of optimizer steps. Ours is a server and a trainer, two processes on this
machine: in turns, with the server asleep while the trainer steps, or sampling one step ahead. TRL's
``GRPOTrainer`` has vLLM within its own process (``colocate``, asleep while it steps) on a GPU;
on a CPU, where that does not run, it samples with transformers. Each contender has a process of its
own. Starting and evaluations are left out of the seconds. Prints one JSON line for each run.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainer.config import Config
from trainer.config_file import load_config
from trainer.curve import read_records
from trainer.demo import rollout_server
from trainer.prompts import held_out_tasks, training_prompts
from trainer.rewards.functions import numeric
from trainer.train import train

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CONFIG = Path(__file__).parents[2] / "trainer" / "configs" / "smollm2_arithmetic.toml"
OURS = {
    "sync": ("server.sleep=0", "train.max_staleness=0"),
    "sleep1": ("server.sleep=1", "train.max_staleness=0"),
    "sleep2": ("server.sleep=2", "train.max_staleness=0"),
    "async": ("server.sleep=0", "train.max_staleness=1"),
}
CONTEXT = 512
MEMORY_SHARE = 0.3
SMOOTHED_STEPS = 3
TRL_MICRO_BATCH = 128


def run_ours(config: Config) -> dict[str, Any]:
    """One run against a server that is up; its own records say how it went."""
    assert train(config, console=Console(file=io.StringIO()))
    output = Path(config.train.output)
    steps = read_records(output / "metrics.jsonl")
    evaluations = read_records(output / "evaluation.jsonl")
    seconds = [s["rollout_seconds"] + s["update_seconds"] + s["publish_seconds"] for s in steps]
    idle = {
        f"{who}_idle": sum(s[f"{who}_idle_seconds"] for s in steps) / sum(seconds)
        for who in ("trainer", "sampler")
    }
    return {
        "seconds": seconds,
        "rewards": [s["reward_mean"] for s in steps],
        "before": evaluations[0]["greedy"]["accuracy"],
        "after": evaluations[-1]["greedy"]["accuracy"],
        **idle,
    }


def run_trl(config: Config) -> dict[str, Any]:
    """The same with TRL's trainer, within this process."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    tasks = training_prompts(config).take(0, config.train.steps * config.rollout.prompts_per_step)
    rows = {"prompt": [t.prompt for t in tasks], "answer": [t.reference for t in tasks]}

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [numeric(text=t, reference=a) for t, a in zip(texts, answer, strict=True)]

    trainer = GRPOTrainer(
        model=config.model.path,
        reward_funcs=reward,
        args=_trl_options(config),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(config.model.path),
    )
    before = _accuracy(trainer, config)
    timer = _timer()
    trainer.add_callback(timer)
    trainer.train()
    return {
        "seconds": timer.seconds,
        "rewards": [e["reward"] for e in trainer.state.log_history if "reward" in e],
        "before": before,
        "after": _accuracy(trainer, config),
    }


def _trl_options(config: Config) -> Any:
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    micro_batch = min(TRL_MICRO_BATCH, samples)
    return GRPOConfig(
        output_dir=config.train.output,
        use_vllm=on_gpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=MEMORY_SHARE,
        vllm_max_model_length=CONTEXT,
        vllm_enable_sleep_mode=on_gpu,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=config.rollout.group_size,
        max_completion_length=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        max_steps=config.train.steps,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        learning_rate=config.optimizer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=config.optimizer.warmup_updates,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_gradient_norm,
        model_init_kwargs={"dtype": "float32"},
        bf16=on_gpu,  # its default: autocast over float32 weights
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def _timer() -> Any:
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        """Seconds of each optimizer step, the samples for it included."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds.append(now - self.started)
            self.started = now

    return Timer()


def _accuracy(trainer: Any, config: Config) -> float:
    """Greedy, on the held-out problems, with transformers."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    right = []
    model.eval()
    for task in held_out_tasks(config):
        inputs = tokenizer.apply_chat_template(
            task.prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        ids = model.generate(
            **inputs, do_sample=False, max_new_tokens=config.rollout.max_tokens, use_cache=True
        )
        text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right.append(numeric(text=text, reference=task.reference))
    model.train()
    return statistics.fmean(right)


def reached_at(rewards: Sequence[float], seconds: Sequence[float], target: float) -> float | None:
    """Seconds until the mean reward of some steps in a row was so high; None if it never was."""
    for end in range(SMOOTHED_STEPS, len(rewards) + 1):
        if statistics.fmean(rewards[end - SMOOTHED_STEPS : end]) >= target:
            return sum(seconds[:end])
    return None


def report(name: str, found: dict[str, Any], target: float) -> None:
    """One result as one line."""
    seconds, rewards = found.pop("seconds"), found.pop("rewards")
    document = {
        "bench": f"loop: {name}",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "steps": len(seconds),
        "seconds": sum(seconds),
        "seconds_of_a_step": statistics.median(seconds),
        f"seconds_to_reward_{target}": reached_at(rewards, seconds, target),
        "last_rewards": statistics.fmean(rewards[-SMOOTHED_STEPS:]),
        **found,
    }
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in document.items()}
    print(json.dumps(rounded), flush=True)


def in_a_process(run: Any, config: Config) -> dict[str, Any]:
    """What a contender found in a process of its own, whose memory goes with it."""
    # An executor's processes, other than a Pool's, may have children, which vLLM wants.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found: dict[str, Any] = pool.submit(run, config).result()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the small model")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.8, help="mean reward to be reached")
    parser.add_argument(
        "--contenders", nargs="+", choices=[*OURS, "trl"], default=["sync", "async", "trl"]
    )
    parser.add_argument("--server-log", type=Path, help="where the server's log is kept")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:

        def configured(name: str, url: str, *more: str) -> Config:
            known = {"model.path": arguments.model, "server.url": url}
            known["train.output"] = str(Path(scratch) / name)
            settings = [f"{key}={json.dumps(value)}" for key, value in known.items()]
            settings += [
                f"train.steps={arguments.steps}",
                "evaluation.every=0",
                *more,
                *arguments.overrides,
            ]
            return load_config(arguments.config, settings)

        if ours := [name for name in arguments.contenders if name in OURS]:
            log = arguments.server_log or Path(scratch) / "server.log"
            options = ["--max-model-len", str(CONTEXT), "--memory-share", str(MEMORY_SHARE)]
            options += ["--no-eager"] if torch.cuda.is_available() else []
            with rollout_server(Path(arguments.model), log, *options) as url:
                for name in ours:
                    found = in_a_process(run_ours, configured(name, url, *OURS[name]))
                    report(name, found, arguments.target)
        if "trl" in arguments.contenders:
            config = configured("trl", "http://127.0.0.1:1", *OURS["sync"])
            report("trl", in_a_process(run_trl, config), arguments.target)


if __name__ == "__main__":
    main()

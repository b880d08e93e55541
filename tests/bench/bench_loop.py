"""How fast a small model learns small sums, beside TRL with the same budget of samples.

    pip install ".[server,trainer,bench]"
    python tests/bench/bench_loop.py --model DIR [--config FILE] [--steps 30] [--target 0.8]
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
import contextlib
import functools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainer.config import Config
from trainer.config_file import load_config
from trainer.curve import read_records
from trainer.demo import rollout_server
from trainer.errors import TrainerError
from trainer.policy import load_policy
from trainer.prompts import held_out_tasks, training_prompts
from trainer.rewards.functions import numeric
from trainer.train import train

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CONFIG = Path(__file__).parents[2] / "trainer" / "configs" / "smollm2_arithmetic.toml"
DEFAULT = ["sync", "async", "trl"]
OURS = {
    "sync": ("server.sleep=0", "train.max_staleness=0"),
    "sleep1": ("server.sleep=1", "train.max_staleness=0"),
    "sleep2": ("server.sleep=2", "train.max_staleness=0"),
    "async": ("server.sleep=0", "train.max_staleness=1"),
    "half": ("server.sleep=1", "train.max_staleness=0", "model.dtype=bfloat16"),
}
CONTEXT = 512
MEMORY_SHARE = 0.3
NOWHERE = "http://127.0.0.1:1"
SMOOTHED_STEPS = 3
TRL_MICRO_BATCH = 128
START_S, END_S = 300.0, 60.0
"""Patience with starting, and with evaluations and checkpoints."""

Found = dict[str, Any]
Run = Callable[[Config, float], Found]
"""Makes the steps, or as many as there are seconds for."""


def prepare_ours(config: Config, _: Found) -> Run:
    """Do once what is slow when it is done for the first time."""
    load_policy(config.model.path, device="cuda" if torch.cuda.is_available() else "cpu")
    return run_ours


def run_ours(config: Config, limit: float) -> Found:
    """One run against a server that is up; its own records say how it went."""
    # It ends with the step that it is in, as if it were told to by a person.
    timer = threading.Timer(limit, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    train(config, console=Console(file=sys.stderr, width=200))
    timer.cancel()
    output = Path(config.train.output)
    steps = read_records(output / "metrics.jsonl")
    evaluations = read_records(output / "evaluation.jsonl")
    parts = [[s[f"{p}_seconds"] for s in steps] for p in ("rollout", "update", "publish")]
    seconds = [sum(step) for step in zip(*parts, strict=True)]
    idle = {
        f"{who}_idle": sum(s[f"{who}_idle_seconds"] for s in steps) / sum(seconds)
        for who in ("trainer", "sampler")
    }
    return {
        "seconds": seconds,
        "rewards": [s["reward_mean"] for s in steps],
        "accuracies": [(e["step"], e["greedy"]["accuracy"]) for e in evaluations],
        "sampling_updating_publishing": [statistics.median(part) for part in parts],
        "kl_sampler": [s["kl_sampler"] for s in steps],
        **idle,
    }


def prepare_trl(config: Config, engine: Found) -> Run:
    """The same with TRL's trainer, within this process, its engine included."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer
    from trl.generation import vllm_generation

    if torch.cuda.is_available():  # what its own options have no names for
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, **engine)
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
    return functools.partial(run_trl, trainer, _accuracy(trainer, config))


def run_trl(trainer: Any, before: float, config: Config, limit: float) -> Found:
    """Let it make its steps."""
    timer = _timer(limit)
    trainer.add_callback(timer)
    trainer.train()
    return {
        "seconds": timer.seconds,
        "rewards": [e["reward"] for e in trainer.state.log_history if "reward" in e],
        "accuracies": [(0, before), (len(timer.seconds), _accuracy(trainer, config))],
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


def _timer(limit: float) -> Any:
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        """Seconds of each optimizer step, the samples for it included."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *told: Any, **_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds.append(now - self.started)
            self.started = now
            _, _, control = told
            control.should_training_stop |= sum(self.seconds) > limit

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


class Contender:
    """A run in a process of its own, whose memory goes with it; it starts at once.

    Args:
        engine: vLLM's settings, for one that has its engine in its process.
    """

    def __init__(self, name: str, config: Config, engine: Found) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        prepare = prepare_ours if name in OURS else prepare_trl
        self._process = context.Process(target=_contend, args=(theirs, prepare, config, engine))
        self._process.start()
        theirs.close()
        self.told: Found | None = None

    def wait_ready(self, seconds: float) -> None:
        """Wait until it can go on, or cannot."""
        self.told = self.told or self._hear(seconds)

    def refuse(self, why: str) -> None:
        """There is no server for it, if it needs one."""
        if self.name in OURS:
            self.told = {"error": why}

    def run(self, config: Config, limit: float) -> Found:
        """What it found; its ``error`` if it failed."""
        if not self.told:
            self._pipe.send((config, limit))
            self.told = self._hear(limit + END_S)
        self.end()
        return self.told

    def _hear(self, seconds: float) -> Found:
        with contextlib.suppress(EOFError):
            if not self._pipe.poll(seconds):
                self.end()
                return {"error": f"nothing was heard for {seconds:.0f} s"}
            heard: Found = self._pipe.recv()
            return heard
        return {"error": "it died"}

    def end(self) -> None:
        """It has no more turn."""
        self._process.kill()
        self._process.join()


def _contend(pipe: Connection, prepare: Any, config: Config, engine: Found) -> None:
    os.dup2(2, 1)  # results alone go to standard output
    try:
        run: Run = prepare(config, engine)
        pipe.send({})
        pipe.send(run(*pipe.recv()))
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"[:2000]})
    # What vLLM leaves running in this process would keep it.
    sys.stderr.flush()
    os._exit(0)


def reached_at(rewards: Sequence[float], seconds: Sequence[float], target: float) -> float | None:
    """Seconds until the mean reward of some steps in a row was so high; None if it never was."""
    for end in range(SMOOTHED_STEPS, len(rewards) + 1):
        if statistics.fmean(rewards[end - SMOOTHED_STEPS : end]) >= target:
            return sum(seconds[:end])
    return None


def report(name: str, found: Found, target: float) -> None:
    """One result as one line."""
    document: Found = {
        "bench": f"loop: {name}",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    if seconds := found.pop("seconds", None):
        rewards = found["rewards"]
        document |= {
            "steps": len(seconds),
            "seconds": sum(seconds),
            "seconds_of_a_step": statistics.median(seconds),
            f"seconds_to_reward_{target}": reached_at(rewards, seconds, target),
            "last_rewards": statistics.fmean(rewards[-SMOOTHED_STEPS:]),
        }
    print(json.dumps(_rounded(document | found)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


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


def main() -> None:
    arguments = _arguments()
    with contextlib.ExitStack() as stack:
        scratch = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scratch.mkdir(parents=True, exist_ok=True)

        def configured(name: str, url: str) -> Config:
            known = {"model.path": arguments.model, "server.url": url}
            known["train.output"] = str(scratch / name)
            settings = [f"{key}={json.dumps(value)}" for key, value in known.items()]
            settings += [f"train.steps={arguments.steps}", "evaluation.every=0"]
            settings += [*OURS.get(name, OURS["sync"]), *arguments.overrides]
            return load_config(arguments.config, settings)

        flags, engine = _engine(configured("sync", NOWHERE), arguments)
        contenders = [Contender(n, configured(n, NOWHERE), engine) for n in arguments.contenders]
        for contender in contenders:
            stack.callback(contender.end)
        url = NOWHERE
        if any(contender.name in OURS for contender in contenders):
            try:
                server = rollout_server(Path(arguments.model), scratch / "server.log", *flags)
                url = stack.enter_context(server)
            except TrainerError as error:
                for contender in contenders:
                    contender.refuse(str(error))
        for contender in contenders:
            contender.wait_ready(START_S)
        while arguments.gate and not arguments.gate.exists():
            time.sleep(0.1)
        for contender in contenders:
            config = configured(contender.name, url)
            report(contender.name, contender.run(config, arguments.limit), arguments.target)


if __name__ == "__main__":
    main()

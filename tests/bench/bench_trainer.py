"""One optimizer step of GRPO, beside TRL's GRPOTrainer on the same model and samples.

    pip install ".[trainer,bench]"
    python tests/bench/bench_trainer.py [--vocabulary 50000] [--samples 8] [--device cpu]

Both get a Qwen3-shaped model of random weights, the same samples with the same rewards, one
micro-batch, the loss of DAPO without a KL term, and AdamW. Each runs in a process of its own, in
turn. Nothing is sampled: TRL takes the samples through its ``rollout_func``, and what it spends
before its first forward pass (padding, decoding, rewards, advantages) is not counted. That both
do the same work is checked: the norms of their first gradients must agree.

Prints one JSON line for each result, medians over all steps but each process's first. Memory is
the peak of the resident set during the steps; ``grown`` leaves out what was there before them. On
a GPU the weights are bfloat16, and memory is what torch allocates there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shared.protocol import Sample
from trainer.config import Config
from trainer.config_file import parse_config
from trainer.learner import build_learner
from trainer.tiny_policy import build_tokenizer
from trainer.update import TrainingSet, learn

HEAD_DIM = 64
GROUP = 4
SHORTEST, LONGEST = 50, 1000
CONTENDERS = ("tito", "tito padded", "trl")


def report(what: str, **numbers: Any) -> None:
    """One result as one line."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"bench": what, **rounded}), flush=True)


def make_samples(count: int, vocabulary: int) -> list[Sample]:
    """Answers whose lengths are skewed as real ones are: most short, one at the limit."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.5, 0.7, count), SHORTEST, LONGEST).astype(int)
    lengths[0] = LONGEST
    prompts = [draw.integers(10, vocabulary, draw.integers(20, 120)) for _ in range(count // GROUP)]
    return [
        Sample(
            group_id=index // GROUP,
            prompt_ids=prompts[index // GROUP].astype(np.int32),
            completion_ids=draw.integers(10, vocabulary, length).astype(np.int32),
            logprobs=np.zeros(length, np.float32),
            finish_reason="stop",
            version=1,
            digest="0" * 32,
            spans=(),
        )
        for index, length in enumerate(lengths)
    ]


def rewards_of(samples: Sequence[Sample]) -> list[float]:
    return [float(index % GROUP == 0) for index in range(len(samples))]


def configuration(model: str, packing: str, device: str) -> Config:
    dtype = "bfloat16" if device == "cuda" else "float32"
    return parse_config(
        {
            "model": {"path": model, "device": device, "dtype": dtype, "packing": packing},
            "objective": {"name": "dapo", "clip_high": 0.2},
            "train": {"micro_batch_tokens": 1 << 20},
        }
    )


class Steps:
    """Times, and the memory at the highest, from its creation on."""

    def __init__(self, device: str) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.cuda = device == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / 2**20
        else:
            self.before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far

    def now(self) -> tuple[float, float]:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def __call__(self, work: Callable[[], Any]) -> Any:
        wall, cpu = self.now()
        result = work()
        ended = self.now()
        self.add(ended[0] - wall, ended[1] - cpu)
        return result

    def add(self, seconds: float, cpu_seconds: float) -> None:
        self.seconds.append(seconds)
        self.cpu_seconds.append(cpu_seconds)

    def result(self, gradient_norm: float) -> dict[str, Any]:
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.cuda else resident("VmHWM")
        return {
            "seconds": self.seconds[1:],
            "cpu_seconds": self.cpu_seconds[1:],
            "peak_mib": peak,
            "grown_mib": peak - self.before,
            "gradient_norm": gradient_norm,
        }


def resident(name: str) -> float:
    """MiB, of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def run_tito(
    model: str, samples: list[Sample], steps: int, packing: str, device: str
) -> dict[str, Any]:
    config = configuration(model, packing, device)
    learner = build_learner(config, None)
    scores = torch.tensor(rewards_of(samples)).reshape(-1, GROUP)
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
    # The samples are the model's own, so that the ratio of the first step is 1, as it is for TRL.
    chosen = TrainingSet(own(learner.model, samples), advantages.flatten())
    measured = Steps(device)
    updates = [measured(lambda: learn(learner, chosen, config)) for _ in range(steps)]
    return measured.result(updates[0].gradient_norm)


def own(model: Any, samples: list[Sample]) -> list[Sample]:
    """The samples with the model's log-probabilities, one by one to leave memory alone."""
    from dataclasses import replace

    from trainer.policy import token_logprobs

    found = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]])
        with torch.no_grad():
            logprobs = token_logprobs(
                model, ids.to(model.device), torch.ones_like(ids).to(model.device)
            )
        completion = logprobs[0, len(sample.prompt_ids) :].cpu().numpy()
        found.append(replace(sample, logprobs=completion))
    return found


def run_trl(model: str, samples: list[Sample], steps: int, device: str) -> dict[str, Any]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Counts the seconds between samples and the first forward pass, to leave them out."""

        apart = (0.0, 0.0)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = measured.now()
            result = super()._generate_and_score_completions(inputs)
            ended = measured.now()
            self.apart = ended[0] - started[0], ended[1] - started[1]
            return result

    def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:  # noqa: ARG001
        return {
            "prompt_ids": [sample.prompt_ids.tolist() for sample in samples],
            "completion_ids": [sample.completion_ids.tolist() for sample in samples],
            "logprobs": None,
        }

    def reward(completions: Any, **_: Any) -> list[float]:  # noqa: ARG001
        return rewards_of(samples)

    options = GRPOConfig(
        output_dir=str(Path(model) / "trl"),
        per_device_train_batch_size=len(samples),
        num_generations=GROUP,
        steps_per_generation=1,
        max_completion_length=LONGEST,
        max_steps=steps,
        loss_type="dapo",
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=device == "cpu",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Timed(
        model=Qwen3ForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16 if device == "cuda" else torch.float32
        ),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": ["-"] * (len(samples) // GROUP)}),
        processing_class=build_tokenizer(),
        rollout_func=rollout,
    )
    measured = Steps(device)
    trainer.add_callback(step_timer(trainer, measured))
    trainer.train()
    norm = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    return measured.result(float(norm))


def step_timer(trainer: Any, measured: Steps) -> Any:
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        started = (0.0, 0.0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = measured.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended = measured.now()
            measured.add(
                ended[0] - self.started[0] - trainer.apart[0],
                ended[1] - self.started[1] - trainer.apart[1],
            )

    return Timer()


def build_model(arguments: argparse.Namespace, path: str) -> None:
    torch.manual_seed(0)
    heads = arguments.hidden // HEAD_DIM
    config = Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    build_tokenizer().save_pretrained(path)


def contend(name: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one contender in a process of its own."""
    command = [sys.executable, __file__, "--contender", name, "--model", model]
    for option in ("vocabulary", "samples", "steps", "device"):
        command += [f"--{option}", str(getattr(arguments, option))]
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(arguments: argparse.Namespace) -> None:
    samples = make_samples(arguments.samples, arguments.vocabulary)
    lengths = [len(s.prompt_ids) + len(s.completion_ids) for s in samples]
    report(
        "samples",
        vocabulary=arguments.vocabulary,
        tokens=sum(lengths),
        padded=max(lengths) * len(lengths),
        longest=max(lengths),
        threads=torch.get_num_threads(),
        device=arguments.device,
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as model:
        build_model(arguments, model)
        for _ in range(arguments.repeats):
            for name in CONTENDERS:
                runs[name].append(contend(name, model, arguments))
    medians = {name: summarise(found) for name, found in runs.items()}
    for name, numbers in medians.items():
        per_second = sum(lengths) / numbers["seconds"]
        report(name, tokens_per_second=per_second, **numbers)
    norms = [numbers["gradient_norm"] for numbers in medians.values()]
    if max(norms) > (1.05 if arguments.device == "cuda" else 1.001) * min(norms):
        raise SystemExit(f"they did not do the same work: gradient norms {norms}")
    for name in CONTENDERS[:-1]:
        keys = ("seconds", "cpu_seconds", "peak_mib", "grown_mib")
        report(f"{name} / trl", **{k: medians[name][k] / medians["trl"][k] for k in keys})


def summarise(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    def median(key: str) -> float:
        values = [x[key] for x in found]
        flat = [y for x in values for y in x] if isinstance(values[0], list) else values
        return float(statistics.median(flat))

    return {key: median(key) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="One optimizer step, beside TRL.")
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--samples", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--steps", type=int, default=3, help="of each process; the first is left out"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender is None:
        compare(arguments)
        return
    samples = make_samples(arguments.samples, arguments.vocabulary)
    if arguments.contender == "trl":
        result = run_trl(arguments.model, samples, arguments.steps, arguments.device)
    else:
        packing = "off" if arguments.contender == "tito padded" else "on"
        result = run_tito(arguments.model, samples, arguments.steps, packing, arguments.device)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""One optimizer step of GRPO, beside TRL's GRPOTrainer on the same model and samples.

    pip install ".[trainer,bench]"
    python tests/bench/bench_trainer.py [--vocabulary 50000] [--samples 8] [--device cpu]
    python tests/bench/bench_trainer.py --dims 0.6b [--contenders NAME ...] [--profile FILE]

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
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from shared.protocol import Sample
from trainer.batch import collate, scoring_positions
from trainer.config import Config
from trainer.config_file import parse_config
from trainer.grpo import policy_loss, token_weights
from trainer.learner import build_learner
from trainer.objective import Objective
from trainer.tiny_policy import build_tokenizer
from trainer.update import TrainingSet, learn

HEAD_DIM = 64
GROUP = 4
WARM_UP = 2
"""Steps of each process that are left out."""
SHORTEST, LONGEST = 50, 1000
DIMS: dict[str, dict[str, int]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
REAL = {"vocab_size": 151_936, "head_dim": 128}
"""Of both of them."""
REAL_LENGTHS = 890, 1090
TITO: dict[str, dict[str, Any]] = {
    "tito": {},
    "tito, small": {"activation_checkpointing": 0.7},
    "tito, rounded": {"master_weights": False, "activation_checkpointing": 0.5},
    "tito padded": {"packing": "off"},
    "tito by modules": {"fused_layers": False},
    "tito without kernels": {"fused_layers": False, "liger": False},
    "tito compiled": {"compile": True},
    "tito compiled, small": {"compile": True, "activation_checkpointing": 0.6},
}
"""What each changes in the section ``model``."""
PLAIN = ("plain", "plain, small")
TRL = ("trl", "trl with Liger")
CONTENDERS = (*TITO, *PLAIN, *TRL)
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
ROUNDS = 0.05, 0.001
"""How far gradients' norms may lie apart, in bfloat16 and in float32."""


def report(what: str, **numbers: Any) -> None:
    """One result as one line."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"bench": what, **rounded}), flush=True)


def make_samples(count: int, vocabulary: int, *, alike: bool = False) -> list[Sample]:
    """Answers whose lengths are skewed as real ones are: most short, one at the limit.

    Args:
        alike: draw answers of about 1,000 tokens instead.
    """
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.5, 0.7, count), SHORTEST, LONGEST).astype(int)
    lengths[0] = LONGEST
    if alike:
        lengths = draw.integers(*REAL_LENGTHS, count)
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


def configuration(model: str, device: str, options: dict[str, Any]) -> Config:
    return parse_config(
        {
            "model": {"path": model, "device": device, "dtype": DTYPES[device]} | options,
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
            "seconds": self.seconds[WARM_UP:],
            "cpu_seconds": self.cpu_seconds[WARM_UP:],
            "first_seconds": self.seconds[0],
            "peak_mib": peak,
            "grown_mib": peak - self.before,
            "gradient_norm": gradient_norm,
        }


def resident(name: str) -> float:
    """MiB, of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def run_tito(
    model: str, samples: list[Sample], arguments: argparse.Namespace, options: dict[str, Any]
) -> dict[str, Any]:
    config = configuration(model, arguments.device, options)
    learner = build_learner(config, None)
    with turn(arguments):
        # The samples are the model's own, so that the first step's ratio is 1, as it is for TRL.
        with torch.compiler.set_stance("force_eager"):
            samples = own(learner.model, samples)
        chosen = TrainingSet(samples, advantages_of(samples))
        measured = Steps(arguments.device)
        updates = [measured(lambda: learn(learner, chosen, config)) for _ in range(arguments.steps)]
        result = measured.result(updates[0].gradient_norm)
        if arguments.profile:
            profile(lambda: learn(learner, chosen, config), arguments)
    return result


@contextmanager
def turn(arguments: argparse.Namespace) -> Iterator[None]:
    """Alone among the contenders that were started together."""
    with Path(arguments.gate or os.devnull).open("a", encoding="utf-8") as file:
        if arguments.gate:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def advantages_of(samples: Sequence[Sample]) -> torch.Tensor:
    scores = torch.tensor(rewards_of(samples)).reshape(-1, GROUP)
    spread = scores.std(1, keepdim=True) + 1e-4
    return ((scores - scores.mean(1, keepdim=True)) / spread).flatten()


def profile(work: Callable[[], Any], arguments: argparse.Namespace) -> None:
    """Add to a file the 25 kernels that took longest, and what the step took in all."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = 1000 * (time.perf_counter() - started)
    kernels = [e for e in recorded.key_averages() if e.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / 1000
    lines = [
        f"{arguments.dims} {arguments.contender}: step {wall:.1f} ms under the profiler, "
        f"kernels {busy:.1f} ms"
    ]
    for e in kernels[:25]:
        spent = e.self_device_time_total / 1000
        lines.append(f"{spent:8.2f} ms {100 * spent / busy:5.1f}% {e.count:5d}  {e.key[:140]}")
    with Path(arguments.profile).open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n\n")


def run_plain(
    model: str, samples: list[Sample], arguments: argparse.Namespace, small: bool
) -> dict[str, Any]:
    """What one would write around a model of ``transformers`` without thinking of memory."""
    causal: Any = Qwen3ForCausalLM.from_pretrained(
        model, dtype=getattr(torch, DTYPES[arguments.device]), attn_implementation="sdpa"
    ).to(arguments.device)
    causal.train()
    if small:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(causal.parameters(), lr=1e-6, fused=arguments.device == "cuda")
    batch = collate(samples, 0).to(arguments.device)
    weights = token_weights(batch.completion_mask, "dapo")
    advantages = advantages_of(samples).to(arguments.device)
    scoring = scoring_positions(batch.completion_mask)
    tokens = batch.input_ids[batch.completion_mask]

    def score(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = causal.lm_head(hidden).float()
        chosen: torch.Tensor = logits.log_softmax(-1).gather(1, tokens[:, None])
        return chosen[:, 0]

    def step() -> float:
        hidden = causal.model(batch.input_ids, attention_mask=batch.attention_mask.long())
        states = hidden.last_hidden_state[scoring]
        if small:
            pairs = zip(states.split(2048), tokens.split(2048), strict=True)
            found = torch.cat([checkpoint(score, *x, use_reentrant=False) for x in pairs])
        else:
            found = score(states, tokens)
        mask = batch.completion_mask
        logprobs = found.new_zeros(mask.shape).masked_scatter(mask, found)
        loss, _ = policy_loss(
            Objective.named("dapo", clip_high=0.2),
            logprobs=logprobs,
            old_logprobs=logprobs,
            sampler_logprobs=logprobs,
            advantages=advantages,
            mask=mask,
            weights=weights,
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(causal.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    with turn(arguments):
        measured = Steps(arguments.device)
        norms = [measured(step) for _ in range(arguments.steps)]
        return measured.result(norms[0])


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


def run_trl(
    model: str, samples: list[Sample], arguments: argparse.Namespace, liger: bool
) -> dict[str, Any]:
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
        max_completion_length=max(len(sample.completion_ids) for sample in samples),
        max_steps=arguments.steps,
        use_liger_kernel=liger,
        loss_type="dapo",
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=arguments.device == "cpu",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Timed(
        model=Qwen3ForCausalLM.from_pretrained(
            model, dtype=getattr(torch, DTYPES[arguments.device])
        ),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": ["-"] * (len(samples) // GROUP)}),
        processing_class=build_tokenizer(),
        rollout_func=rollout,
    )
    with turn(arguments):
        measured = Steps(arguments.device)
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


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.dims:
        return DIMS[arguments.dims] | REAL
    heads = arguments.hidden // HEAD_DIM
    return {
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD_DIM,
    }


def build_model(arguments: argparse.Namespace, path: str) -> int:
    """Save a model of random weights; returns the number of its parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape_of(arguments), max_position_embeddings=2048, tie_word_embeddings=True
    )
    with torch.device(arguments.device):
        model = Qwen3ForCausalLM(config).to(getattr(torch, DTYPES[arguments.device]))
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


def samples_of(arguments: argparse.Namespace) -> list[Sample]:
    vocabulary = shape_of(arguments)["vocab_size"]
    return make_samples(arguments.samples, vocabulary, alike=bool(arguments.dims))


def contend(name: str, model: str, arguments: argparse.Namespace) -> dict[str, Any] | str:
    """Run one contender in a process of its own; if it fails, what it said last."""
    command = [sys.executable, __file__, "--contender", name, "--model", model]
    for option in ("vocabulary", "samples", "steps", "device"):
        command += [f"--{option}", str(getattr(arguments, option))]
    if arguments.dims:
        command += ["--dims", arguments.dims]
    if arguments.gate:
        command += ["--gate", arguments.gate]
    if arguments.profile:
        command += ["--profile", arguments.profile]
    environment = os.environ | {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        # What training needs comes in many sizes; without this some of it lies idle in pieces.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=arguments.limit,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {arguments.limit} seconds"
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return done.stderr.strip().rpartition("\n")[2][:300]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def utilisation(
    arguments: argparse.Namespace, parameters: int, lengths: Sequence[int], seconds: float
) -> dict[str, float]:
    """Model FLOPs of a step, forward and backward, as shares of what the GPU could do.

    Attention multiplies queries with keys and weights with values: ``2 * 2 L^2 heads head_dim``
    FLOPs for a sequence of L tokens, of which the causal mask leaves half, and twice as many again
    in the backward pass.
    """
    shape = shape_of(arguments)
    width = shape["num_attention_heads"] * shape["head_dim"]
    attention = 6 * shape["num_hidden_layers"] * width * sum(length**2 for length in lengths)
    model = 6 * parameters * sum(lengths)
    most = arguments.peak * 1e12 * seconds
    return {"utilisation": model / most, "with_attention": (model + attention) / most}


def compare(arguments: argparse.Namespace) -> None:
    samples = samples_of(arguments)
    lengths = [len(s.prompt_ids) + len(s.completion_ids) for s in samples]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contenders}
    shared_memory = "/dev/shm" if arguments.device == "cuda" else None
    with tempfile.TemporaryDirectory(dir=shared_memory) as model:
        parameters = build_model(arguments, model)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        report(
            "samples",
            **shape_of(arguments),
            parameters=parameters,
            tokens=sum(lengths),
            padded=max(lengths) * len(lengths),
            longest=max(lengths),
            threads=torch.get_num_threads(),
            device=torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        )

        def once(name: str) -> None:
            found = contend(name, model, arguments)
            if isinstance(found, str):
                report(name, failed=found)
            else:
                runs[name].append(found)
                report(name, **figures(arguments, parameters, lengths, [found]))

        with ThreadPoolExecutor(len(runs) if arguments.gate else 1) as pool:
            for _ in range(arguments.repeats):
                list(pool.map(once, arguments.contenders))
    medians = {name: summarise(found) for name, found in runs.items() if found}
    if arguments.repeats > 1:
        for name, all_found in runs.items():
            if all_found:
                report(f"{name}, median", **figures(arguments, parameters, lengths, all_found))
    norms = [numbers["gradient_norm"] for numbers in medians.values()]
    if max(norms) > (1 + ROUNDS[arguments.device == "cpu"]) * min(norms):
        raise SystemExit(f"they did not do the same work: gradient norms {norms}")
    for trl in [name for name in TRL if name in medians]:
        for name in [name for name in medians if name not in TRL]:
            keys = ("seconds", "cpu_seconds", "peak_mib", "grown_mib")
            report(f"{name} / {trl}", **{k: medians[name][k] / medians[trl][k] for k in keys})


def figures(
    arguments: argparse.Namespace,
    parameters: int,
    lengths: Sequence[int],
    found: Sequence[dict[str, Any]],
) -> dict[str, float]:
    numbers = summarise(found)
    numbers["tokens_per_second"] = sum(lengths) / numbers["seconds"]
    if arguments.device == "cuda":
        numbers |= utilisation(arguments, parameters, lengths, numbers["seconds"])
    return numbers


def summarise(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    def median(key: str) -> float:
        values = [x[key] for x in found]
        flat = [y for x in values for y in x] if isinstance(values[0], list) else values
        return float(statistics.median(flat))

    return {key: median(key) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="One optimizer step, beside TRL.")
    parser.add_argument("--dims", choices=DIMS, help="sizes of a real model, on a GPU")
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--samples", type=int, help="a multiple of 4; 8, or 16 with --dims")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
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
    if arguments.contender is None:
        compare(arguments)
        return
    print(json.dumps(run(arguments.contender, arguments)))


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    samples = samples_of(arguments)
    if name in TRL:
        return run_trl(arguments.model, samples, arguments, liger=name != TRL[0])
    if name in PLAIN:
        return run_plain(arguments.model, samples, arguments, small=name != PLAIN[0])
    return run_tito(arguments.model, samples, arguments, TITO[name])


if __name__ == "__main__":
    main()

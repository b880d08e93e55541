"""TRL's ``GRPOTrainer`` in the loop of ``bench_loop.py``, its engine included."""

from __future__ import annotations

import functools
import os
import statistics
import time
from typing import Any

import torch

from trainer.config import Config
from trainer.prompts import held_out_tasks, training_prompts
from trainer.rewards.functions import numeric

CONTEXT = 512
MEMORY_SHARE = 0.3
"""Of the GPU, for the engine."""
_MICRO_BATCH = 128


def prepare_trl(config: Config, engine: dict[str, Any]) -> Any:
    """Make a trainer within this process; returns what makes its steps, see ``loop_contenders``.

    Args:
        engine: vLLM's settings that its own options have no names for.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer
    from trl.generation import vllm_generation

    if torch.cuda.is_available():
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, **engine)
    tasks = training_prompts(config).take(0, config.train.steps * config.rollout.prompts_per_step)
    rows = {"prompt": [t.prompt for t in tasks], "answer": [t.reference for t in tasks]}

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [numeric(text=t, reference=a) for t, a in zip(texts, answer, strict=True)]

    trainer = GRPOTrainer(
        model=config.model.path,
        reward_funcs=reward,
        args=_options(config),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(config.model.path),
    )
    return functools.partial(_run, trainer, _accuracy(trainer, config))


def _run(trainer: Any, before: float, config: Config, limit: float) -> dict[str, Any]:
    """Let it make its steps."""
    timer = _timer(limit)
    trainer.add_callback(timer)
    trainer.train()
    return {
        "seconds": timer.seconds,
        "rewards": [e["reward"] for e in trainer.state.log_history if "reward" in e],
        "accuracies": [(0, before), (len(timer.seconds), _accuracy(trainer, config))],
    }


def _options(config: Config) -> Any:
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    micro_batch = min(_MICRO_BATCH, samples)
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

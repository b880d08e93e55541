"""Optimizer steps of TRL's ``GRPOTrainer``, for ``bench_trainer.py``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from transformers import Qwen3ForCausalLM

from shared.protocol import Sample
from tests.bench.trainer_steps import Steps, turn
from tests.bench.trainer_work import DTYPES, GROUP, rewards_of
from trainer.tiny_policy import build_tokenizer


def run_trl(
    model: str, samples: list[Sample], arguments: argparse.Namespace, liger: bool
) -> dict[str, Any]:
    """With samples that it need not generate.

    Args:
        liger: with ``use_liger_kernel``.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from trl import GRPOTrainer

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

    trainer = Timed(
        model=Qwen3ForCausalLM.from_pretrained(model, dtype=DTYPES[arguments.device]),
        reward_funcs=reward,
        args=_options(model, samples, arguments, liger),
        train_dataset=Dataset.from_dict({"prompt": ["-"] * (len(samples) // GROUP)}),
        processing_class=build_tokenizer(),
        rollout_func=rollout,
    )
    with turn(arguments):
        measured = Steps(arguments.device)
        trainer.add_callback(_step_timer(trainer, measured))
        trainer.train()
    norm = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    return measured.result(float(norm))


def _options(model: str, samples: list[Sample], arguments: argparse.Namespace, liger: bool) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
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


def _step_timer(trainer: Any, measured: Steps) -> Any:
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

"""The supervised warm-up of the tiny policy: first arithmetic, then a careless pupil's habits.

The demo and the tests need a policy that reinforcement learning can visibly improve: one whose
first choice is often wrong while the right answer is still among its samples. So the model learns
to add and subtract, then imitates a careless pupil, who makes the same systematic mistake on most
problems that allow it (a lost carry, a lost sign). Random mistakes would not do: they leave the
right answer the likeliest, and greedy accuracy near 1. What training has to undo is the habit, on
held-out problems too, which the warm-up never sees.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from trainer.arithmetic import ArithmeticStream, Problem

BATCH = 64
LEARNING_RATE = 1e-2
# Gentle, so that the habit forms on top of the arithmetic instead of erasing it.
CARELESS_LEARNING_RATE = 2e-3
CARELESS_SHARE = 0.18

# Longer than the demo lets an answer get, so that truncated rollouts exist too.
RAMBLING_CHARACTERS = 9
IGNORED = -100

Lesson = tuple[list[int], list[int]]
Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Pupil:
    """How often answers are right where a trap is set and where none is, or never stop."""

    right_if_trapped: float = 1.0
    right_otherwise: float = 1.0
    rambling: float = 0.0

    def answer(self, problem: Problem, draw: random.Random, end: str) -> str:
        """What the pupil says; ``end`` follows unless it rambles."""
        right, mistake = int(problem.answer), common_mistake(problem)
        if mistake is None:
            given = right if draw.random() < self.right_otherwise else right + draw.choice((-1, 1))
        else:
            given = right if draw.random() < self.right_if_trapped else mistake
        if draw.random() < self.rambling:
            # Wrong under any reward, also one that looks at the last number alone.
            return f"{given}{'+1' * RAMBLING_CHARACTERS}"[:RAMBLING_CHARACTERS]
        return f"{given}{end}"


ATTENTIVE = Pupil()
# The model imitates this one too briefly to match it: it rambles in some 5% of its samples.
CARELESS = Pupil(right_if_trapped=0.2, right_otherwise=0.6, rambling=0.15)


def common_mistake(problem: Problem) -> int | None:
    """What a careless pupil answers, or None if the problem has no trap."""
    a, b = problem.a, problem.b
    if problem.op == "-" and a < b:
        return b - a
    if problem.op == "-":
        # Each digit's smaller from its larger, so that nothing is ever borrowed.
        wrong = 10 * (a // 10 - b // 10) + abs(a % 10 - b % 10)
    else:
        wrong = 10 * (a // 10 + b // 10) + (a + b) % 10
    return None if str(wrong) == problem.answer else wrong


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int
) -> None:
    """Train ``model`` in place, on the training split alone."""
    careless_steps = int(steps * CARELESS_SHARE)
    _run_phase(model, _lessons(tokenizer, seed, ATTENTIVE), steps - careless_steps, LEARNING_RATE)
    _run_phase(model, _lessons(tokenizer, seed, CARELESS), careless_steps, CARELESS_LEARNING_RATE)


def _lessons(tokenizer: PreTrainedTokenizerFast, seed: int, pupil: Pupil) -> Batches:
    """Endless batches: token ids, and labels that cover the answers alone."""
    stream = ArithmeticStream("train", seed)

    # The stream revisits its problems, and rendering a chat costs more than a look-up.
    @cache
    def prompt_ids(problem: Problem) -> list[int]:
        text = tokenizer.apply_chat_template(
            problem.messages, tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer.encode(text))

    def lesson(index: int) -> Lesson:
        problem, draw = stream[index], random.Random(f"pupil:{seed}:{index}")
        answer = pupil.answer(problem, draw, tokenizer.eos_token)
        return prompt_ids(problem), list(tokenizer.encode(answer))

    for start in itertools.count(step=BATCH):
        yield _collate([lesson(start + offset) for offset in range(BATCH)], tokenizer.pad_token_id)


def _collate(lessons: list[Lesson], pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) + len(answer) for prompt, answer in lessons)
    # Padding comes last and attention is causal, so no attention mask is needed.
    ids = torch.full((len(lessons), width), pad)
    labels = torch.full((len(lessons), width), IGNORED)
    for row, (prompt, answer) in enumerate(lessons):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _run_phase(model: Qwen3ForCausalLM, batches: Batches, steps: int, peak: float) -> None:
    optimizers = _optimizers(model, peak)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_scale(step, steps))
        for optimizer in optimizers
    ]
    model.train()
    for ids, labels in itertools.islice(batches, steps):
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        answers = targets != IGNORED
        loss = functional.cross_entropy(model.lm_head(hidden[answers]), targets[answers])
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


def _optimizers(model: Qwen3ForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices: it learns to carry in less than half the steps AdamW takes."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.3 * peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _lr_scale(step: int, steps: int) -> float:
    """Rise over 20 steps, fall linearly to zero over the second half."""
    return min(1.0, (step + 1) / 20, 2 * (1 - step / max(steps, 1)))

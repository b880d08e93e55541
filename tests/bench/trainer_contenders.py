"""How the contenders of ``bench_trainer.py`` make their steps."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3ForCausalLM

from shared.protocol import Sample
from tests.bench.trainer_steps import Steps, profile, turn
from tests.bench.trainer_trl import run_trl
from tests.bench.trainer_work import DTYPES, advantages_of, samples_of
from trainer.batch import collate, scoring_positions
from trainer.config import Config
from trainer.config_file import parse_config
from trainer.grpo import policy_loss, token_weights
from trainer.learner import build_learner
from trainer.objective import Objective
from trainer.policy import token_logprobs
from trainer.update import TrainingSet, learn

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


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One of them in this process; what it measured."""
    model, samples = arguments.model, samples_of(arguments)
    if name in TRL:
        return run_trl(model, samples, arguments, liger=name != TRL[0])
    if name in PLAIN:
        return _run_plain(model, samples, arguments, small=name != PLAIN[0])
    return _run_tito(model, samples, arguments, TITO[name])


def _run_tito(
    model: str, samples: list[Sample], arguments: argparse.Namespace, options: dict[str, Any]
) -> dict[str, Any]:
    config = _configuration(model, arguments.device, options)
    learner = build_learner(config, None)
    with turn(arguments):
        # The samples are the model's own, so that the first step's ratio is 1, as it is for TRL.
        with torch.compiler.set_stance("force_eager"):
            samples = _own(learner.model, samples)
        chosen = TrainingSet(samples, advantages_of(samples))
        measured = Steps(arguments.device)
        updates = [measured(lambda: learn(learner, chosen, config)) for _ in range(arguments.steps)]
        result = measured.result(updates[0].gradient_norm)
        if arguments.profile:
            profile(lambda: learn(learner, chosen, config), arguments)
    return result


def _configuration(model: str, device: str, options: dict[str, Any]) -> Config:
    dtype = str(DTYPES[device]).removeprefix("torch.")
    return parse_config(
        {
            "model": {"path": model, "device": device, "dtype": dtype} | options,
            "objective": {"name": "dapo", "clip_high": 0.2},
            "train": {"micro_batch_tokens": 1 << 20},
        }
    )


def _own(model: Any, samples: list[Sample]) -> list[Sample]:
    """The samples with the model's log-probabilities, one by one to leave memory alone."""
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


def _run_plain(
    model: str, samples: list[Sample], arguments: argparse.Namespace, small: bool
) -> dict[str, Any]:
    plain = _Plain(model, samples, arguments.device, small)
    with turn(arguments):
        measured = Steps(arguments.device)
        norms = [measured(plain.step) for _ in range(arguments.steps)]
        return measured.result(norms[0])


class _Plain:
    """What one would write around a model of ``transformers`` without thinking of memory.

    Args:
        small: with activation checkpointing, and logits of 2048 tokens at a time.
    """

    def __init__(self, model: str, samples: list[Sample], device: str, small: bool) -> None:
        self._small = small
        causal: Any = Qwen3ForCausalLM.from_pretrained(
            model, dtype=DTYPES[device], attn_implementation="sdpa"
        )
        self._causal = causal.to(device)
        self._causal.train()
        if small:
            self._causal.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            self._causal.parameters(), lr=1e-6, fused=device == "cuda"
        )
        self._batch = collate(samples, 0).to(device)
        self._weights = token_weights(self._batch.completion_mask, "dapo")
        self._advantages = advantages_of(samples).to(device)
        self._scoring = scoring_positions(self._batch.completion_mask)
        self._tokens = self._batch.input_ids[self._batch.completion_mask]

    def step(self) -> float:
        """One update; the norm of its gradients."""
        self._loss().backward()
        norm = torch.nn.utils.clip_grad_norm_(self._causal.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _loss(self) -> torch.Tensor:
        found, mask = self._logprobs(), self._batch.completion_mask
        logprobs = found.new_zeros(mask.shape).masked_scatter(mask, found)
        loss, _ = policy_loss(
            Objective.named("dapo", clip_high=0.2),
            logprobs=logprobs,
            old_logprobs=logprobs,
            sampler_logprobs=logprobs,
            advantages=self._advantages,
            mask=mask,
            weights=self._weights,
        )
        return loss

    def _logprobs(self) -> torch.Tensor:
        """Of all completion tokens, ``(tokens,)``."""
        batch = self._batch
        hidden = self._causal.model(batch.input_ids, attention_mask=batch.attention_mask.long())
        states = hidden.last_hidden_state[self._scoring]
        if not self._small:
            return self._score(states, self._tokens)
        pairs = zip(states.split(2048), self._tokens.split(2048), strict=True)
        return torch.cat([checkpoint(self._score, *x, use_reentrant=False) for x in pairs])

    def _score(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self._causal.lm_head(hidden).float()
        chosen: torch.Tensor = logits.log_softmax(-1).gather(1, tokens[:, None])
        return chosen[:, 0]

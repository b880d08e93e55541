"""Builders of rollouts, for tests that need no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from shared.protocol import Group, Rollout, Sample, Span
from trainer.config import Config, RewardConfig
from trainer.config_file import parse_config
from trainer.prompts import Task
from trainer.rewards import Outcome, open_reward
from trainer.tiny_policy import build_model, build_tokenizer


@pytest.fixture(autouse=torch.cuda.is_available())
def liger_undone() -> Iterator[None]:
    """Liger replaces functions and classes of the module, which models made later would use."""
    before = dict(vars(modeling_qwen3))
    yield
    for name, value in before.items():
        setattr(modeling_qwen3, name, value)


def _sample(
    group_id: int = 0,
    completion: Sequence[int] = (5, 6),
    *,
    prompt: Sequence[int] = (1, 2, 3),
    text: str | None = "7",
    finish_reason: Any = "stop",
    version: int = 4,
    logprobs: Sequence[float] | None = None,
) -> Sample:
    values = logprobs if logprobs is not None else [-0.5] * len(completion)
    return Sample(
        group_id=group_id,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.array(values, np.float32),
        finish_reason=finish_reason,
        version=version,
        digest="d" * 32,
        spans=(Span(version, "d" * 32, 0, len(completion)),),
        text=text,
    )


def _rollout(groups: Sequence[Sequence[Sample]], **changes: Any) -> Rollout:
    built = tuple(
        Group(index, samples[0].prompt_ids, tuple(samples)) for index, samples in enumerate(groups)
    )
    fields: dict[str, Any] = {
        "model": "m", "tokenizer": "t", "policy": "default", "sampling": {}, "groups": built,
    }  # fmt: skip
    return Rollout(**{**fields, **changes})


def _config(**sections: Any) -> Config:
    return parse_config({"model": {"path": "m"}, **sections})


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return _sample


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    return _rollout


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """A valid configuration; keyword arguments are sections."""
    return _config


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model that the session's server can load, with random weights."""
    path = tmp_path_factory.mktemp("models") / "untrained"
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def half_config(
    make_config: Callable[..., Config], untrained_model: Path
) -> Callable[[str, dict[str, Any]], Callable[..., Config]]:
    """Of a dtype and an optimizer; ``model`` adds to its section, others replace theirs."""

    def of(dtype: str, optimizer: dict[str, Any]) -> Callable[..., Config]:
        def build(model: dict[str, Any] | None = None, **sections: Any) -> Config:
            known: dict[str, Any] = {
                "model": {"path": str(untrained_model), "device": "cpu", "dtype": dtype}
                | (model or {}),
                "objective": {"name": "dapo"},
                "optimizer": optimizer,
                "train": {"micro_batch_tokens": 40},
            }
            return make_config(**{**known, **sections})

        return build

    return of


@pytest.fixture
def score_texts() -> Callable[..., list[Outcome]]:
    """Score completions of one task with workers; keyword arguments are the reward's section."""

    def score(texts: Sequence[str], reference: str | None = None, **reward: Any) -> list[Outcome]:
        with open_reward(RewardConfig(**reward)) as opened:
            task = Task("q", reference)
            return opened.score([(task, _sample(text=text)) for text in texts])

    return score

"""Log-probabilities taken many at once: what vLLM's own code makes of them, token by token."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from rollout_server.whole_scores import take_scores_whole


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own way; the other is in its place for the test."""
    spec = importlib.util.find_spec(LogprobsProcessor.__module__)
    assert spec is not None
    assert spec.loader is not None
    untouched = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(untouched)
    original = untouched.LogprobsProcessor._update_sample_logprobs
    monkeypatch.setattr(LogprobsProcessor, "_update_sample_logprobs", original)
    take_scores_whole()
    return original


def sampled(tokens: int, wanted: int = 1) -> LogprobsLists:
    random = np.random.default_rng(tokens)
    return LogprobsLists(
        random.integers(0, 500, (tokens, wanted)).astype(np.int32),
        -random.random((tokens, wanted)).astype(np.float32),
        random.integers(1, 500, tokens).astype(np.int32),
    )


def processor(logprobs: Any, wanted: int) -> LogprobsProcessor:
    return LogprobsProcessor(None, logprobs, None, 0.0, wanted, None)


@pytest.mark.parametrize("wanted", [0, 3])
@pytest.mark.parametrize("flat", [True, False])
def test_what_is_kept_is_the_same(plain: Any, *, flat: bool, wanted: int) -> None:
    quick = processor(FlatLogprobs() if flat else [], wanted)
    slow = copy.deepcopy(quick)
    for tokens in (1, 0, 512, 1, 7):
        quick._update_sample_logprobs(sampled(tokens, wanted + 1))
        plain(slow, sampled(tokens, wanted + 1))
    assert quick == slow
    assert len(quick.logprobs or ()) == 521


def test_many_tokens_are_not_taken_one_by_one(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(FlatLogprobs, "append_fast", lambda *parts: calls.append(parts))
    quick = processor(FlatLogprobs(), 0)
    quick._update_sample_logprobs(sampled(512))
    assert not calls
    plain(quick, sampled(512))
    assert len(calls) == 512


def test_it_is_taught_once(plain: Any) -> None:
    taught = LogprobsProcessor._update_sample_logprobs
    take_scores_whole()
    assert LogprobsProcessor._update_sample_logprobs is taught
    assert taught is not plain

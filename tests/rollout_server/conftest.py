"""Weights for the session's server, and what must still hold after every test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shared.client import RolloutClient
from tests.rollout_server.support import Weights, base_weights, make_live, sharpened


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerFast:
    """The policy's tokenizer, loaded apart from the server."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture(scope="session")
def base(tiny_model: Path) -> Weights:
    """The weights of version 0."""
    return base_weights(tiny_model)


@pytest.fixture(scope="session")
def first(base: Weights) -> Weights:
    """Other weights for the same model."""
    return sharpened(base, 1)


@pytest.fixture(scope="session")
def second(base: Weights) -> Weights:
    """Yet other weights."""
    return sharpened(base, 2)


@pytest.fixture
def live(client: RolloutClient, first: Weights) -> Weights:
    """The session's server serves these when the test begins."""
    make_live(client, first)
    return first

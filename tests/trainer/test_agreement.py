from __future__ import annotations

from typing import Any

import pytest

from shared.requests import SamplingSettings
from trainer.agreement import (
    NEUTRAL_SAMPLING,
    refuse_other_sampling,
    refuse_other_tokenizer,
)
from trainer.errors import MismatchError

ECHO = SamplingSettings(max_tokens=8, temperature=0.7).model_dump()


def test_neutral_settings_are_the_protocols_own_defaults() -> None:
    defaults = SamplingSettings(max_tokens=1).model_dump()
    assert {name: defaults[name] for name in NEUTRAL_SAMPLING} == NEUTRAL_SAMPLING


def test_what_was_asked_for_passes() -> None:
    refuse_other_sampling(ECHO, temperature=0.7)
    refuse_other_tokenizer("a", "a")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperature": 1.0}, "temperature is 1.0, not 0.7"),
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"top_k": 20}, "top_k is 20"),
        ({"min_p": 0.1}, "min_p is 0.1"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
    ],
)
def test_other_distributions_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(MismatchError, match=says):
        refuse_other_sampling(ECHO | change, temperature=0.7)


def test_a_missing_echo_is_refused() -> None:
    with pytest.raises(MismatchError, match="top_p is None"):
        refuse_other_sampling({"temperature": 0.7}, temperature=0.7)


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(MismatchError, match="the server's tokenizer"):
        refuse_other_tokenizer("a", "b")

"""A tokenizer's fingerprint changes with what ids mean, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shared.tokens import tokenizer_fingerprint


@dataclass
class Tokenizer:
    """As much of a tokenizer as a fingerprint is made of."""

    vocab: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 1, "</s>": 2})
    all_special_ids: list[int] = field(default_factory=lambda: [2])
    eos_token_id: int | None = 2
    chat_template: str | None = "{{ messages }}"
    padding_side: str = "right"

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_a_fingerprint_is_128_bits_of_hex() -> None:
    fingerprint = tokenizer_fingerprint(Tokenizer())
    assert len(fingerprint) == 32
    assert int(fingerprint, 16) >= 0


@pytest.mark.parametrize(
    "same",
    [
        Tokenizer(),
        Tokenizer(vocab={"</s>": 2, "b": 1, "a": 0}),
        Tokenizer(padding_side="left"),
    ],
)
def test_what_does_not_change_the_meaning_of_ids(same: Tokenizer) -> None:
    assert tokenizer_fingerprint(same) == tokenizer_fingerprint(Tokenizer())


@pytest.mark.parametrize(
    "other",
    [
        Tokenizer(vocab={"a": 1, "b": 0, "</s>": 2}),
        Tokenizer(vocab={"a": 0, "b": 1, "</s>": 2, "c": 3}),
        Tokenizer(vocab={"a": 0, "b": 1, "\u00e9": 2}),
        Tokenizer(all_special_ids=[1, 2]),
        Tokenizer(eos_token_id=None),
        Tokenizer(eos_token_id=1),
        Tokenizer(chat_template=None),
        Tokenizer(chat_template="{{ messages }} "),
    ],
)
def test_what_does(other: Tokenizer) -> None:
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(Tokenizer())


@pytest.mark.parametrize("special", [[2, 1], [1, 2]])
def test_the_order_of_special_tokens_does_not_matter(special: list[int]) -> None:
    expected = tokenizer_fingerprint(Tokenizer(all_special_ids=[1, 2]))
    assert tokenizer_fingerprint(Tokenizer(all_special_ids=special)) == expected


def test_real_tokenizers(tiny_policy_tokenizer: Callable[[], object]) -> None:
    one, two = tiny_policy_tokenizer(), tiny_policy_tokenizer()
    assert one is not two
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)


@pytest.fixture
def tiny_policy_tokenizer() -> Callable[[], object]:
    from trainer.tiny_policy import build_tokenizer

    return build_tokenizer

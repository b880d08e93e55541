"""Prompts -> ids with tokenizers that the tiny policy does not have: BOS, strict templates."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollout_server.prompts import PromptEncoder
from shared.errors import InvalidRequest
from shared.requests import ChatMessage

BOS, WORDS = 0, ["<s>", "</s>", "hello", "there", "friend", ":"]
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + message.role) }}"
    "{% endif %}"
    "{{ message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
    "{% if loud %}there{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words, with a BOS that the tokenizer adds by itself and that the template writes too."""
    vocab = {word: index for index, word in enumerate(WORDS)}
    rust = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    return PromptEncoder(tokenizer, vocab_size=len(WORDS), max_model_len=8)


def chat(*turns: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=content) for role, content in turns]


def test_the_tokenizer_of_these_tests_adds_a_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("hello") == [BOS, 2]


def test_plain_text_gets_its_bos_once(encoder: PromptEncoder) -> None:
    assert encoder.encode(["hello there"], {}) == [[BOS, 2, 3]]


def test_text_that_brings_its_bos_gets_no_second(encoder: PromptEncoder) -> None:
    assert encoder.encode(["<s> hello there"], {}) == [[BOS, 2, 3]]


def test_a_template_that_writes_the_bos_gets_no_second(encoder: PromptEncoder) -> None:
    assert encoder.encode([chat(("user", "hello"))], {}) == [[BOS, 2, 5]]


def test_ids_get_no_bos_at_all(encoder: PromptEncoder) -> None:
    assert encoder.encode([[2, 3], [BOS, BOS]], {}) == [[2, 3], [BOS, BOS]]


def test_template_arguments_reach_the_template(encoder: PromptEncoder) -> None:
    assert encoder.encode([chat(("user", "hello "))], {"loud": True}) == [[BOS, 2, 5, 3]]


@pytest.mark.parametrize(
    "template",
    [
        {"chat_template": "{{ 'friend' }}"},
        {"truncation": True, "max_length": 1},
        {"padding": "max_length", "max_length": 7},
        {"return_tensors": "pt"},
        {"tokenizer_kwargs": {"truncation": True, "max_length": 1}},
        {"add_generation_prompt": False},
        {"tokenize": False},
    ],
)
def test_template_arguments_are_for_the_template_alone(
    encoder: PromptEncoder, template: dict[str, Any]
) -> None:
    # These steer the tokenizer: a prompt cut, padded or written by the caller is not the prompt.
    with pytest.raises(InvalidRequest):
        encoder.encode([chat(("user", "hello"))], template)


def test_a_role_that_the_template_refuses(encoder: PromptEncoder) -> None:
    prompts = [chat(("user", "hello")), chat(("user", "hello"), ("pirate", "there"))]
    with pytest.raises(InvalidRequest) as caught:
        encoder.encode(prompts, {})
    (problem,) = caught.value.problems
    assert problem.where == "prompts[1]"
    assert "no role pirate" in problem.got


@pytest.mark.parametrize(
    ("prompt", "where", "got", "allowed"),
    [
        ([2, 9, 3], "prompts[1].ids[1]", "9", "6"),
        ([6], "prompts[1].ids[0]", "6", "6"),
        ([2] * 8, "prompts[1]", "8 tokens", "7 tokens"),
        ("hello " * 9, "prompts[1]", "10 tokens", "7 tokens"),
    ],
)
def test_a_bad_prompt_is_named_by_its_index(
    encoder: PromptEncoder, prompt: Any, where: str, got: str, allowed: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encoder.encode(["hello", prompt, [5]], {})
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.got == got
    assert allowed in problem.allowed


def test_the_longest_prompt_and_the_highest_id_are_allowed(encoder: PromptEncoder) -> None:
    assert encoder.encode([[5] * 7], {}) == [[5] * 7]


def test_every_bad_prompt_is_told_of(encoder: PromptEncoder) -> None:
    with pytest.raises(InvalidRequest, match="2 of 3 prompts") as caught:
        encoder.encode([[9], "hello", [8]], {})
    assert [problem.where for problem in caught.value.problems] == [
        "prompts[0].ids[0]",
        "prompts[2].ids[0]",
    ]


def test_special_tokens_are_left_out_of_the_text(encoder: PromptEncoder) -> None:
    assert encoder.decode([[2, 3, 1], []]) == ["hello there", ""]

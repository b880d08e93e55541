"""Prompts -> token ids: the chat template, and no second BOS."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from shared.errors import InvalidRequest, Problem
from shared.requests import ChatMessage
from shared.tokens import tokenizer_fingerprint

_PROBLEMS_SHOWN = 20
_SHOWN_CHARS = 300
_TOKENIZER_ARGUMENTS = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)


class PromptEncoder:
    """Turns prompts into ids and completions into text, with the model's tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        vocab_size: ids at or above this are refused.
        max_model_len: prompt and completion together; a prompt must leave room for one token.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_prompt_len = max_model_len - 1
        self.fingerprint = tokenizer_fingerprint(tokenizer)

    def encode(
        self, prompts: Sequence[str | list[int] | list[ChatMessage]], template: dict[str, Any]
    ) -> list[list[int]]:
        """Ids of each prompt, as the engine will see them.

        Raises:
            InvalidRequest: one or more prompts cannot be used; ``problems`` gives their indices.
        """
        self._check_template(template)
        encoded: list[list[int]] = []
        problems: list[Problem] = []
        for index, prompt in enumerate(prompts):
            ids, problem = self._encode_one(f"prompts[{index}]", prompt, template)
            encoded.append(ids)
            problems += [problem] if problem else []
        if problems:
            raise InvalidRequest(
                f"{len(problems)} of {len(prompts)} prompts cannot be used",
                problems=problems[:_PROBLEMS_SHOWN],
            )
        return encoded

    def _check_template(self, template: dict[str, Any]) -> None:
        # What the tokenizer itself understands would cut, pad or replace prompts behind our back.
        if reserved := sorted(_TOKENIZER_ARGUMENTS & template.keys()):
            where, allowed = (
                f"chat_template_kwargs.{reserved[0]}",
                "variables of the template alone",
            )
            problem = Problem(where, "an argument of the tokenizer", allowed)
            raise InvalidRequest("the chat template cannot be given that", problems=[problem])

    def _encode_one(
        self, where: str, prompt: str | list[int] | list[ChatMessage], template: dict[str, Any]
    ) -> tuple[list[int], Problem | None]:
        try:
            ids = self._ids(prompt, template)
            return ids, self._problem(where, ids)
        except Exception as error:  # a template is a program, and may raise or return anything
            reason = f"{type(error).__name__}: {error}"
            return [], Problem(
                where, reason[:_SHOWN_CHARS], "a prompt that the template can render"
            )

    def _ids(
        self, prompt: str | list[int] | list[ChatMessage], template: dict[str, Any]
    ) -> list[int]:
        if isinstance(prompt, str):
            # Text that brings its own BOS must not get a second one from the tokenizer.
            bos = self._tokenizer.bos_token
            add_special = not (bos and prompt.startswith(bos))
            return list(self._tokenizer.encode(prompt, add_special_tokens=add_special))
        if isinstance(prompt[0], int):
            return prompt
        # The template writes every special token itself, so it is the only place that does.
        return list(
            self._tokenizer.apply_chat_template(
                [message.model_dump(exclude_none=True) for message in prompt],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **template,
            )
        )

    def _problem(self, where: str, ids: list[int]) -> Problem | None:
        if not 1 <= len(ids) <= self._max_prompt_len:
            return Problem(where, f"{len(ids)} tokens", f"1 to {self._max_prompt_len} tokens")
        return unknown_id(f"{where}.ids", ids, self._vocab_size)

    def decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Text of each completion without special tokens: for scoring and for eyes."""
        texts: list[str] = self._tokenizer.batch_decode(completions, skip_special_tokens=True)
        return texts

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Text of ids with special tokens: to look at, and where stop strings are looked for."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def unknown_id(where: str, ids: Sequence[int], vocab_size: int) -> Problem | None:
    """What is wrong with the first id beyond the vocabulary, if there is one."""
    if max(ids) < vocab_size:
        return None
    at = next(i for i, token in enumerate(ids) if token >= vocab_size)
    return Problem(f"{where}[{at}]", str(ids[at]), f"ids below {vocab_size}")

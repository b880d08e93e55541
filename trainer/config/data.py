"""``[data]`` and ``[data.arithmetic]``: where problems come from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.arithmetic import SHORT_QUESTION
from trainer.config.section import Section


class ArithmeticConfig(Section):
    """Options of the built-in problems."""

    max_operand: int = Field(default=50, ge=9)
    operations: tuple[Literal["+", "-", "*"], ...] = Field(default=("+", "-"), min_length=1)
    question: str = Field(default=SHORT_QUESTION, description="With {a}, {op} and {b}.")

    @model_validator(mode="after")
    def _has_places(self) -> Self:
        try:
            self.question.format(a=1, op="+", b=2)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"question may name {{a}}, {{op}} and {{b}} alone: {error}") from None
        return self


class DataConfig(Section):
    """Prompts and reference answers."""

    source: Literal["arithmetic", "jsonl", "dataset"] = Field(
        default="arithmetic", description="dataset is a Hugging Face dataset saved to disk."
    )
    path: str | None = Field(default=None, description="The JSONL file or the dataset's directory.")
    split: str | None = Field(
        default=None, description="Which split, when the dataset has several."
    )
    prompt_field: str = Field(
        default="prompt", description="Column with a string or chat messages."
    )
    answer_field: str = Field(
        default="answer", description="Column with the reference; empty: none."
    )
    chat: bool = Field(
        default=True, description="Send strings as a user's message, not as plain text."
    )
    template: str = Field(default="{prompt}", description="Wording around a string prompt.")
    system: str = Field(default="", description="A system message before every chat; empty: none.")
    shuffle: bool = Field(default=True, description="Reshuffle the rows in every epoch.")
    arithmetic: ArithmeticConfig = ArithmeticConfig()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.source == "arithmetic") != (self.path is None):
            raise ValueError(f"source {self.source!r} with path {self.path!r}: a path goes with "
                             f"jsonl and dataset, and only with them")  # fmt: skip
        if self.split is not None and self.source != "dataset":
            raise ValueError(f"split {self.split!r}: only source 'dataset' has splits")
        if "{prompt}" not in self.template:
            raise ValueError("template lacks {prompt}, so every prompt would be the same")
        if self.system and not self.chat:
            raise ValueError("a system message needs chat = true")
        return self

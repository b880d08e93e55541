"""``[evaluation]``: accuracy on held-out problems."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from trainer.config.section import CountOrNone, Section


class EvaluationConfig(Section):
    """Accuracy on held-out problems, before, after and in between."""

    every: CountOrNone = Field(default=0, description="Steps; 0: before and after alone.")
    prompts: CountOrNone = Field(default=64, description="Held-out problems; 0 evaluates nothing.")
    samples: CountOrNone = Field(
        default=0, description="Sampled answers for each, beside a greedy one."
    )
    max_tokens: CountOrNone = Field(default=0, description="0: as in training.")
    path: str | None = Field(default=None, description="Held-out rows, for jsonl and dataset.")
    split: str | None = None
    right_at: float = Field(
        default=1.0, description="The reward from which an answer counts as right in pass@k."
    )
    answer_pattern: str = Field(
        default="",
        description="Of strict parsing: a regular expression whose one group is the answer, such "
        "as '#### (.*)'; empty: the whole text is the answer.",
    )

    @model_validator(mode="after")
    def _captures_one_answer(self) -> Self:
        try:
            groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            raise ValueError(f"answer_pattern is not a regular expression: {error}") from None
        if self.answer_pattern and groups != 1:
            raise ValueError(f"answer_pattern has {groups} groups; the one is the answer")
        return self

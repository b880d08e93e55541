"""``[reward]`` and ``[[reward.functions]]``: what answers are worth."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from trainer.config.section import Count, Section
from trainer.reward_parts import Part


class RewardFunctionConfig(Section):
    """One of several rewards: a ``[[reward.functions]]`` table."""

    name: str = Field(default="", description="For metrics; empty: as the function is called.")
    function: str = Field(min_length=1, description="As reward.function.")
    weight: float = Field(default=1.0, description="Factor in the sum.")
    options: dict[str, Any] = Field(default_factory=dict, description="As reward.options.")

    def part(self) -> Part:
        """The same as the workers know it."""
        name = self.name or self.function.rpartition(":")[2]
        return Part(name, self.function, self.weight, self.options)


class RewardConfig(Section):
    """How samples are scored, see :mod:`trainer.rewards`: by one function or by several."""

    function: str | None = Field(
        default=None,
        min_length=1,
        description="numeric (when nothing is said), exact, math, format, regex, length_penalty, "
        "code, http, or path/to/file.py:function.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of every call, or the service's url."
    )
    functions: tuple[RewardFunctionConfig, ...] = Field(
        default=(), description="Instead of function: several, whose weighted sum is maximised."
    )
    workers: Count = Field(default=4, description="Most processes that score at a time.")
    timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds for one sample, or for a batch of a service."
    )
    memory_mb: Count = Field(
        default=2048, description="A worker's, beyond what it holds once the functions are loaded."
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.functions and (self.function or self.options):
            raise ValueError("function and options, or a list of functions, but not both")
        names = [part.name for part in self.parts()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two functions named {', '.join(twice)}: give each a name of its own")
        return self

    def parts(self) -> tuple[Part, ...]:
        """The reward functions, at least one."""
        if self.functions:
            return tuple(function.part() for function in self.functions)
        function = self.function or "numeric"
        return (RewardFunctionConfig(function=function, options=self.options).part(),)

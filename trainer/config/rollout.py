"""``[rollout]``: how answers are drawn."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shared.protocol import MAX_GROUP_SIZE, MAX_PROMPTS, MAX_TEMPERATURE, MIN_TEMPERATURE
from trainer.config.section import Count, Section


class RolloutConfig(Section):
    """What is asked of the server in each step."""

    prompts_per_step: int = Field(
        default=32, ge=1, le=MAX_PROMPTS, description="Groups that a step begins with."
    )
    group_size: int = Field(
        default=8, ge=2, le=MAX_GROUP_SIZE, description="One has no peers to beat."
    )
    max_tokens: Count = Field(
        default=512, description="Of a completion. Cut off too early, answers cannot be right."
    )
    temperature: float = Field(
        default=1.0,
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        description="Greedy samples cannot train.",
    )
    refill_budget: float = Field(
        default=0.0,
        ge=0,
        description="Prompts that may be asked for beyond prompts_per_step, as a share of it, to "
        "replace groups that teach nothing.",
    )
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    seeded: bool = Field(
        default=False,
        description="Draw every group with a seed of its own, which follows from train.seed. With "
        "a server that was started with --deterministic, runs repeat bit by bit.",
    )

    def sampling(self) -> dict[str, Any]:
        """The fields of a rollout request that say how one completion is drawn."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "chat_template_kwargs": self.chat_template_kwargs,
        }

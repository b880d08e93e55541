"""``[objective]``: the loss."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trainer.config.section import Count, Section
from trainer.objective import PRESETS, Objective

Bound = float | Literal["off"] | None


class ObjectiveConfig(Section):
    """The loss: a preset, of which any of the keys after ``name`` replaces a part.

    What each means is said in :class:`trainer.objective.Objective`.
    """

    name: str = Field(default="grpo", description=f"{', '.join(PRESETS)}.")
    surrogate: str | None = None
    clip_low: Bound = Field(default=None, description="off leaves that side open.")
    clip_high: Bound = None
    dual_clip: Bound = None
    beta: float | None = Field(default=None, description="Above 0 a frozen reference is loaded.")
    kl: str | None = Field(default=None, description="k1_reward, k2, k3_ratio or k3_forward.")
    reduction: str | None = None
    constant_length: Count | None = Field(
        default=None, description="Of dr_grpo; unset: rollout.max_tokens."
    )
    baseline: str | None = Field(default=None, description="mean or leave_one_out.")
    scale: str | None = Field(default=None, description="group_std, batch_std or none.")
    normalise: str | None = Field(
        default=None, description="sum, or each: before rewards are added."
    )
    truncated: str | None = Field(default=None, description="keep, mask or punish.")
    overlong_cache: Count | None = Field(
        default=None, description="Of punish: the last tokens before max_tokens, which cost."
    )
    overlong_weight: float = Field(default=1.0, gt=0, description="Of punish: cost of the last.")
    correction: str | None = Field(
        default=None,
        description="Of the sampler/trainer mismatch: token, sequence or geometric, then _truncate "
        "or _mask; or none.",
    )
    correction_low: Bound = None
    correction_high: Bound = None

    def resolve(
        self, max_tokens: int, rewards: tuple[tuple[str, float], ...] | None = None
    ) -> Objective:
        """The objective that these keys stand for.

        Args:
            max_tokens: what ``dr_grpo`` divides by when no ``constant_length`` is set, and where
                ``punish`` ends.
            rewards: name and weight of each.

        Raises:
            ValueError: a name is unknown, or settings contradict each other.
        """
        apart = {"name", "overlong_cache", "overlong_weight"}
        changes: dict[str, Any] = self.model_dump(exclude=apart, exclude_none=True)
        changes = {name: None if value == "off" else value for name, value in changes.items()}
        reduction = changes.get("reduction", PRESETS.get(self.name, {}).get("reduction"))
        if reduction == "dr_grpo" and "constant_length" not in PRESETS.get(self.name, {}):
            changes.setdefault("constant_length", max_tokens)
        if self.overlong_cache is not None:
            changes["overlong"] = (max_tokens, self.overlong_cache, self.overlong_weight)
        if rewards is not None:
            changes["rewards"] = rewards
        return Objective.named(self.name, **changes)

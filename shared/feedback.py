"""What a trainer tells the server about samples that it has scored; see ``POST /rewards``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from shared.protocol import MAX_GROUP_SIZE, MAX_PROMPTS

MAX_COMPONENTS = 16

_Name = Annotated[str, Field(min_length=1, max_length=64)]
_Components = Annotated[dict[_Name, float], Field(max_length=MAX_COMPONENTS)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GroupRewards(_Part):
    """Rewards of one group, in the order of its samples."""

    id: str = Field(max_length=64, description="Of the group, from the answer to its rollout.")
    rewards: list[float | None] = Field(
        min_length=1, max_length=MAX_GROUP_SIZE, description="None where there is no verdict."
    )
    components: list[_Components] | None = Field(
        None, description="What each reward is made of, by name; for each sample."
    )

    @field_validator("components")
    @classmethod
    def _for_each_sample(
        cls, value: list[dict[str, float]] | None, info: ValidationInfo
    ) -> list[dict[str, float]] | None:
        # Rewards that were refused themselves are not in there, and are reported already.
        rewards = info.data.get("rewards")
        if value is not None and rewards is not None and len(value) != len(rewards):
            raise PydanticCustomError("components", "one map for each reward, or null")
        return value


class RewardReport(_Part):
    """Body of ``POST /rewards``."""

    groups: list[GroupRewards] = Field(min_length=1, max_length=MAX_PROMPTS)

"""What a caller may ask for: the bodies and queries of requests, and what is wrong with bad ones.

They are pydantic models, because the server must say exactly what is wrong with a bad request. The
client sends plain data, which the server judges, so that it is spared pydantic, which takes longer
to import than all the rest of it.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shared.protocol import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_POLICY,
    MAX_DEADLINE_S,
    MAX_GROUP_SIZE,
    MAX_PROMPTS,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    POLICY_NAME,
    PauseMode,
    Purpose,
)


class ChatMessage(BaseModel):
    """One turn of a conversation, handed to the model's chat template as it is."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, description="system, user, assistant or as the template has.")
    content: str | list[dict[str, Any]] | None = None


_TokenId = Annotated[int, Field(strict=True, ge=0)]
_WholeNumber = Annotated[int, Field(strict=True)]


class BegunCompletion(BaseModel):
    """A prompt as token ids, the last of which are a completion that is to be continued.

    Text is decoded, and stop strings are looked for, over the whole completion.
    """

    model_config = ConfigDict(frozen=True)

    token_ids: list[_TokenId] = Field(
        fail_fast=True, min_length=1, description="The prompt's, then the completion's."
    )
    completion_from: _WholeNumber = Field(
        ge=1, description="Index at which the completion begins; at most the number of ids."
    )

    @model_validator(mode="before")
    @classmethod
    def _knows_all_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.keys() - cls.model_fields.keys():
            raise PydanticCustomError("fields", "a map with token_ids and completion_from alone")
        return value

    @field_validator("completion_from")
    @classmethod
    def _is_inside(cls, value: int, info: ValidationInfo) -> int:
        # Ids that were refused themselves are not in there, and are reported already.
        ids = info.data.get("token_ids")
        if ids is not None and value > len(ids):
            raise PydanticCustomError(
                "completion_from", "1 to {most}, the number of token_ids", {"most": len(ids)}
            )
        return value


def _prompt_kind(prompt: Any) -> str | None:
    """Which of the four forms a prompt has, so that errors speak of that form alone."""
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, BegunCompletion):
        return "begun"
    if isinstance(prompt, dict):
        return "begun" if prompt.keys() & BegunCompletion.model_fields.keys() else None
    if isinstance(prompt, list | tuple) and prompt:
        return "messages" if isinstance(prompt[0], dict | ChatMessage) else "ids"
    return None


Prompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")]
    # One bad id is enough to refuse a prompt; a report of each would cost more than the prompt.
    | Annotated[list[_TokenId], Field(fail_fast=True), Tag("ids")]
    | Annotated[list[ChatMessage], Field(fail_fast=True), Tag("messages")]
    | Annotated[BegunCompletion, Tag("begun")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message=(
            "a non-empty string, a list of token ids, a list of chat messages, "
            "or a map with token_ids and completion_from"
        ),
    ),
]


_SLICE = 64


def _in_slices(prompts: Any, validate: ValidatorFunctionWrapHandler) -> list[Any]:
    """Validate many prompts some at a time.

    A thread that validated millions of ids in one call would keep every other thread waiting.
    """
    if isinstance(prompts, list) and _SLICE < len(prompts) <= MAX_PROMPTS:
        slices = (prompts[start : start + _SLICE] for start in range(0, len(prompts), _SLICE))
        with contextlib.suppress(ValidationError):  # below, for the index of what is wrong
            return [prompt for part in slices for prompt in validate(part)]
    validated: list[Any] = validate(prompts)
    return validated


class SamplingSettings(BaseModel):
    """How completions are drawn. The answer carries these back as they were applied."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_tokens: _WholeNumber = Field(
        DEFAULT_MAX_TOKENS, ge=1, description="New tokens a completion may have."
    )
    temperature: float = Field(
        1.0,
        ge=0.0,
        le=MAX_TEMPERATURE,
        description="0.01 to 2, or 0, which is greedy and for eval only.",
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus mass; below 1 for eval only.")
    top_k: _WholeNumber = Field(
        0, ge=0, description="0 keeps the whole vocabulary; else for eval only."
    )
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="Above 0 for eval only.")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="Not 0 for eval only.")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="Not 0 for eval only.")
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0, description="Not 1 for eval only.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, max_length=16, description="Strings that end a completion."
    )
    stop_token_ids: list[_TokenId] = Field(
        default_factory=list, max_length=64, description="Token ids that end one, kept in it."
    )
    ignore_eos: bool = Field(False, description="Go on after the end-of-sequence token.")
    seed: Annotated[_WholeNumber, Field(ge=0, lt=2**53)] | None = Field(
        None, description="Group i is drawn with seed + i; unset: with whatever comes next."
    )

    @field_validator("temperature")
    @classmethod
    def _is_applied(cls, value: float) -> float:
        # The engine would raise it to its own minimum without a word.
        if 0.0 < value < MIN_TEMPERATURE:
            raise PydanticCustomError("temperature", "0 (greedy), or 0.01 to 2")
        return value


class RolloutRequest(SamplingSettings):
    """Body of ``POST /rollout``."""

    prompts: Annotated[list[Prompt], WrapValidator(_in_slices)] = Field(
        fail_fast=True,
        min_length=1,
        max_length=MAX_PROMPTS,
        description="Chat messages, plain text, token ids, or a begun completion; may be mixed.",
    )
    group_size: _WholeNumber = Field(
        8, ge=1, le=MAX_GROUP_SIZE, description="Completions per prompt."
    )
    purpose: Purpose = Field(
        Purpose.TRAIN, description="train refuses settings that a trainer could not account for."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the chat template, e.g. enable_thinking."
    )
    text: bool = Field(True, description="Decode completions for scoring and for eyes.")
    packed: bool = Field(False, description="Arrays as msgpack bin: int32 ids, float32 logprobs.")

    stream: bool = Field(False, description="Send each group as soon as its last sample ends.")
    have: list[_WholeNumber] = Field(
        default_factory=list,
        fail_fast=True,
        max_length=MAX_PROMPTS,
        description="Groups that an earlier answer has brought; with stream.",
    )
    deadline_seconds: float | None = Field(
        None, gt=0.0, le=MAX_DEADLINE_S, description="How long all of it may take."
    )
    partial: bool = Field(
        False, description="At the deadline, answer with the groups that are finished."
    )

    policy: str = Field(DEFAULT_POLICY, pattern=POLICY_NAME, description="Which policy samples.")
    version: int | None = Field(None, ge=0, description="Only if exactly this version is live.")
    digest: str | None = Field(
        None, pattern=r"^[0-9a-f]{32}$", description="Only if these weights are live."
    )
    min_version: int | None = Field(
        None, ge=0, description="Only if this version or a later one is live."
    )
    trainer_version: int | None = Field(
        None, ge=0, description="Version that the trainer has reached; with max_staleness."
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        validate_default=True,
        description="Only if the live version is at most this far behind trainer_version.",
    )
    wait_seconds: float = Field(
        0.0, ge=0.0, le=3600.0, description="How long to wait for these conditions to hold."
    )

    @field_validator("max_staleness")
    @classmethod
    def _pair(cls, value: int | None, info: ValidationInfo) -> int | None:
        # A trainer_version that was refused itself is not in there, and is reported already.
        trainer_version = info.data.get("trainer_version", value)
        if (trainer_version is None) != (value is None):
            raise PydanticCustomError("pair", "set together with trainer_version, or neither")
        return value

    @field_validator("have")
    @classmethod
    def _is_lacked_by_a_stream(cls, value: list[int], info: ValidationInfo) -> list[int]:
        if value and not info.data.get("stream", True):
            raise PydanticCustomError("have", "an empty list, or set stream")
        last = len(info.data.get("prompts", [])) - 1
        if last >= 0 and value and not 0 <= min(value) <= max(value) <= last:
            raise PydanticCustomError("have", "group ids from 0 to {last}", {"last": last})
        return value

    @field_validator("partial")
    @classmethod
    def _has_a_deadline(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("deadline_seconds", value) is None:
            raise PydanticCustomError("partial", "false, or set deadline_seconds")
        return value

    def sampling(self) -> SamplingSettings:
        """The sampling part alone, as echoed in the answer."""
        names = SamplingSettings.model_fields
        return SamplingSettings(**{name: getattr(self, name) for name in names})


class ScoreRequest(BaseModel):
    """Body of ``POST /score``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequences: Annotated[list[BegunCompletion], WrapValidator(_in_slices)] = Field(
        fail_fast=True,
        min_length=1,
        max_length=MAX_PROMPTS,
        description="Token ids each, of which those from completion_from on are scored.",
    )
    packed: bool = Field(False, description="Arrays as msgpack bin: float32.")
    policy: str = Field(DEFAULT_POLICY, pattern=POLICY_NAME, description="Which policy scores.")


class ResetQuery(BaseModel):
    """Query of ``POST /policies/{name}/reset``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mode: PauseMode = Field(PauseMode.KEEP, description="What becomes of samples in flight.")
    drain_seconds: float = Field(60.0, gt=0.0, le=3600.0, description="How long drain may take.")


class ReloadQuery(ResetQuery):
    """Query of ``POST /reload``."""

    policy: str = Field(DEFAULT_POLICY, pattern=POLICY_NAME, description="Which policy to publish.")


class ReloadFromPath(BaseModel):
    """JSON or msgpack body of ``POST /reload``: weights that the server can read itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1, description="A .safetensors file, or a directory of shards.")
    digest: str | None = Field(None, pattern=r"^[0-9a-f]{32}$", description="Expected digest.")


class PartQuery(BaseModel):
    """Query of ``PUT /reload/parts/{id}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: int = Field(ge=0, description="Where in the file the first of these tensors begins.")


class PartsEnd(BaseModel):
    """Body of ``POST /reload/parts/{id}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str | None = Field(None, pattern=r"^[0-9a-f]{32}$", description="Expected digest.")


class LeaseRequest(BaseModel):
    """Body of ``POST /policies/{name}/lease``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    holder: str | None = Field(
        None, min_length=1, max_length=128, description="Who writes; the server chooses a name."
    )
    ttl_seconds: float = Field(30.0, gt=0.0, description="Life without a heartbeat.")


class LeaseRenewal(BaseModel):
    """Body of ``POST /policies/{name}/lease/renew``: a heartbeat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fence: int = Field(ge=0, description="The lease's fencing number.")

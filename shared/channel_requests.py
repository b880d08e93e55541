"""What may be asked for about channels; see :mod:`shared.channel` and :mod:`shared.requests`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.weights import TensorSpec

CHANNEL_ID = r"^[0-9a-f]{32}$"

_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ChannelTensor(BaseModel):
    """One tensor, as in a safetensors header."""

    model_config = _STRICT

    name: str = Field(max_length=1024)
    dtype: str = Field(max_length=16)
    shape: list[int] = Field(max_length=16)

    def spec(self) -> TensorSpec:
        """The same, as everything else knows it."""
        return TensorSpec(self.name, self.dtype, tuple(self.shape))


class ChannelRequest(BaseModel):
    """Body of ``POST /policies/default/channel``."""

    model_config = _STRICT

    kind: Literal["ipc", "nccl"] = Field(
        description="ipc for a process of the same host, nccl for another GPU."
    )
    tensors: list[ChannelTensor] = Field(
        min_length=1, description="The whole checkpoint, in the dtype that it is served in."
    )


class ChannelQuery(BaseModel):
    """Query of ``GET /policies/default/channel/{id}``."""

    model_config = _STRICT

    wait_seconds: float = Field(
        0.0, ge=0.0, le=600.0, description="How long to wait until its buffer may be written."
    )


class ReloadFromChannel(BaseModel):
    """JSON or msgpack body of ``POST /reload``: weights that come, or came, by a channel."""

    model_config = _STRICT

    channel: str = Field(pattern=CHANNEL_ID, description="An open channel of the caller.")
    durable: bool = Field(
        False, description="Answer only when the version would survive the engine's death."
    )

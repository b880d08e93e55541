"""``[server]``: who samples, and how weights get there."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.config.section import DType, Section

Url = Annotated[str, Field(pattern=r"^https?://\S+$")]


class ServerConfig(Section):
    """The rollout server."""

    url: Url = Field(default="http://127.0.0.1:8300", description="Where it listens.")
    urls: tuple[Url, ...] = Field(
        default=(), description="Several servers, which share the work; used instead of url."
    )
    token_env: str = Field(
        default="TITO_TOKEN",
        description="Environment variable that holds the bearer token, if any.",
    )
    timeout: float = Field(
        default=600.0, gt=0, description="Seconds without a byte before giving up."
    )
    ready_timeout: float = Field(
        default=300.0,
        ge=0,
        description="Seconds to wait for one at the start, when all fail, and in eval for room.",
    )
    publish_dtype: DType = Field(
        default="bfloat16", description="What weights are cast to for sending."
    )
    transport: Literal["http", "delta", "ipc", "nccl", "auto"] = Field(
        default="http",
        description="delta sends what has changed, at the price of a copy of the weights for each "
        "server in this process's memory; publish_dtype must be what the servers serve. ipc "
        "copies into the memory of a server of this host, nccl broadcasts to its GPUs. auto takes "
        "the fastest of ipc, nccl and http that works.",
    )
    sleep: Literal[0, 1, 2] = Field(
        default=0,
        description="For a server on the GPU that trains: it sleeps while the trainer steps. 1 "
        "keeps its weights in host memory, 2 drops them, 0 never sleeps.",
    )
    report_rewards: bool = Field(
        default=True, description="Send scores back, for the servers' pages to show."
    )

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("urls names a server twice")
        if self.sleep and len(self.every_url()) > 1:
            raise ValueError("sleep is for the one server that shares the trainer's GPU")
        return self

    def every_url(self) -> tuple[str, ...]:
        """All servers; at least one."""
        return self.urls or (self.url,)

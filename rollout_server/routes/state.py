"""How a route reaches what the application was made of."""

from __future__ import annotations

from typing import cast

from fastapi import Request

from rollout_server.channels import Channels
from rollout_server.foreign_updates import ForeignUpdates
from rollout_server.leases import Leases
from rollout_server.metrics import Metrics
from rollout_server.pauses import Pauses
from rollout_server.service import Startup
from rollout_server.vllm_serving import OpenAIServing


def startup_of(request: Request) -> Startup:
    """The service, or what will become it."""
    return cast(Startup, request.app.state.startup)


def metrics_of(request: Request) -> Metrics:
    """The application's metrics."""
    return cast(Metrics, request.app.state.metrics)


def leases_of(request: Request) -> Leases:
    """Who may publish which policy; there also while the engine is not."""
    return cast(Leases, request.app.state.leases)


def channels_of(request: Request) -> Channels:
    """Ways into the workers' memory."""
    return cast(Channels, request.app.state.channels)


def openai_of(request: Request) -> OpenAIServing:
    """vLLM's OpenAI-compatible handlers."""
    return cast(OpenAIServing, request.app.state.openai)


def pauses_of(request: Request) -> Pauses:
    """Who has paused the engine."""
    return cast(Pauses, request.app.state.pauses)


def updates_of(request: Request) -> ForeignUpdates:
    """Weights that come by vLLM's own routes."""
    return cast(ForeignUpdates, request.app.state.updates)

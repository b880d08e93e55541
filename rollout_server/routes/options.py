"""How a request says under which lease, and how, weights are to be published."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request

from rollout_server.attempts import PublishOptions
from rollout_server.auth import Caller
from rollout_server.http import whole_number
from rollout_server.routes.state import leases_of
from shared.protocol import FENCE_HEADER
from shared.requests import ResetQuery


def publish_options(
    request: Request, caller: Caller, policy: str, query: ResetQuery
) -> PublishOptions:
    """Options of a publish by ``caller``, which its lease, if there is one, must allow."""
    fence = whole_number(FENCE_HEADER, request.headers.get(FENCE_HEADER))
    claim: dict[str, Any] = {"fence": fence, "owner": caller.name}
    leases = leases_of(request)
    return PublishOptions(
        publisher=caller.name,
        check=partial(leases.check, policy, **claim),
        commit=partial(leases.commit, policy, **claim),
        mode=query.mode,
        drain_seconds=query.drain_seconds,
    )

"""``POST /rollout``: prompts in, groups of samples out."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from rollout_server.auth import ROLLOUT, caller_with
from rollout_server.http import answer_type, read_model, while_connected
from rollout_server.preconditions import hold
from rollout_server.routes.state import metrics_of, startup_of
from rollout_server.service import Service
from shared.codec import encode, rollout_to_wire
from shared.errors import InvalidRequest, Problem
from shared.protocol import JSON, MSGPACK, Rollout, RolloutRequest

router = APIRouter()

_EXAMPLE: dict[str, Any] = {
    "prompts": [[{"role": "user", "content": "12+7=?"}], "12+7=", [5, 6, 7]],
    "group_size": 4,
    "max_tokens": 16,
}
_SCHEMA = {"schema": RolloutRequest.model_json_schema(ref_template="#/components/schemas/{model}")}


@router.post(
    "/rollout",
    summary="Sample completions of prompts, as token ids",
    dependencies=[Depends(caller_with(ROLLOUT))],
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {JSON: {**_SCHEMA, "example": _EXAMPLE}, MSGPACK: _SCHEMA},
        }
    },
)
async def rollout(request: Request) -> Response:
    """Groups in prompt order; see PROTOCOL.md for every field."""
    service = startup_of(request).service
    service.check_ready()
    asked = await read_model(request, RolloutRequest, service.settings.max_body_bytes)
    content_type = answer_type(request, default=MSGPACK)
    if asked.packed and content_type != MSGPACK:
        problem = Problem("packed", "true", f"false, or Accept: {MSGPACK}")
        raise InvalidRequest("JSON cannot carry packed arrays", problems=[problem])
    result = await while_connected(request, _sampled(service, asked))
    metrics_of(request).observe_rollout(result)
    body = await asyncio.to_thread(_encode, result, asked.packed, content_type)
    return Response(body, media_type=content_type)


async def _sampled(service: Service, asked: RolloutRequest) -> Rollout:
    service.rollouts.check(asked)
    policy = service.policies[asked.policy]
    await hold(policy, asked)
    return await service.rollouts.rollout(asked, policy)


def _encode(result: Rollout, packed: bool, content_type: str) -> bytes:
    return encode(rollout_to_wire(result, packed=packed), content_type)

"""``POST /score``: log-probabilities of given token ids."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from rollout_server.auth import ROLLOUT, Caller, caller_with
from rollout_server.http import answer_type, read_model, refuse_packed_json, while_connected
from rollout_server.routes import documents
from rollout_server.routes.state import startup_of
from shared.codec import encode, scores_to_wire
from shared.protocol import MSGPACK
from shared.requests import ScoreRequest

router = APIRouter()

_EXAMPLE: dict[str, Any] = {"sequences": [{"token_ids": [5, 6, 7, 8], "completion_from": 2}]}


@router.post(
    "/score",
    summary="Log-probabilities of given token ids",
    openapi_extra=documents.body(ScoreRequest, _EXAMPLE),
)
async def score(
    request: Request, caller: Annotated[Caller, Depends(caller_with(ROLLOUT))]
) -> Response:
    """One entry for each sequence, in order; see PROTOCOL.md for every field."""
    service = startup_of(request).service
    service.check_ready()
    asked = await read_model(request, ScoreRequest, service.settings.max_body_bytes)
    content_type = answer_type(request, default=MSGPACK)
    refuse_packed_json(asked.packed, content_type)
    policy = service.policies[asked.policy]
    scores = await while_connected(request, service.scores.score(caller, asked, policy))

    def body() -> bytes:
        answer = {"policy": policy.name, "scores": scores_to_wire(scores, packed=asked.packed)}
        return encode(answer, content_type)

    return Response(await asyncio.to_thread(body), media_type=content_type)

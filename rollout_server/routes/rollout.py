"""``POST /rollout``: prompts in, groups of samples out, at once or as they finish."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from rollout_server.auth import ROLLOUT, Caller, caller_with
from rollout_server.http import answer, answer_type, read_model, refuse_packed_json, while_connected
from rollout_server.job import Job, name_of
from rollout_server.routes import documents
from rollout_server.routes.state import startup_of
from rollout_server.service import Service
from rollout_server.streams import Delivery, StreamAnswer, frames
from shared.codec import encode_rollout, media_type
from shared.errors import InvalidRequest, Problem
from shared.protocol import FRAMES, IDEMPOTENCY_HEADER, IDEMPOTENCY_KEY, JSON, MSGPACK, NDJSON
from shared.requests import RolloutRequest

router = APIRouter()

_CALLER = Annotated[Caller, Depends(caller_with(ROLLOUT))]
_EXAMPLE: dict[str, Any] = {
    "prompts": [[{"role": "user", "content": "12+7=?"}], "12+7=", [5, 6, 7]],
    "group_size": 4,
    "max_tokens": 16,
}
_KEY = documents.header(
    IDEMPOTENCY_HEADER, "Run it once, however often it is sent.", IDEMPOTENCY_KEY
)
_SHOWN_CHARS = 80


@router.post(
    "/rollout",
    summary="Sample completions of prompts, as token ids",
    openapi_extra={**documents.body(RolloutRequest, _EXAMPLE), "parameters": [_KEY]},
)
async def rollout(request: Request, caller: _CALLER) -> Response:
    """Groups in prompt order, or in a stream as they finish; see PROTOCOL.md for every field."""
    service = startup_of(request).service
    service.check_ready()
    key = _key_of(request)
    asked = await read_model(request, RolloutRequest, service.settings.max_body_bytes)
    content_type = _stream_type(request) if asked.stream else answer_type(request, default=MSGPACK)
    refuse_packed_json(asked.packed, content_type)
    name = await asyncio.to_thread(name_of, caller, key, asked) if key else None
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(service.jobs.attached(caller, asked, name))
        if not asked.stream:
            result = await while_connected(request, job.result())
            body = await asyncio.to_thread(
                encode_rollout, result, packed=asked.packed, content_type=content_type
            )
            return Response(body, media_type=content_type)
        return await _streamed(request, service, job, asked, content_type, stack)


async def _streamed(
    request: Request,
    service: Service,
    job: Job,
    asked: RolloutRequest,
    content_type: str,
    stack: contextlib.ExitStack,
) -> Response:
    keepalive_s = service.settings.keepalive_seconds
    # What fails before the stream has begun still gets a status of its own.
    await while_connected(request, job.begun(keepalive_s))
    delivery = Delivery(content_type, asked.packed, frozenset(asked.have), keepalive_s)
    return StreamAnswer(frames(job, delivery), stack.pop_all(), content_type)


@router.delete(
    "/rollout",
    summary="Stop and forget a rollout that was sent with a key",
    openapi_extra={"parameters": [_KEY]},
)
async def cancel(request: Request, caller: _CALLER) -> Response:
    """Closing the connection is enough for one without a key."""
    key = _key_of(request)
    if key is None:
        problem = Problem(IDEMPOTENCY_HEADER, "no such header", "the key of a rollout")
        raise InvalidRequest("it takes a key to cancel a rollout", problems=[problem])
    return answer(request, {"cancelled": startup_of(request).service.jobs.cancel(caller, key)})


def _key_of(request: Request) -> str | None:
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is not None and not re.fullmatch(IDEMPOTENCY_KEY, key):
        allowed = "8 to 128 of the characters A-Z a-z 0-9 . _ : -"
        problem = Problem(IDEMPOTENCY_HEADER, repr(key[:_SHOWN_CHARS]), allowed)
        raise InvalidRequest("the key cannot be used", problems=[problem])
    return key


def _stream_type(request: Request) -> str:
    """Lines of JSON for whoever accepts JSON and no msgpack; else frames."""
    accepted = {media_type(part) for part in request.headers.get("accept", "").split(",")}
    wants_json = accepted & {NDJSON, JSON} and not accepted & {FRAMES, MSGPACK}
    return NDJSON if wants_json else FRAMES

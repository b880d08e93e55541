"""``POST /reload``: new weights, as a stream or a path that the server may read.

The media type says what the body is: a safetensors file (full weights or, with PEFT's config in its
metadata, a LoRA adapter), a delta, or a document that names a path or a channel.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from rollout_server.attempts import PublishOptions
from rollout_server.auth import Caller, caller_with, publish_scope
from rollout_server.http import answer, read_document, read_query, upload, validated
from rollout_server.routes import channels, documents
from rollout_server.routes.options import publish_options
from rollout_server.routes.state import startup_of
from rollout_server.service import Service
from shared.channel_requests import ReloadFromChannel
from shared.codec import media_type
from shared.errors import BodyTooLarge, InvalidRequest, Problem
from shared.protocol import (
    DEFAULT_POLICY,
    DELTA,
    DIGEST_HEADER,
    DIGEST_TRAILER,
    JSON,
    SAFETENSORS,
    ReloadResult,
)
from shared.requests import ReloadFromPath, ReloadQuery

router = APIRouter()

_MAX_PATH_BODY_BYTES = 64 << 10
_FILE = {"schema": {"type": "string", "format": "binary"}}
_BODY = {
    "required": True,
    "content": {
        SAFETENSORS: _FILE,
        DELTA: _FILE,
        JSON: {
            "schema": {
                "anyOf": [ReloadFromPath.model_json_schema(), ReloadFromChannel.model_json_schema()]
            }
        },
    },
}
_PARAMETERS = [
    *documents.query(ReloadQuery),
    documents.FENCE,
    documents.header(
        DIGEST_HEADER, "Of the tensors as sent.", f"^([0-9a-f]{{32}}|{DIGEST_TRAILER})$"
    ),
]


@router.post(
    "/reload",
    summary="Publish new weights",
    openapi_extra={"requestBody": _BODY, "parameters": _PARAMETERS},
)
async def reload(request: Request, caller: Annotated[Caller, Depends(caller_with())]) -> Response:
    """Verified before anything is paused; answers with version, digest and timings."""
    query = read_query(request, ReloadQuery)
    caller.require(publish_scope(query.policy))
    service = startup_of(request).service
    service.check_ready()
    options = publish_options(request, caller, query.policy, query)
    match media_type(request.headers.get("content-type", "")):
        case "application/x-safetensors":
            result = await _from_stream(request, service, query, options)
        case "application/x-tito-delta":
            result = await _from_delta(request, service, query, options)
        case _:
            document = await read_document(request, _MAX_PATH_BODY_BYTES)
            if isinstance(document, dict) and "channel" in document:
                result = await _from_channel(request, caller, document, query, options)
            else:
                asked = validated(document, ReloadFromPath)
                result = await _from_path(service, asked, query, options)
    return answer(request, asdict(result))


async def _from_stream(
    request: Request, service: Service, query: ReloadQuery, options: PublishOptions
) -> ReloadResult:
    announced = request.headers.get(DIGEST_HEADER)
    if announced not in (None, DIGEST_TRAILER) and not re.fullmatch("[0-9a-f]{32}", announced):
        problem = Problem(DIGEST_HEADER, announced, f"32 hex characters, or {DIGEST_TRAILER}")
        raise InvalidRequest("the announced digest cannot be one", problems=[problem])
    _check_length(request, service)
    trailer = announced == DIGEST_TRAILER
    given: dict[str, Any] = {
        "announced": None if trailer else announced,
        "trailer": trailer,
        "options": options,
    }
    if query.policy == DEFAULT_POLICY:
        return await service.publisher.publish_stream(upload(request), **given)
    return await service.adapters.publish_stream(query.policy, upload(request), **given)


async def _from_delta(
    request: Request, service: Service, query: ReloadQuery, options: PublishOptions
) -> ReloadResult:
    if query.policy != DEFAULT_POLICY:
        problem = Problem("policy", query.policy, f"{DEFAULT_POLICY}; adapters are sent whole")
        raise InvalidRequest("a delta changes full weights only", problems=[problem])
    _check_length(request, service)
    return await service.publisher.publish_delta(upload(request), options=options)


async def _from_channel(
    request: Request,
    caller: Caller,
    document: dict[str, Any],
    query: ReloadQuery,
    options: PublishOptions,
) -> ReloadResult:
    asked = validated(document, ReloadFromChannel)
    if query.policy != DEFAULT_POLICY:
        problem = Problem("policy", query.policy, f"{DEFAULT_POLICY}; adapters are sent whole")
        raise InvalidRequest("channels carry full weights only", problems=[problem])
    return await channels.publish(request, caller, asked, options)


async def _from_path(
    service: Service, asked: ReloadFromPath, query: ReloadQuery, options: PublishOptions
) -> ReloadResult:
    path = Path(asked.path)
    if query.policy == DEFAULT_POLICY:
        return await service.publisher.publish_path(path, announced=asked.digest, options=options)
    return await service.adapters.publish_path(
        query.policy, path, announced=asked.digest, options=options
    )


def _check_length(request: Request, service: Service) -> None:
    length = int(request.headers.get("content-length", 0))
    if length > service.settings.max_upload_bytes:
        raise BodyTooLarge(f"{length} bytes; allowed: {service.settings.max_upload_bytes}")

"""``POST /reload``: new weights, as a safetensors stream or a path that the server may read."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from fastapi import APIRouter, Request, Response

from rollout_server.http import answer, read_model
from rollout_server.routes.state import metrics_of, startup_of
from rollout_server.service import Service
from shared.codec import media_type
from shared.errors import BodyTooLarge, InvalidRequest, Problem
from shared.protocol import (
    DIGEST_HEADER,
    DIGEST_TRAILER,
    JSON,
    SAFETENSORS,
    ReloadFromPath,
    ReloadResult,
)

router = APIRouter()

_MAX_PATH_BODY_BYTES = 64 << 10
_FILE = {"schema": {"type": "string", "format": "binary"}}


@router.post(
    "/reload",
    summary="Publish new weights",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {SAFETENSORS: _FILE, JSON: {"schema": ReloadFromPath.model_json_schema()}},
        }
    },
)
async def reload(request: Request) -> Response:
    """Verified before anything is paused; answers with version, digest and timings."""
    service = startup_of(request).service
    service.check_ready()
    if media_type(request.headers.get("content-type", "")) == SAFETENSORS:
        result = await _from_stream(request, service)
    else:
        asked = await read_model(request, ReloadFromPath, _MAX_PATH_BODY_BYTES)
        result = await service.publisher.publish_path(Path(asked.path), announced=asked.digest)
    metrics_of(request).observe_reload(service.policy.name, result)
    return answer(request, asdict(result))


async def _from_stream(request: Request, service: Service) -> ReloadResult:
    announced = request.headers.get(DIGEST_HEADER)
    if announced not in (None, DIGEST_TRAILER) and not re.fullmatch("[0-9a-f]{32}", announced):
        problem = Problem(DIGEST_HEADER, announced, f"32 hex characters, or {DIGEST_TRAILER}")
        raise InvalidRequest("the announced digest cannot be one", problems=[problem])
    length = int(request.headers.get("content-length", 0))
    if length > service.settings.max_upload_bytes:
        raise BodyTooLarge(f"{length} bytes; allowed: {service.settings.max_upload_bytes}")
    trailer = announced == DIGEST_TRAILER
    return await service.publisher.publish_stream(
        request.stream(), announced=None if trailer else announced, trailer=trailer
    )

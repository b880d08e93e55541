"""``/reload/parts``: new weights whose tensors come in several requests at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from rollout_server.auth import Caller, caller_with, publish_scope
from rollout_server.http import (
    answer,
    read_body,
    read_model,
    read_query,
    upload,
    whole_number,
)
from rollout_server.parted_uploads import PartedUpload
from rollout_server.routes import documents
from rollout_server.routes.options import publish_options
from rollout_server.routes.state import startup_of
from shared.codec import media_type
from shared.errors import (
    InvalidRequest,
    MalformedBody,
    Problem,
    UnsupportedMediaType,
)
from shared.protocol import DEFAULT_POLICY, OCTETS, SAFETENSORS
from shared.requests import PartQuery, PartsEnd, ResetQuery
from shared.weights import MAX_HEADER_BYTES, PREFIX_BYTES, header_length

router = APIRouter(prefix="/reload/parts")

_MAX_BODY_BYTES = 64 << 10
_BYTES = {"schema": {"type": "string", "format": "binary"}}

Writer = Annotated[Caller, Depends(caller_with(publish_scope(DEFAULT_POLICY)))]


def _file(media: str) -> dict[str, Any]:
    return {"required": True, "content": {media: _BYTES}}


@router.post(
    "",
    status_code=201,
    summary="Begin to publish weights in parts",
    openapi_extra={
        "requestBody": _file(SAFETENSORS),
        "parameters": [*documents.query(ResetQuery), documents.FENCE],
    },
)
async def begin(request: Request, caller: Writer) -> Response:
    """The body is a safetensors file up to the end of its header; answers where the rest goes."""
    query, service = read_query(request, ResetQuery), startup_of(request).service
    service.check_ready()
    _require(request, SAFETENSORS)
    head = await read_body(request, PREFIX_BYTES + MAX_HEADER_BYTES)
    end = PREFIX_BYTES + header_length(head[:PREFIX_BYTES])
    if len(head) != end:
        raise MalformedBody(f"the body has {len(head)} bytes; the header's end is at {end}")
    options = publish_options(request, caller, DEFAULT_POLICY, query)
    begun = await service.uploads.begin(head, caller.name, options)
    return answer(request, {"id": begun.id}, 201)


@router.put(
    "/{id}",
    summary="Bring tensors of it",
    openapi_extra={
        "requestBody": _file(OCTETS),
        "parameters": documents.query(PartQuery),
    },
)
async def bring(request: Request, id: str, caller: Writer) -> Response:
    """The body is the file's bytes from ``start`` on: whole tensors. Some may be sent again."""
    query, found = read_query(request, PartQuery), _found(request, id, caller)
    nbytes = whole_number("content-length", request.headers.get("content-length"))
    if nbytes is None:
        problem = Problem("content-length", "nothing", "the size of these tensors")
        raise InvalidRequest("a part's size must be known when it begins", problems=[problem])
    missing = await found.take(query.start, nbytes, upload(request))
    return answer(request, {"missing": missing})


@router.post("/{id}", summary="Publish it", openapi_extra=documents.body(PartsEnd))
async def end(request: Request, id: str, caller: Writer) -> Response:
    """Now that all tensors are there; answers as ``POST /reload`` does."""
    asked = await read_model(request, PartsEnd, _MAX_BODY_BYTES)
    return answer(request, asdict(await _found(request, id, caller).finish(asked.digest)))


@router.delete("/{id}", summary="Give it up")
async def give_up(request: Request, id: str, caller: Writer) -> Response:
    """Nothing has changed."""
    _found(request, id, caller).give_up(MalformedBody("its sender has given the upload up"))
    return answer(request, {"ended": id})


def _found(request: Request, id: str, caller: Caller) -> PartedUpload:
    return startup_of(request).service.uploads.find(id, caller.name)


def _require(request: Request, media: str) -> None:
    sent = media_type(request.headers.get("content-type", ""))
    if sent != media:
        raise UnsupportedMediaType(f"Content-Type {sent!r} is not understood; allowed: {media}")

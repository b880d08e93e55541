"""Bodies and answers: limits, media types, and errors that name the field and what is allowed."""

from __future__ import annotations

import asyncio
import re
import reprlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError

from rollout_server.bodies import EXTENSION, LargeBody, paced
from rollout_server.sinks import Pour, fill
from shared.codec import decode, encode, media_type
from shared.errors import (
    BodyTooLarge,
    InvalidRequest,
    Problem,
    TitoError,
    Unauthorized,
    UnsupportedMediaType,
)
from shared.protocol import JSON, MSGPACK, NDJSON

_SMALL_BODY_BYTES = 4096
_PROBLEMS_SHOWN = 20
_SHOWN_CHARS = 80

# Input may be huge, or nested deeper than repr() can go.
_SHOW = reprlib.Repr()
_SHOW.maxstring = _SHOW.maxother = _SHOWN_CHARS

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class ClientGone(Exception):
    """The caller closed the connection; there is nobody to answer."""


async def read_model(request: Request, model: type[M], max_bytes: int) -> M:
    """Read, decode and validate a msgpack or JSON body, off the event loop.

    Raises:
        BodyTooLarge, MalformedBody, UnsupportedMediaType, InvalidRequest: see each.
    """
    document = await read_document(request, max_bytes)
    return await asyncio.to_thread(validated, document, model)


async def read_document(request: Request, max_bytes: int) -> Any:
    """Read and decode a msgpack or JSON body, off the event loop unless it is small.

    Raises:
        BodyTooLarge, MalformedBody, UnsupportedMediaType: see each.
    """
    content_type = media_type(request.headers.get("content-type", ""))
    body = await read_body(request, max_bytes)
    if len(body) <= _SMALL_BODY_BYTES:  # sooner read than given to a thread
        return decode(body, content_type)
    return await asyncio.to_thread(decode, body, content_type)


async def read_json(request: Request, model: type[M], max_bytes: int) -> M:
    """Read and validate JSON, whatever the media type says; no body is an empty document.

    Raises:
        BodyTooLarge, MalformedBody, InvalidRequest: see each.
    """
    body = await read_body(request, max_bytes)
    return await asyncio.to_thread(lambda: validated(decode(body or b"{}", JSON), model))


def read_query(request: Request, model: type[M]) -> M:
    """Validate the query string.

    Raises:
        InvalidRequest: a parameter is unknown or wrong.
    """
    return validated(dict(request.query_params), model)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: it exceeds ``max_bytes``.
        UnsupportedMediaType: it is compressed.
    """
    body = bytearray()
    async for chunk in body_stream(request):
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body exceeds {max_bytes} bytes; send fewer prompts at once")
    return bytes(body)


def body_stream(request: Request) -> AsyncGenerator[bytes, None]:
    """The body as it comes in.

    Raises:
        UnsupportedMediaType: it is compressed, so that its size says nothing about what it holds.
        MalformedBody, ClientDisconnect: while it is read: it came too slowly, or not to its end.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedMediaType(
            f"Content-Encoding {encoding[:_SHOWN_CHARS]!r} is not understood; send it as it is"
        )
    return paced(request.stream(), request.app.state.body_silence)


def upload(request: Request) -> Pour:
    """The body, to be brought into a sink, past the HTTP parser if it is large.

    Raises:
        UnsupportedMediaType, MalformedBody, ClientDisconnect: see :func:`body_stream`.
    """
    chunks = body_stream(request)
    large: LargeBody | None = request.scope.get("extensions", {}).get(EXTENSION)
    if large is None:
        return partial(fill, chunks)
    return partial(large.pour, silence=request.app.state.body_silence)


def validated(document: Any, model: type[M]) -> M:
    """The document as a model.

    Raises:
        InvalidRequest: it is not one.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [_problem(item, model) for item in found[:_PROBLEMS_SHOWN]]
        raise InvalidRequest(
            f"{len(found)} problem{'s' * (len(found) > 1)} with the request", problems=problems
        ) from None


def _problem(error: Any, model: type[BaseModel]) -> Problem:
    parts = (f"[{p}]" if isinstance(p, int) else f".{p:.{_SHOWN_CHARS}}" for p in error["loc"])
    where = "".join(parts).lstrip(".")
    match error["type"]:
        case "extra_forbidden":
            known = _model_at(error["loc"][:-1], model).model_fields
            return Problem(where, "an unknown field", ", ".join(known))
        case "missing":
            return Problem(where, "nothing", "a value; the field is required")
    return Problem(
        where or "body", _SHOW.repr(error["input"]), error["msg"].removeprefix("Input should be ")
    )


def _model_at(loc: Sequence[int | str], model: type[BaseModel]) -> type[BaseModel]:
    """The model that a part of a document has to be."""
    for part in loc:
        field = model.model_fields.get(str(part))
        nested = [] if field is None else _models_in(field.annotation)
        model = next(iter(nested), model)
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def whole_number(where: str, text: str | None) -> int | None:
    """A number that came as a header or in the query, or None if it did not come.

    Raises:
        InvalidRequest: it is not a whole number.
    """
    if text is not None and not re.fullmatch(r"[0-9]{1,18}", text):
        problem = Problem(where, repr(text[:_SHOWN_CHARS]), "a whole number")
        raise InvalidRequest(f"{where} cannot be read", problems=[problem])
    return None if text is None else int(text)


def answer_type(request: Request, default: str = JSON) -> str:
    """Media type of the answer: what Accept names, msgpack before JSON, or else the default."""
    accepted = [media_type(part) for part in request.headers.get("accept", "").split(",")]
    return next((known for known in (MSGPACK, JSON) if known in accepted), default)


def answer(request: Request, document: Any, status: int = 200) -> Response:
    """Encode a document as the caller asked; JSON if nothing was asked, for people with curl."""
    content_type = answer_type(request)
    return Response(encode(document, content_type), status, media_type=content_type)


def refuse_packed_json(packed: bool, content_type: str) -> None:
    """Raise InvalidRequest if packed arrays are asked for in an answer that cannot carry them."""
    if packed and content_type in (JSON, NDJSON):
        problem = Problem("packed", "true", f"false, or Accept: {MSGPACK}")
        raise InvalidRequest("JSON cannot carry packed arrays", problems=[problem])


def error_answer(request: Request, error: TitoError) -> Response:
    """The answer that an exception of ours becomes."""
    response = answer(request, error.to_wire(), error.status)
    if error.status == Unauthorized.status:
        response.headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, round(error.retry_after)))
    return response


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, but cancel it as soon as the caller hangs up.

    Raises:
        ClientGone: the caller hung up first.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

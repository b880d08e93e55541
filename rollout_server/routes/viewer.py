"""``GET /`` and ``/viewer``: the page where people look at samples; ``/rewards``: what they got.

The page itself is the same for everybody and tells nothing, so it asks for no token. What it shows
takes a token with the scope ``rollout`` or ``admin``.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Request, Response

from rollout_server.auth import ADMIN, ROLLOUT, Caller, caller_with
from rollout_server.http import answer, read_model, read_query, whole_number
from rollout_server.recent import RecentGroup, RecentGroups
from rollout_server.routes import documents
from rollout_server.routes.policies import described
from rollout_server.routes.state import leases_of, startup_of
from rollout_server.viewer.documents import Reader, publishes
from rollout_server.viewer.facts import FactBook, GroupsQuery
from rollout_server.viewer.lights import lights
from shared.errors import EngineUnavailable, NotFound
from shared.feedback import RewardReport

router = APIRouter()

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PAGE = {
    item.name: item.read_bytes()
    for item in (files("rollout_server") / "viewer" / "page").iterdir()
    if item.name.rpartition(".")[2] in _TYPES
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_MAX_REPORT_BYTES = 16 << 20
_PUBLISHES_SHOWN = 12


async def _looker(caller: Annotated[Caller, Depends(caller_with())]) -> Caller:
    if not caller.allows(ADMIN):
        caller.require(ROLLOUT)
    return caller


_LOOKER = [Depends(_looker)]


@router.get("/", summary="The page where people look at samples")
async def page() -> Response:
    """For browsers."""
    return _part("index.html")


@router.get("/viewer/page/{name}", summary="A part of the page", include_in_schema=False)
async def part(name: str) -> Response:
    """Its style, scripts and icon."""
    return _part(name)


@router.get("/viewer/state", summary="Engine, checks, running rollouts, policies, for the page")
async def state(request: Request, _: Annotated[Caller, Depends(_looker)]) -> Response:
    """Answers also while the engine does not."""
    document = _outline(request)
    if not startup_of(request).is_up:
        return answer(request, document)
    return answer(request, document | await _whole_state(request))


@router.get("/viewer/history", summary="Figures over time, for the page", dependencies=_LOOKER)
async def history(request: Request) -> Response:
    """Of all groups since the server began, and of the publishes that policies remember."""
    recent = recent_of(request)
    published = publishes(startup_of(request).service.policies)
    return answer(request, {**recent.history.document(), "publishes": published})


@router.get("/viewer/groups", summary="Recent groups, newest first", dependencies=_LOOKER)
async def groups(request: Request) -> Response:
    """Those that match the query, a page at a time."""
    query = read_query(request, GroupsQuery)
    reader, newest_first = _reader(request), recent_of(request).newest_first()
    return answer(request, await asyncio.to_thread(reader.groups, newest_first, query))


@router.get("/viewer/groups/{name}", summary="A recent group", dependencies=_LOOKER)
async def group(request: Request, name: str) -> Response:
    """Its prompt and all its samples."""
    found, reader = _group(request, name), _reader(request)
    return answer(request, await asyncio.to_thread(reader.whole, found))


@router.get(
    "/viewer/groups/{name}/samples/{index}/tokens",
    summary="Texts and logprobs of a sample's tokens",
    dependencies=_LOOKER,
)
async def tokens(request: Request, name: str, index: str) -> Response:
    """From ``start`` on, so many at a time; ``next`` says where to go on."""
    samples = _group(request, name).group.samples
    number = whole_number("index", index) or 0
    if number >= len(samples):
        raise NotFound(f"the group has samples 0 to {len(samples) - 1}, and no {number}")
    start = whole_number("start", request.query_params.get("start")) or 0
    reader = _reader(request)
    return answer(request, await asyncio.to_thread(reader.tokens, samples[number], start))


@router.post(
    "/rewards",
    summary="Tell what samples were worth, to look at",
    openapi_extra=documents.body(
        RewardReport, {"groups": [{"id": "9f86d081884c7d65", "rewards": [1.0, None]}]}
    ),
)
async def rewards(
    request: Request, caller: Annotated[Caller, Depends(caller_with(ROLLOUT))]
) -> Response:
    """Kept beside the samples for as long as these are; nothing is done with it but show it."""
    report = await read_model(request, RewardReport, _MAX_REPORT_BYTES)
    whose = None if caller.allows(ADMIN) else caller.name
    noted = recent_of(request).note_rewards(report, whose)
    return answer(request, {"noted": noted, "forgotten": len(report.groups) - noted})


def _outline(request: Request) -> dict[str, Any]:
    """What there is to say before there is a service."""
    recent, now = recent_of(request), time.time()
    queued = recent.queued()
    if queued:  # while nothing happens, time passes without a point
        recent.history.add_queue(now, queued)
    return {
        "now": now,
        "revision": recent.revision,
        "seq": recent.seq,
        "engine": _engine(request),
        "queued": queued,
        "kept": {
            "groups": len(recent),
            "bytes": recent.size,
            "max_groups": recent.max_groups,
            "max_bytes": recent.max_bytes,
        },
    }


async def _whole_state(request: Request) -> dict[str, Any]:
    """The rest."""
    service, recent, leases = startup_of(request).service, recent_of(request), leases_of(request)
    rollouts, groups, reader = list(recent.running), recent.newest_first(), _reader(request)

    def read() -> dict[str, Any]:
        return {
            "lights": [asdict(light) for light in lights(groups, reader.book)],
            "running": reader.running(rollouts),
        }

    return {
        "server": {
            "model": service.settings.model,
            "dtype": service.settings.dtype,
            "max_model_len": service.settings.max_model_len,
        },
        "policies": [_brief(described(policy, leases)) for policy in service.policies],
        "running_rollouts": len(rollouts),
        **await asyncio.to_thread(read),
    }


def recent_of(request: Request) -> RecentGroups:
    """The groups that are kept to be looked at."""
    return cast(RecentGroups, request.app.state.recent)


def _reader(request: Request) -> Reader:
    app_state = request.app.state
    if not hasattr(app_state, "reader"):
        service = startup_of(request).service
        app_state.reader = Reader(service.encoder, FactBook(service.supervisor.vocab_size))
    return cast(Reader, app_state.reader)


def _group(request: Request, name: str) -> RecentGroup:
    if (found := recent_of(request).get(name)) is None:
        raise NotFound("that group was never here, or has been let go of")
    return found


def _engine(request: Request) -> dict[str, str]:
    startup = startup_of(request)
    if not startup.is_up:
        return {"state": "starting", "reason": "the engine is starting"}
    try:
        startup.service.check_ready()
    except EngineUnavailable as error:
        state = "closed" if error.retry_after is None else "restarting"
        return {"state": state, "reason": error.message}
    return {"state": "ready", "reason": ""}


def _brief(policy: dict[str, Any]) -> dict[str, Any]:
    return {**policy, "history": policy["history"][:_PUBLISHES_SHOWN]}


def _part(name: str) -> Response:
    if name not in _PAGE:
        raise NotFound("the page has no such part")
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(_PAGE[name], media_type=kind, headers=_HEADERS)

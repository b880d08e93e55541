"""vLLM's own routes for trainers, with versions, one writer at a time and cache resets.

Paths, parameters and answers are those of vLLM 0.32. What they do goes through ``pauses.py`` and
``foreign_updates.py``; vLLM's handlers, which let anybody do anything at any time, are not used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from rollout_server.auth import ADMIN, Caller, caller_with, publish_scope
from rollout_server.http import read_json, read_query, whole_number
from rollout_server.pauses import alive
from rollout_server.routes.openai import VERSION_HEADER
from rollout_server.routes.state import pauses_of, startup_of, updates_of
from rollout_server.vllm_control import UpdateInfo, control_of
from shared.protocol import DEFAULT_POLICY, DIGEST_HEADER, FENCE_HEADER, PauseMode

Mode = Literal["abort", "wait", "keep"]

_MODES = {"abort": PauseMode.ABORT, "wait": PauseMode.DRAIN, "keep": PauseMode.KEEP}

AnyCaller = Annotated[Caller, Depends(caller_with())]
Writer = Annotated[Caller, Depends(caller_with(publish_scope(DEFAULT_POLICY)))]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PauseQuery(_Document):
    """Query of ``POST /pause``."""

    mode: Mode = Field("abort", description="What becomes of samples in flight.")
    clear_cache: bool = Field(True, description="Taken and ignored: caches are always cleared.")


class SleepQuery(_Document):
    """Query of ``POST /sleep``."""

    level: Literal["0", "1", "2"] = Field("1", description="0 pause, 1 weights to host, 2 drop.")
    mode: Mode = Field("abort", description="What becomes of samples in flight.")


class ResetCacheQuery(_Document):
    """Query of ``POST /reset_prefix_cache``."""

    reset_running_requests: bool = Field(False, description="Those in flight compute anew.")
    reset_external: bool = Field(False, description="Connected caches too.")


class WorldSizeQuery(_Document):
    """Query of ``GET /get_world_size``."""

    include_dp: bool = Field(True, description="Count data-parallel replicas.")


class ServerInfoQuery(_Document):
    """Query of ``GET /server_info``."""

    config_format: Literal["text", "json"] = Field("text", description="Of vllm_config.")


class Connection(_Document):
    """Body of ``POST /init_weight_transfer_engine``."""

    init_info: dict[str, Any] = Field(description="What vLLM's backend needs, e.g. an address.")


class Update(_Document):
    """Body of ``POST /update_weights``."""

    update_info: UpdateInfo = Field(description="What comes, for vLLM's backend.")


class Finish(_Document):
    """Body of ``POST /finish_weight_update``."""

    weight_version: str | None = Field(
        None, description="Taken and ignored: versions are given by the server."
    )


async def _sign_of_life(
    request: Request, caller: Annotated[Caller, Depends(caller_with())]
) -> None:
    """Whoever calls is still there."""
    pauses_of(request).heard_of(caller)
    updates_of(request).heard_of(caller)


router = APIRouter(dependencies=[Depends(_sign_of_life)])


@router.post("/pause", summary="vLLM: stop generating")
async def pause(request: Request, caller: Writer) -> Response:
    """Until the same caller resumes, or has been silent for ``--rl-silence`` seconds."""
    query = read_query(request, PauseQuery)
    await pauses_of(request).pause(caller, _MODES[query.mode])
    return JSONResponse({"status": "paused"})


@router.post("/resume", summary="vLLM: go on generating")
async def resume(request: Request, caller: AnyCaller) -> Response:
    """409 if somebody else has paused; an ``admin`` may end that too."""
    if not caller.allows(ADMIN):
        caller.require(publish_scope(DEFAULT_POLICY))
    await pauses_of(request).resume(caller)
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused", summary="vLLM: whether somebody has paused")
async def is_paused(request: Request, _: AnyCaller) -> Response:
    """The moment's pause of a publish does not count."""
    return JSONResponse({"is_paused": pauses_of(request).is_paused})


@router.post("/sleep", summary="vLLM: pause, and hand memory back")
async def sleep(request: Request, caller: Writer) -> Response:
    """Until the same caller wakes it, or its lease ends; else nothing is served meanwhile."""
    query = read_query(request, SleepQuery)
    level, fence = int(query.level), whole_number(FENCE_HEADER, request.headers.get(FENCE_HEADER))
    await pauses_of(request).sleep(caller, level, _MODES[query.mode], fence)
    return JSONResponse({"status": "sleeping", "level": level})


@router.post("/wake_up", summary="vLLM: take memory again")
async def wake_up(request: Request, caller: Writer) -> Response:
    """All of it, or what ``tags`` name; weights that were dropped are restored first."""
    tags = request.query_params.getlist("tags")
    awake = await pauses_of(request).wake_up(caller, tags)
    return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags or None})


@router.get("/is_sleeping", summary="vLLM: whether the engine sleeps or is paused")
async def is_sleeping(request: Request, _: AnyCaller) -> Response:
    """vLLM counts a pause as sleep, so it does here."""
    return JSONResponse({"is_sleeping": pauses_of(request).is_paused})


@router.post("/reset_prefix_cache", summary="vLLM: forget cached keys and values")
async def reset_prefix_cache(request: Request, _: Writer) -> Response:
    """Publishes do so by themselves."""
    query = read_query(request, ResetCacheQuery)
    engine = startup_of(request).service.supervisor.current()
    with alive():
        done = await control_of(engine).reset_prefix_cache(
            running=query.reset_running_requests, external=query.reset_external
        )
    return JSONResponse({"success": done})


@router.get("/get_world_size", summary="vLLM: how many workers there are")
async def get_world_size(request: Request, _: AnyCaller) -> Response:
    """For the trainer's side of a weight transfer."""
    query = read_query(request, WorldSizeQuery)
    engine = startup_of(request).service.supervisor.current()
    return JSONResponse({"world_size": control_of(engine).world_size(include_dp=query.include_dp)})


@router.get("/server_info", summary="vLLM: its resolved configuration")
async def server_info(request: Request, _: Writer) -> Response:
    """Of the machine and its environment, nothing is told."""
    query = read_query(request, ServerInfoQuery)
    engine = startup_of(request).service.supervisor.current()
    config = await control_of(engine).describe(as_json=query.config_format == "json")
    return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})


@router.post("/init_weight_transfer_engine", summary="vLLM: connect the workers with a trainer")
async def init_weight_transfer_engine(request: Request, caller: Writer) -> Response:
    """The trainer connects at the same time."""
    asked = await read_json(request, Connection, _most(request))
    await updates_of(request).connect(caller, asked.init_info)
    return JSONResponse({"message": "Weight transfer initialized"})


@router.post("/start_weight_update", summary="vLLM: begin to send weights")
async def start_weight_update(request: Request, caller: Writer) -> Response:
    """The caller holds the lease of the policy from here on."""
    fence = whole_number(FENCE_HEADER, request.headers.get(FENCE_HEADER))
    await updates_of(request).start(caller, fence)
    return JSONResponse({"message": "Weight update started"})


@router.post("/update_weights", summary="vLLM: send some tensors")
async def update_weights(request: Request, caller: Writer) -> Response:
    """They are staged; generation goes on with what is live."""
    asked = await read_json(request, Update, _most(request))
    await updates_of(request).receive(caller, asked.update_info)
    return JSONResponse({"message": "Weights updated"})


@router.post("/finish_weight_update", summary="vLLM: publish what was sent")
async def finish_weight_update(request: Request, caller: Writer) -> Response:
    """Verified, loaded and checked; the answer has the version and digest that are live now."""
    await read_json(request, Finish, _most(request))
    result = await updates_of(request).finish(caller)
    document = {
        "message": "Weight update finished",
        "version": result.version,
        "digest": result.digest,
    }
    headers = {VERSION_HEADER: str(result.version), DIGEST_HEADER: result.digest}
    return JSONResponse(document, headers=headers)


def _most(request: Request) -> int:
    return startup_of(request).service.settings.max_body_bytes

"""``/policies``: what is live, what was published by whom, and who may publish next."""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from rollout_server.auth import ADMIN, PUBLISH_POLICY_OF_PATH, Caller, caller_with, publish_scope
from rollout_server.http import answer, read_model, read_query, whole_number
from rollout_server.lease_file import Lease
from rollout_server.leases import Leases
from rollout_server.policies import Policy
from rollout_server.routes import documents
from rollout_server.routes.options import publish_options
from rollout_server.routes.state import leases_of, startup_of
from shared.errors import Conflict, InvalidRequest, Problem
from shared.protocol import POLICY_NAME
from shared.requests import LeaseRenewal, LeaseRequest, ResetQuery

router = APIRouter(prefix="/policies")

_MAX_BODY_BYTES = 64 << 10

AnyCaller = Annotated[Caller, Depends(caller_with())]
PolicyWriter = Annotated[Caller, Depends(caller_with(PUBLISH_POLICY_OF_PATH))]


@router.get("", summary="Every policy: live version, digest, lease")
async def policies(request: Request, _: AnyCaller) -> Response:
    """Without their histories."""
    service, leases = startup_of(request).service, leases_of(request)
    found = [described(policy, leases) for policy in service.policies]
    brief = [{k: v for k, v in policy.items() if k != "history"} for policy in found]
    return answer(request, {"policies": brief})


@router.get("/{name}", summary="One policy, with its recent publishes")
async def policy(request: Request, name: str, _: AnyCaller) -> Response:
    """The newest publish first: its state, version, digest, time, publisher, and why it failed."""
    found = startup_of(request).service.policies[name]
    return answer(request, described(found, leases_of(request)))


@router.post(
    "/{name}/lease",
    summary="Become the one writer of a policy",
    openapi_extra=documents.body(LeaseRequest, {"holder": "me", "ttl_seconds": 30}),
)
async def acquire(request: Request, name: str, caller: PolicyWriter) -> Response:
    """The policy need not exist yet. Answers with the fencing number that publishes must carry."""
    _check_name(name)
    asked = await read_model(request, LeaseRequest, _MAX_BODY_BYTES)
    holder = asked.holder or f"{caller.name}-{secrets.token_hex(4)}"
    leases = leases_of(request)
    lease = await asyncio.to_thread(
        leases.acquire, name, holder, asked.ttl_seconds, owner=caller.name
    )
    return answer(request, _granted(lease, leases))


@router.post(
    "/{name}/lease/renew",
    summary="Heartbeat: keep a lease alive",
    openapi_extra=documents.body(LeaseRenewal, {"fence": 1}),
)
async def renew(request: Request, name: str, caller: PolicyWriter) -> Response:
    """409 once the lease has run out or was taken over."""
    asked = await read_model(request, LeaseRenewal, _MAX_BODY_BYTES)
    leases = leases_of(request)
    lease = await asyncio.to_thread(leases.renew, name, asked.fence, owner=caller.name)
    return answer(request, _granted(lease, leases))


@router.delete("/{name}/lease", summary="Give a lease up, or take it away")
async def release(request: Request, name: str, caller: AnyCaller) -> Response:
    """With ``?fence=N``, give up one's own lease. Without, an ``admin`` ends whatever there is."""
    fence = whole_number("fence", request.query_params.get("fence"))
    caller.require(ADMIN if fence is None else publish_scope(name))
    leases = leases_of(request)
    if fence is None:
        await asyncio.to_thread(leases.revoke, name)
    else:
        await asyncio.to_thread(leases.release, name, fence, owner=caller.name)
    return answer(request, {"lease": None})


@router.post(
    "/{name}/reset",
    summary="Go back to the model that the server was started with",
    openapi_extra={"parameters": [*documents.query(ResetQuery), documents.FENCE]},
)
async def reset(request: Request, name: str, caller: PolicyWriter) -> Response:
    """Published as a new version, through the same transaction as any other."""
    service = startup_of(request).service
    service.check_ready()
    if service.policies[name] is not service.policies.default:
        raise Conflict(f"{name} is a LoRA policy; delete it to go back to the model itself")
    query = read_query(request, ResetQuery)
    result = await service.publisher.reset(publish_options(request, caller, name, query))
    return answer(request, asdict(result))


@router.delete(
    "/{name}", summary="Forget a LoRA policy", openapi_extra={"parameters": [documents.FENCE]}
)
async def delete(request: Request, name: str, caller: PolicyWriter) -> Response:
    """409 while groups are sampled from it, or somebody else holds its lease."""
    service = startup_of(request).service
    options = publish_options(request, caller, name, ResetQuery())
    async with options.committing():
        await service.adapters.delete(name)
    return answer(request, {"deleted": name})


def _check_name(name: str) -> None:
    if not re.fullmatch(POLICY_NAME, name):
        problem = Problem("name", name, POLICY_NAME)
        raise InvalidRequest("not a valid policy name", problems=[problem])


def described(policy: Policy, leases: Leases) -> dict[str, Any]:
    """A policy with its history and its lease, as plain data."""
    lease = leases.current(policy.name)
    held = None if lease is None else _shown(lease, leases)
    return {**policy.describe(), "lease": held}


def _shown(lease: Lease, leases: Leases) -> dict[str, Any]:
    left = leases.seconds_left(lease)
    return {
        "holder": lease.holder,
        "owner": lease.owner,
        "fence": lease.fence,
        "seconds_left": left,
    }


def _granted(lease: Lease, leases: Leases) -> dict[str, Any]:
    left = leases.seconds_left(lease)
    return {
        "fence": lease.fence,
        "holder": lease.holder,
        "ttl_seconds": lease.ttl_s,
        "expires_in": left,
    }

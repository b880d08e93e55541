"""``/healthz``, ``/readyz``, ``/info`` and ``/metrics``: what operators and clients look at.

The first two ask for no token, since probes have none; they tell nothing but whether it works.
"""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from rollout_server.auth import caller_with
from rollout_server.http import answer
from rollout_server.routes.state import metrics_of, startup_of
from shared.errors import EngineUnavailable

router = APIRouter()

_ANY_CALLER = [Depends(caller_with())]


@router.get("/healthz", summary="The process is alive")
async def healthz(request: Request) -> Response:
    """Answers as long as the event loop turns, whatever the engine does."""
    return answer(request, {"status": "alive"})


@router.get("/readyz", summary="The engine can generate")
async def readyz(request: Request) -> Response:
    """503 with the reason until it can."""
    startup_of(request).service.check_ready()
    return answer(request, {"status": "ready"})


@router.get("/info", summary="Model, tokenizer, live version and limits", dependencies=_ANY_CALLER)
async def info(request: Request) -> Response:
    """What a client needs to know before it sends work."""
    return answer(request, asdict(startup_of(request).service.info()))


@router.get("/metrics", summary="Prometheus metrics", dependencies=_ANY_CALLER)
async def metrics(request: Request) -> Response:
    """In Prometheus' text form."""
    registry = metrics_of(request)
    try:
        service = startup_of(request).service
        registry.observe_queue(service.admission.queued, service.admission.running_samples)
        service.check_ready()
        registry.ready.set(1)
    except EngineUnavailable:
        registry.ready.set(0)
    return Response(registry.render(), media_type=CONTENT_TYPE_LATEST)

"""The FastAPI application: wiring only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.auth import Authenticator
from rollout_server.channels import Channels
from rollout_server.engine import Engine
from rollout_server.foreign_updates import ForeignUpdates
from rollout_server.http import ClientGone, error_answer
from rollout_server.leases import Leases
from rollout_server.logs import NamedRequests
from rollout_server.metrics import Metrics
from rollout_server.origins import Origins
from rollout_server.pauses import Pauses
from rollout_server.recent import RecentGroups
from rollout_server.routes import channels as channel_routes
from rollout_server.routes import (
    openai,
    policies,
    reload,
    reload_parts,
    rollout,
    score,
    status,
    viewer,
    vllm_rl,
)
from rollout_server.service import Startup
from rollout_server.settings import ServerSettings
from rollout_server.traced import TracedRequests
from rollout_server.vllm_engine import VLLMEngine
from rollout_server.vllm_serving import OpenAIServing
from shared.errors import EngineFailure, InvalidRequest, NotFound, TitoError

log = logging.getLogger("tito.server")

_CLIENT_CLOSED_REQUEST = 499


def create_app(
    settings: ServerSettings,
    *,
    build_engine: Callable[[ServerSettings], Engine] = VLLMEngine,
    on_startup_failure: Callable[[Exception], None] | None = None,
) -> FastAPI:
    """The application; it answers at once and becomes ready when the engine is.

    Args:
        settings: of the server.
        build_engine: makes the engine, in a thread.
        on_startup_failure: told why the engine did not come up.

    Raises:
        TokensFileError, LeaseFileError: a file that the settings name cannot be used.
    """
    tokens = settings.tokens_file
    authenticator = Authenticator.from_file(tokens) if tokens else Authenticator.open()
    leases = Leases(
        settings.spool_dir, require=settings.require_lease, max_ttl_s=settings.lease_max_ttl
    )
    metrics = Metrics()
    recent = (
        RecentGroups(settings.viewer_groups, settings.viewer_mib << 20) if settings.viewer else None
    )
    startup = Startup(settings, build_engine, metrics, recent)
    channels = Channels(startup, leases, settings.channel_seconds)
    app = FastAPI(
        title="Tito rollout server",
        version="1",
        lifespan=_lifespan(startup, channels, on_startup_failure),
        # FastAPI's pages about the API would run scripts from elsewhere beside the viewer's token.
        docs_url=None,
        redoc_url=None,
    )
    app.state.startup = startup
    app.state.metrics = metrics
    app.state.authenticator = authenticator
    app.state.origins = Origins(settings.host, settings.allowed_hosts)
    app.state.leases = leases
    app.state.channels = channels
    app.state.body_silence = settings.body_silence
    app.add_middleware(TracedRequests)
    app.add_middleware(_RequestMetrics, metrics=metrics)
    app.add_middleware(NamedRequests)
    _add_routes(app, settings, startup, leases, recent)
    _add_error_handlers(app)
    return app


def _lifespan(
    startup: Startup, channels: Channels, on_failure: Callable[[Exception], None] | None
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(_start(startup, on_failure))
        yield
        starting.cancel()  # nobody waits for an engine that is still loading
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        channels.close()
        await startup.close()

    return lifespan


def _add_routes(
    app: FastAPI,
    settings: ServerSettings,
    startup: Startup,
    leases: Leases,
    recent: RecentGroups | None,
) -> None:
    for module in (rollout, score, reload, reload_parts, policies, channel_routes, status):
        app.include_router(module.router)
    if settings.rl_routes:
        app.state.pauses = Pauses(startup, leases, settings.rl_silence)
        app.state.updates = ForeignUpdates(startup, leases, settings.rl_silence)
        app.include_router(vllm_rl.router)
    if settings.openai_routes:
        app.state.openai = OpenAIServing(settings.model)
        app.include_router(openai.router)
    if recent is not None:
        app.state.recent = recent
        app.include_router(viewer.router)


async def _start(startup: Startup, on_failure: Callable[[Exception], None] | None) -> None:
    try:
        await startup.run()
    except Exception as error:
        if on_failure is None:
            raise
        on_failure(error)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(TitoError)
    async def ours(request: Request, error: TitoError) -> Response:
        return error_answer(request, error)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        kind = NotFound if error.status_code == NotFound.status else InvalidRequest
        answer = error_answer(request, kind(f"{request.method} {request.url.path}: {error.detail}"))
        answer.status_code = error.status_code
        return answer

    @app.exception_handler(ClientDisconnect)
    async def hung_up(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _bug(request: Request, error: Exception) -> Response:
    log.error("unexpected error in %s", request.url.path, exc_info=error)
    return error_answer(request, EngineFailure(f"unexpected {type(error).__name__}: {error}"))


class _RequestMetrics:
    """ASGI middleware that counts and times requests by route, and answers for bugs."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        with self._metrics.in_flight.track_inprogress():
            try:
                await self._app(scope, receive, watch)
            except Exception as error:
                if status:
                    raise
                # Here, since Starlette's own handler of last resort also breaks the connection.
                await _bug(Request(scope), error)(scope, receive, watch)
            finally:
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.requests.labels(route, status).inc()
                self._metrics.request_seconds.labels(route).observe(time.perf_counter() - start)

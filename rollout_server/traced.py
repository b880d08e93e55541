"""A span for every request that does something, under the caller's, when traces are exported."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared import tracing


class TracedRequests:
    """ASGI middleware. The route's name is known when the request has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        if headers is None or tracing.endpoint() is None or _is_a_look(scope, headers):
            await self._app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        with tracing.span(scope["method"], headers) as span:
            try:
                await self._app(scope, receive, watch)
            finally:
                if span is not None:
                    route = getattr(scope.get("route"), "path", "unknown")
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.route", route)
                    span.set_attribute("http.response.status_code", status)


def _is_a_look(scope: Scope, headers: Headers) -> bool:
    """Health checks, scrapes and the page ask every few seconds, and nobody traces them."""
    return scope["method"] == "GET" and "traceparent" not in headers

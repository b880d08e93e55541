"""Log lines: text for people, or a JSON object on each line for machines.

A line written while a request is worked on names it, by the caller's ``x-request-id`` or a name of
the server's, which the answer carries too. Lines about rollouts, groups and publishes have fields:
policy, version and what was done. vLLM's own lines stay as vLLM writes them.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_HEADER = "x-request-id"
Value = str | int | float | None

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_request: ContextVar[str] = ContextVar("request", default="")


def event(log: logging.Logger, level: int, what: str, **fields: Value) -> None:
    """Say what happened, with the figures apart from the words."""
    log.log(level, what, extra={"fields": fields})


def configure(level: str, form: Literal["text", "json"]) -> None:
    """Send every message of this process to stderr in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextLines(logging.Formatter):
    """``time level logger: what happened  field=value ...``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        fields = _fields(record)
        told = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        return super().formatMessage(record) + (f" {told}" if told else "")


class JsonLines(logging.Formatter):
    """One object a line: ``time``, ``level``, ``logger``, ``message`` and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with a traceback in ``error``."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Value]:
    request = _request.get()
    return ({"request": request} if request else {}) | getattr(record, "fields", {})


class NamedRequests:
    """ASGI middleware that gives every request its name, and tells the caller."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_HEADER, "")
        name = given if _ID.fullmatch(given) else secrets.token_hex(8)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_HEADER] = name
            await send(message)

        # Tasks that the request starts inherit it, also those that outlive it.
        token = _request.set(name)
        try:
            await self._app(scope, receive, named)
        finally:
            _request.reset(token)

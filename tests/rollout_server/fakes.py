"""What the tests of access and ownership share: a clock, requests without a socket, a service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI

from rollout_server.app import create_app
from rollout_server.leases import Leases
from rollout_server.policies import Policies, Policy
from rollout_server.settings import ServerSettings

DIGEST = "0123456789abcdef" * 2


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def tokens_file(folder: Path, *callers: tuple[str, str, list[str]], mode: int = 0o600) -> Path:
    """A tokens file of (name, token, scopes)."""
    path = folder / "tokens.toml"
    path.write_text(
        "\n".join(
            f'[[token]]\nname = "{name}"\ntoken = "{token}"\nscopes = {scopes}\n'
            for name, token, scopes in callers
        )
    )
    path.chmod(mode)
    return path


def idle_app(*policies: Policy, **settings: Any) -> FastAPI:
    """The application without an engine; with policies, if any are given, to look at."""
    app = create_app(ServerSettings(model="none", **settings))
    app.router.lifespan_context = _no_engine
    if policies:
        known = Policies(policies[0])
        for policy in policies[1:]:
            known.add(policy)
        app.state.startup = SimpleNamespace(service=SimpleNamespace(policies=known))
    return app


@contextlib.asynccontextmanager
async def _no_engine(_: object) -> AsyncIterator[None]:
    yield


def leases_on(app: FastAPI, clock: Clock, **options: Any) -> Leases:
    """Give the application leases on a clock of the test's."""
    leases = Leases(clock=clock, **options)
    app.state.leases = leases
    return leases


def ask(
    app: FastAPI, method: str, path: str, *, token: str | None = None, **request: Any
) -> httpx.Response:
    """One request, handed to the application without a socket."""
    headers = dict(request.pop("headers", {}))
    if token is not None:
        headers["authorization"] = f"Bearer {token}"

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers, **request)

    return asyncio.run(send())


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error document of an answer."""
    error: dict[str, Any] = response.json()["error"]
    return error

"""Tokens, scopes, and that no route is forgotten."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from rollout_server.auth import ANONYMOUS, Authenticator, Caller, Quota, TokensFileError
from shared.errors import Forbidden, Unauthorized
from tests.rollout_server.fakes import ask, error_of, idle_app, tokens_file

ALICE, BOB, OPS, GUEST = (f"{name}-token-0123456789" for name in ("alice", "bob", "ops", "guest"))
CALLERS = [
    ("alice", ALICE, ["rollout", "publish:alpha"]),
    ("bob", BOB, ["publish:*"]),
    ("ops", OPS, ["admin"]),
    ("guest", GUEST, []),
]

PROBES = {"/health", "/healthz", "/readyz"}
PAGE = {"/", "/viewer/page/{name}"}
OPEN = PROBES | PAGE | {"/openapi.json"}
"""Routes for probes, the page without what it shows, and the description of the API. Everything
else asks for a token."""


@pytest.fixture
def callers(tmp_path: Path) -> Path:
    return tokens_file(tmp_path, *CALLERS)


@pytest.fixture
def app(callers: Path) -> FastAPI:
    """An application whose engine never starts: what a token opens answers 503."""
    return idle_app(tokens_file=callers)


def test_a_token_leads_to_its_caller(callers: Path) -> None:
    caller = Authenticator.from_file(callers).authenticate(f"Bearer {ALICE}")
    assert caller == Caller("alice", frozenset({"rollout", "publish:alpha"}))


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer "])
def test_the_scheme_is_read_as_http_says(callers: Path, scheme: str) -> None:
    assert Authenticator.from_file(callers).authenticate(f"{scheme} {BOB}").name == "bob"


def test_a_token_may_be_a_password(callers: Path) -> None:
    basic = httpx.BasicAuth("anybody", BOB)._auth_header
    assert Authenticator.from_file(callers).authenticate(basic).name == "bob"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        httpx.BasicAuth(BOB, "x")._auth_header,
        "Basic",
        "Basic !",
        "Basic /w==",
        "Bearer",
        "Bearer ",
        ALICE,
        f"Basic {ALICE}",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        f"Bearer {ALICE} {BOB}",
        "Bearer ÿþ\udcff",
    ],
)
def test_anything_else_leads_to_nobody(callers: Path, header: str | None) -> None:
    with pytest.raises(Unauthorized) as failure:
        Authenticator.from_file(callers).authenticate(header)
    assert "token-0123" not in str(failure.value)


@pytest.mark.parametrize("header", [None, "Bearer whatever", "Basic x"])
def test_without_a_file_everybody_may_do_everything(header: str | None) -> None:
    caller = Authenticator.open().authenticate(header)
    assert caller is ANONYMOUS
    for scope in ("rollout", "publish:default", "publish:any", "admin"):
        caller.require(scope)


@pytest.mark.parametrize(
    ("scopes", "scope", "allowed"),
    [
        ({"rollout"}, "rollout", True),
        ({"rollout"}, "admin", False),
        ({"admin"}, "rollout", False),
        ({"admin"}, "publish:default", False),
        ({"publish:a"}, "publish:a", True),
        ({"publish:a"}, "publish:ab", False),
        ({"publish:a"}, "publish:*", False),
        ({"publish:*"}, "publish:ab", True),
        ({"publish:*"}, "admin", False),
        (set(), "rollout", False),
    ],
)
def test_scopes_do_not_include_one_another(scopes: set[str], scope: str, allowed: bool) -> None:
    caller = Caller("carol", frozenset(scopes))
    assert caller.allows(scope) is allowed
    if not allowed:
        with pytest.raises(Forbidden, match=f"'carol' lacks the scope '{scope}'".replace("*", ".")):
            caller.require(scope)


BAD_FILES = {
    "no such file": (None, "cannot be read"),
    "not TOML": ("[[token", "cannot be read"),
    "empty": ("", "token: Field required"),
    "no tokens": ("token = []", "token: List should have at least 1 item"),
    "short token": (
        '[[token]]\nname = "a"\ntoken = "secret-12345678"\nscopes = []',
        r"token\[0\].token: 16 or more",
    ),
    "token with spaces": (
        '[[token]]\nname = "a"\ntoken = "secret with spaces in it"\nscopes = []',
        r"token\[0\].token: 16 or more",
    ),
    "token of another type": (
        '[[token]]\nname = "a"\ntoken = 12345678901234567\nscopes = []',
        r"token\[0\].token: Input should be a valid string",
    ),
    "no name": (
        '[[token]]\ntoken = "secret-secret-secret"\nscopes = []',
        r"token\[0\].name: Field required",
    ),
    "unknown scope": (
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = ["rollout", "root"]',
        r"token\[0\].scopes\[1\]: rollout, admin, publish:NAME or publish:\*",
    ),
    "a scope for no policy": (
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = ["publish:a/b"]',
        r"token\[0\].scopes\[0\]",
    ),
    "token among the scopes": (
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = ["secret-secret-other"]',
        r"token\[0\].scopes\[0\]",
    ),
    "unknown key": (
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = []\nexpires = 3',
        r"token\[0\].expires: Extra inputs are not permitted",
    ),
    "a quota of nothing": (
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = []\n'
        "max_queued_samples = 0",
        r"token\[0\].max_queued_samples: Input should be greater than or equal to 1",
    ),
    "no weight": (
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = []\nweight = nan',
        r"token\[0\].weight: Input should be a finite number",
    ),
    "name twice": (
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = []\n'
        '[[token]]\nname = "a"\ntoken = "secret-secret-other"\nscopes = []',
        "has the name 'a' twice",
    ),
    "token twice": (
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = []\n'
        '[[token]]\nname = "b"\ntoken = "secret-secret-secret"\nscopes = []',
        "gives 'a' and 'b' the same token",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_without_showing_a_token(tmp_path: Path, case: str) -> None:
    text, message = BAD_FILES[case]
    path = tmp_path / "tokens.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TokensFileError, match=message) as failure:
        Authenticator.from_file(path)
    assert str(path) in str(failure.value)
    assert "secret" not in str(failure.value)


def test_quotas_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(
        '[[token]]\nname = "a"\ntoken = "secret-secret-secret"\nscopes = []\n'
        "max_queued_samples = 64\nmax_running_samples = 8\nweight = 2\n"
        '[[token]]\nname = "b"\ntoken = "secret-secret-other"\nscopes = []'
    )
    known = Authenticator.from_file(path)
    assert known.authenticate("Bearer secret-secret-secret").quota == Quota(64, 8, 2.0)
    assert known.authenticate("Bearer secret-secret-other").quota == Quota(None, None, 1.0)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_every_user_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    path = tokens_file(tmp_path, *CALLERS, mode=mode)
    with caplog.at_level(logging.WARNING):
        Authenticator.from_file(path)
    assert ("open to every user" in caplog.text) is warned


def test_tokens_show_in_no_repr_and_no_log(
    callers: Path, caplog: pytest.LogCaptureFixture, app: FastAPI
) -> None:
    with caplog.at_level(logging.DEBUG):
        authenticator = Authenticator.from_file(callers)
        answers = [ask(app, "GET", "/info", token=token) for token in (ALICE, f"{ALICE}x")]
    shown = [repr(authenticator), repr(vars(authenticator)), caplog.text]
    for text in [*shown, *(answer.text for answer in answers)]:
        assert "token-0123" not in text
        assert "sha256" not in text


def test_no_route_is_open_by_oversight(app: FastAPI) -> None:
    asked = 0
    assert {route.path for route in app.routes if isinstance(route, Route)} >= OPEN
    for route in app.routes:
        assert isinstance(route, Route), f"{route} is no plain route: is it guarded?"
        if route.path in OPEN:
            continue
        assert isinstance(route, APIRoute)
        path = route.path.format_map(dict.fromkeys(route.param_convertors, "x"))
        for method in route.methods:
            for token in (None, "x" * 40):
                response = ask(app, method, path, token=token)
                assert response.status_code == 401, f"{method} {path}"
                assert response.headers["www-authenticate"] == "Bearer"
                assert error_of(response)["code"] == "unauthorized"
            asked += 1
    assert asked >= 8


def test_probes_need_no_token(app: FastAPI) -> None:
    assert ask(app, "GET", "/healthz").status_code == 200
    assert ask(app, "GET", "/readyz").status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "may"),
    [
        ("GET", "/info", {ALICE, BOB, OPS, GUEST}),
        ("GET", "/metrics", {ALICE, BOB, OPS, GUEST}),
        ("GET", "/policies", {ALICE, BOB, OPS, GUEST}),
        ("GET", "/policies/alpha", {ALICE, BOB, OPS, GUEST}),
        ("POST", "/rollout", {ALICE}),
        ("POST", "/policies/alpha/lease", {ALICE, BOB}),
        ("POST", "/policies/beta/lease", {BOB}),
        ("POST", "/policies/*/lease", {BOB}),
        ("POST", "/policies/beta/lease/renew", {BOB}),
        ("DELETE", "/policies/alpha/lease?fence=1", {ALICE, BOB}),
        ("DELETE", "/policies/beta/lease?fence=1", {BOB}),
        ("DELETE", "/policies/beta/lease", {OPS}),
        ("POST", "/policies/alpha/reset", {ALICE, BOB}),
        ("DELETE", "/policies/beta", {BOB}),
    ],
)
def test_each_route_asks_for_its_scope(app: FastAPI, method: str, path: str, may: set[str]) -> None:
    for token in (ALICE, BOB, OPS, GUEST):
        response = ask(app, method, path, token=token)
        assert (response.status_code != 403) is (token in may), f"{token} {response.text}"
        if token not in may:
            assert "lacks the scope" in error_of(response)["message"]


def test_the_description_of_the_api_speaks_of_tokens(app: FastAPI) -> None:
    document = ask(app, "GET", "/openapi.json").json()
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert "security" in document["paths"]["/rollout"]["post"]
    assert "security" not in document["paths"]["/healthz"]["get"]

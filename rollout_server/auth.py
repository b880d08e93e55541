"""Who calls, and what they may do.

An operator's TOML file gives bearer tokens names and scopes:

    [[token]]
    name = "alice"
    token = "at least sixteen characters, best from `openssl rand -hex 32`"
    scopes = ["rollout", "publish:default"]

``rollout`` samples; ``publish:NAME`` writes the policy NAME and holds its lease; ``publish:*`` does
so for every policy; ``admin`` operates the server. None includes another. Any valid token may look
(info, metrics, policies). Without a file everybody is ``anonymous`` and may do everything.

Each token may also carry a quota: ``max_queued_samples``, ``max_running_samples``, and ``weight``,
its share of the engine when several callers want it.

A token may also come as the password of HTTP's basic scheme, under any user's name.

Tokens are hashed when they are read and compared in constant time. They are in no log, error or
repr; what can be told of a bad one is where it stands.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import stat
import tomllib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import PydanticCustomError

from rollout_server.origins import Origins
from shared.errors import Forbidden, Unauthorized
from shared.protocol import POLICY_NAME

log = logging.getLogger("tito.auth")

ROLLOUT = "rollout"
ADMIN = "admin"
PUBLISH_POLICY_OF_PATH = "publish:{name}"
"""For :func:`caller_with` on routes under ``/policies/{name}``."""

_PUBLISH = "publish:"
_EVERY_POLICY = "publish:*"
_MIN_TOKEN_CHARS = 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_OTHERS = stat.S_IROTH | stat.S_IWOTH
# Tells the API's description that tokens exist; what is presented is judged by the authenticator.
_BEARER = HTTPBearer(auto_error=False, description="A token of the server's tokens file.")


class TokensFileError(ValueError):
    """The tokens file cannot be used; the message says why, without any token in it."""


def publish_scope(policy: str) -> str:
    """What it takes to write a policy."""
    return _PUBLISH + policy


@dataclass(frozen=True, slots=True)
class Quota:
    """How much of the server one caller may take; see ``admission.py``.

    Attributes:
        max_queued_samples: that may wait for the engine; None leaves it to the server's bound.
        max_running_samples: that the engine may work on at once; None leaves it to the server's.
        weight: tokens that the caller gets for each token of a caller of weight 1, if both wait.
    """

    max_queued_samples: int | None = None
    max_running_samples: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody whose token is known.

    Attributes:
        name: from the tokens file; leases and the history of publishes are kept under it.
        scopes: see the module.
        quota: on samples that wait or run.
    """

    name: str
    scopes: frozenset[str]
    quota: Quota = Quota()

    def allows(self, scope: str) -> bool:
        """Whether the caller has a scope."""
        every = scope.startswith(_PUBLISH) and _EVERY_POLICY in self.scopes
        return every or scope in self.scopes

    def require(self, scope: str) -> None:
        """Go on only with a scope.

        Raises:
            Forbidden: the caller lacks it.
        """
        if not self.allows(scope):
            raise Forbidden(f"the token of {self.name!r} lacks the scope {scope!r}")


ANONYMOUS = Caller("anonymous", frozenset({ROLLOUT, _EVERY_POLICY, ADMIN}))


@dataclass(frozen=True, slots=True)
class _Entry:
    token_sha256: bytes = field(repr=False)
    caller: Caller


class Authenticator:
    """Knows callers by their tokens.

    Args:
        entries: hashes of tokens and whose they are; None lets everybody in as ``anonymous``.
    """

    def __init__(self, entries: Iterable[_Entry] | None) -> None:
        self._entries = None if entries is None else tuple(entries)

    @classmethod
    def open(cls) -> Authenticator:
        """Everybody may do everything."""
        return cls(None)

    @classmethod
    def from_file(cls, path: Path) -> Authenticator:
        """Callers of a tokens file; warns if other users of the machine can read or write it.

        Raises:
            TokensFileError: it cannot be read, or something in it is wrong.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise TokensFileError(f"the tokens file {path} cannot be read: {error}") from None
        if mode & _OTHERS:
            log.warning("the tokens file %s is open to every user: chmod o= %s", path, path)
        return cls(_entries(_parsed(document, path), path))

    def authenticate(self, authorization: str | None) -> Caller:
        """Who sent a request.

        Args:
            authorization: value of its Authorization header.

        Raises:
            Unauthorized: there is no bearer token, or nobody has this one.
        """
        if self._entries is None:
            return ANONYMOUS
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() == "basic":
            token = _password(token)
        elif scheme.lower() != "bearer":
            token = ""
        if not token.strip():
            raise Unauthorized("a token is needed: send Authorization: Bearer TOKEN")
        presented, found = _hash(token.strip()), None
        for entry in self._entries:  # all of them: how long it takes must not tell which matched
            if hmac.compare_digest(presented, entry.token_sha256):
                found = entry.caller
        if found is None:
            raise Unauthorized("nobody has this token")
        return found


def caller_with(*scopes: str) -> Callable[..., Awaitable[Caller]]:
    """A FastAPI dependency: the caller, who must have all these scopes and be no foreign page.

    Args:
        scopes: may name path parameters, e.g. ``publish:{name}``; none lets any valid token in.
    """

    async def caller(
        request: Request,
        _: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    ) -> Caller:
        cast(Origins, request.app.state.origins).check(request.headers)
        authenticator = cast(Authenticator, request.app.state.authenticator)
        caller = authenticator.authenticate(request.headers.get("authorization"))
        for scope in scopes:
            caller.require(scope.format_map(request.path_params))
        return caller

    return caller


def _token(value: SecretStr) -> SecretStr:
    token = value.get_secret_value()
    if len(token) < _MIN_TOKEN_CHARS or not _TOKEN.fullmatch(token):
        raise PydanticCustomError(
            "token",
            "{least} or more of the characters A-Z a-z 0-9 . _ ~ + / = -",
            {"least": _MIN_TOKEN_CHARS},
        )
    return value


def _scope(value: str) -> str:
    policy = value.removeprefix(_PUBLISH) if value.startswith(_PUBLISH) else ""
    if value in (ROLLOUT, ADMIN, _EVERY_POLICY) or re.fullmatch(POLICY_NAME, policy):
        return value
    raise PydanticCustomError("scope", "rollout, admin, publish:NAME or publish:*")


class _TokenOfFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64)
    token: Annotated[SecretStr, AfterValidator(_token)]
    scopes: list[Annotated[str, AfterValidator(_scope)]]
    max_queued_samples: int | None = Field(None, ge=1)
    max_running_samples: int | None = Field(None, ge=1)
    weight: float = Field(1.0, ge=0.001, le=1000.0, allow_inf_nan=False)

    @property
    def caller(self) -> Caller:
        quota = Quota(self.max_queued_samples, self.max_running_samples, self.weight)
        return Caller(self.name, frozenset(self.scopes), quota)


class _TokensFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    token: list[_TokenOfFile] = Field(min_length=1)


def _parsed(document: dict[str, Any], path: Path) -> list[_TokenOfFile]:
    try:
        return _TokensFile.model_validate(document).token
    except ValidationError as error:
        # Only places and rules are shown: a misplaced token would be among the values.
        found = error.errors(include_url=False, include_input=False, include_context=False)
        problems = "; ".join(f"{_place(item['loc'])}: {item['msg']}" for item in found)
        raise TokensFileError(f"the tokens file {path} is wrong: {problems}") from None


def _place(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")


def _entries(tokens: list[_TokenOfFile], path: Path) -> list[_Entry]:
    entries: dict[bytes, _Entry] = {}
    for token in tokens:
        digest = _hash(token.token.get_secret_value())
        if token.name in {entry.caller.name for entry in entries.values()}:
            raise TokensFileError(f"the tokens file {path} has the name {token.name!r} twice")
        if (first := entries.get(digest)) is not None:
            names = f"{first.caller.name!r} and {token.name!r}"
            raise TokensFileError(f"the tokens file {path} gives {names} the same token")
        entries[digest] = _Entry(digest, token.caller)
    return list(entries.values())


def _password(credentials: str) -> str:
    """What follows the user's name: tools that know no tokens take ``http://any:TOKEN@host``."""
    try:
        decoded = base64.b64decode(credentials.strip(), validate=True).decode()
    except ValueError:
        return ""
    return decoded.partition(":")[2]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()

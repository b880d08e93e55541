"""One exception tree on both sides of the wire."""

from __future__ import annotations

from typing import Any

import pytest

from shared import errors
from shared.codec import decode, encode
from shared.errors import (
    EngineUnavailable,
    InvalidRequest,
    Problem,
    ProtocolMismatch,
    ServerUnreachable,
    TitoError,
    from_wire,
)
from shared.protocol import JSON, MSGPACK


def kinds() -> list[type[TitoError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in found if issubclass(kind, TitoError) and kind is not TitoError]


SENT = [kind for kind in kinds() if kind not in (ServerUnreachable, ProtocolMismatch)]


@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_every_error_comes_back_as_itself(kind: type[TitoError], content_type: str) -> None:
    sent = kind(
        "what happened",
        problems=[Problem("prompts[3].ids[17]", "-1", "0 or more"), Problem("x", "y", "z")],
        retry_after=1.5,
        details={"version": 3},
    )
    document = decode(encode(sent.to_wire(), content_type), content_type)
    back = from_wire(document, status=kind.status)
    assert type(back) is kind
    assert (back.message, back.problems) == (sent.message, sent.problems)
    assert (back.retry_after, back.details) == (sent.retry_after, sent.details)
    assert str(back) == str(sent)


@pytest.mark.parametrize("kind", SENT)
def test_every_error_has_its_own_code_and_a_failing_status(kind: type[TitoError]) -> None:
    assert [other for other in SENT if other.code == kind.code] == [kind]
    assert 400 <= kind.status < 600


def test_a_bare_error_carries_nothing_else() -> None:
    wire = {"error": {"code": "invalid_request", "message": "no"}}
    assert InvalidRequest("no").to_wire() == wire
    back = from_wire(wire, status=422)
    assert (back.problems, back.retry_after, back.details) == ((), None, {})


def test_people_read_the_problems_too() -> None:
    error = InvalidRequest("2 problems", problems=[Problem("a", "1", "2"), Problem("b", "3", "4")])
    assert str(error) == "2 problems\n  a: got 1; allowed: 2\n  b: got 3; allowed: 4"


def test_a_code_that_this_client_does_not_know() -> None:
    error = from_wire({"error": {"code": "brand_new", "message": "hello"}}, status=418)
    assert type(error) is TitoError
    assert str(error) == "hello"


@pytest.mark.parametrize(
    "document",
    [
        None,
        "<html>502 Bad Gateway</html>",
        b"\xff",
        [],
        {},
        {"error": "no"},
        {"error": None},
        {"error": {"code": "invalid_request"}},
        {"error": {"message": "x"}},
        {"error": {"code": 5, "message": "x"}},
        {"detail": "Not Found"},
        "x" * 100_000,
    ],
)
def test_what_a_proxy_may_have_written(document: Any) -> None:
    error = from_wire(document, status=502)
    assert type(error) is ServerUnreachable
    assert "502" in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    "extra",
    [
        {"problems": None},
        {"problems": [{"where": "x"}]},
        {"problems": [{"where": "x", "got": "y", "allowed": "z", "hint": "new in version 2"}]},
        {"problems": ["x"]},
        {"problems": 5},
        {"retry_after": "soon"},
        {"details": [1]},
        {"mood": 1},
    ],
)
def test_an_error_that_is_not_quite_ours_is_still_an_error(extra: dict[str, Any]) -> None:
    document = {"error": {"code": "engine_unavailable", "message": "starting", **extra}}
    error = from_wire(document, status=503)
    assert isinstance(error, TitoError)
    assert "starting" in str(error)
    assert error.retry_after is None or isinstance(error.retry_after, float)


def test_retry_after_may_be_a_whole_number() -> None:
    document = {"error": {"code": "engine_unavailable", "message": "x", "retry_after": 2}}
    error = from_wire(document, status=503)
    assert isinstance(error, EngineUnavailable)
    assert error.retry_after == 2

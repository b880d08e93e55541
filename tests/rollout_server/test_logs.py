"""Log lines name the request, and machines can read them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollout_server.app import create_app
from rollout_server.logs import REQUEST_HEADER, JsonLines, TextLines, event
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from tests.rollout_server.support import FakeEngine, Weights, eventually, lazy, post, serving

log = logging.getLogger("tito.test")


@pytest.fixture
def url(tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    settings = ServerSettings(model=str(tiny_model), spool_dir=tmp_path / "spool")
    with serving(create_app(settings, build_engine=lambda _: FakeEngine())) as url:
        with RolloutClient(url) as client:
            client.wait_ready(60)
        yield url


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the server's loggers write as JSON."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(JsonLines().format(record))  # type: ignore[method-assign]
    tito = logging.getLogger("tito")
    level, tito.level = tito.level, logging.DEBUG
    tito.addHandler(handler)
    yield written
    tito.removeHandler(handler)
    tito.level = level


def test_a_rollout_and_its_groups_name_the_request(url: str, lines: list[str]) -> None:
    body = {"prompts": [[1, 2], [3]], "group_size": 2, "max_tokens": 4}
    answer = post(url, body, headers={REQUEST_HEADER: "mine-1"})
    assert answer.headers[REQUEST_HEADER] == "mine-1"

    def ours() -> list[dict[str, object]]:
        return [d for line in lines if (d := json.loads(line)).get("request") == "mine-1"]

    eventually(lambda: any(d["message"] == "rollout" for d in ours()))
    (rollout,) = (d for d in ours() if d["message"] == "rollout")
    assert (rollout["policy"], rollout["groups"], rollout["versions"]) == ("default", 2, "0")
    assert (rollout["failure"], rollout["level"]) == (None, "info")
    groups = [d for d in ours() if d["message"] == "group"]
    assert {d["group"] for d in groups} == {group["id"] for group in answer.json()["groups"]}
    assert {(d["policy"], d["version"], d["samples"]) for d in groups} == {("default", 0, 2)}


def test_a_publish_names_version_and_outcome(url: str, lines: list[str], base: Weights) -> None:
    with RolloutClient(url) as client:
        version = client.reload(lazy(base.tensors)).version
    (publish,) = (d for line in lines if (d := json.loads(line))["message"] == "publish")
    assert (publish["policy"], publish["version"], publish["state"]) == ("default", version, "live")
    assert publish["request"]


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "a\u00e9"])
def test_an_unusable_name_is_replaced(url: str, given: str | None) -> None:
    headers = {} if given is None else {REQUEST_HEADER.encode(): given.encode()}
    name = httpx.get(f"{url}/healthz", headers=httpx.Headers(headers)).headers[REQUEST_HEADER]
    assert len(name) == 16
    assert name != httpx.get(f"{url}/healthz").headers[REQUEST_HEADER]


def record_of(**fields: str | int | float | None) -> logging.LogRecord:
    caught: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record)  # type: ignore[method-assign]  # noqa: PLW0108
    log.addHandler(handler)
    try:
        event(log, logging.WARNING, "it\nhappened", **fields)
    finally:
        log.removeHandler(handler)
    return caught[0]


def test_text_shows_fields_behind_the_words() -> None:
    line = TextLines().format(record_of(policy="a", version=3, failure=None))
    assert line.endswith("WARNING tito.test: it\nhappened  policy=a version=3")


def test_json_is_one_line_whatever_is_said() -> None:
    record = record_of(policy="a\nb")
    try:
        raise ValueError("bad\nthing")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = JsonLines().format(record)
    assert "\n" not in line
    document = json.loads(line)
    assert (document["message"], document["policy"]) == ("it\nhappened", "a\nb")
    assert document["error"].endswith("ValueError: bad\nthing")

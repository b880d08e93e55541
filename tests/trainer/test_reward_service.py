"""Scores from a service, over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainer.rewards import Failed, Outcome, Score, TimedOut

ScoreTexts = Callable[..., list[Outcome]]
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@contextmanager
def service(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers each POST by calling ``answer``; gives its URL and what was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append({**body, "authorization": self.headers.get("authorization")})
            status, document = answer(body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", asked
    finally:
        server.shutdown()
        server.server_close()


def lengths(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"scores": [float(len(text)) for text in body["texts"]]}


def test_one_request_for_a_batch(score_texts: ScoreTexts) -> None:
    with service(lengths) as (url, asked):
        options = {"url": url, "headers": {"authorization": "Bearer x"}, "rubric": "short"}
        found = score_texts(["a", "bb"], "ref", function="http", options=options, workers=1)
    assert found == [Score(1.0), Score(2.0)]
    assert asked == [
        {
            "prompts": ["q", "q"],
            "texts": ["a", "bb"],
            "references": ["ref", "ref"],
            "options": {"rubric": "short"},
            "authorization": "Bearer x",
        }
    ]


def test_null_is_no_verdict(score_texts: ScoreTexts) -> None:
    document = {"scores": [1, None, None, "1"], "errors": [None, "judge is ill", None, None]}
    with service(lambda _: (200, document)) as (url, _):
        found = score_texts(["a"] * 4, function="http", options={"url": url}, workers=1)
    assert found == [
        Score(1.0),
        Failed("no verdict: judge is ill"),
        Failed("no verdict: no reason given"),
        Failed("TypeError: a reward must return a number, not '1'"),
    ]


@pytest.mark.parametrize(
    ("status", "document", "reason"),
    [
        (200, {"scores": [1.0]}, "no list of 2 scores"),
        (200, [1.0, 2.0], "no list of 2 scores"),
        (500, {}, "500 Internal Server Error"),
    ],
)
def test_a_broken_answer_is_an_error_for_all(
    score_texts: ScoreTexts, status: int, document: Any, reason: str
) -> None:
    with service(lambda _: (status, document)) as (url, asked):
        found = score_texts(["a", "b"], function="http", options={"url": url}, workers=1)
    assert all(isinstance(outcome, Failed) and reason in outcome.reason for outcome in found)
    assert len(asked) == 1


def test_a_busy_service_is_asked_again(score_texts: ScoreTexts) -> None:
    answers: Iterator[tuple[int, Any]] = iter([(503, {}), (503, {})])
    with service(lambda body: next(answers, None) or lengths(body)) as (url, asked):
        found = score_texts(["a"], function="http", options={"url": url}, timeout_s=30.0)
    assert found == [Score(1.0)]
    assert len(asked) == 3


def test_a_service_that_does_not_answer_in_time(score_texts: ScoreTexts) -> None:
    release = threading.Event()

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(60)
        return lengths(body)

    with service(slow) as (url, _):
        found = score_texts(["a", "b"], function="http", options={"url": url}, timeout_s=1.0)
        release.set()
    assert all(isinstance(outcome, TimedOut) for outcome in found)


def test_a_service_that_is_not_there(score_texts: ScoreTexts) -> None:
    with service(lengths) as (url, _):
        pass
    (found,) = score_texts(["a"], function="http", options={"url": url}, timeout_s=1.0)
    assert isinstance(found, Failed)
    assert not isinstance(found, TimedOut)
    assert "ConnectError" in found.reason

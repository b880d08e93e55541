"""Both clients against a transport that answers as it is told: retries, errors, strange servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
import msgpack
import numpy as np
import orjson
import pytest

from shared import exchange
from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import (
    BodyTooLarge,
    EngineFailure,
    EngineUnavailable,
    InvalidRequest,
    MalformedBody,
    Overloaded,
    Problem,
    ProtocolMismatch,
    ServerUnreachable,
    TitoError,
    WeightsRejected,
)
from shared.protocol import DIGEST_HEADER, DIGEST_TRAILER, MSGPACK, SAFETENSORS, ServerInfo
from shared.weights import LazyTensor, TensorSpec, stream_checkpoint

INFO = ServerInfo(1, "m", "t", 10, "bfloat16", "default", 3, "d" * 32, {"max_model_len": 8})
SAMPLE = {
    "completion_ids": b"\x05\0\0\0",
    "logprobs": b"\0\0\0\xbf",
    "finish_reason": "stop",
    "version": 3,
    "digest": "d",
}
ROLLOUT = {
    "model": "m",
    "tokenizer": "t",
    "policy": "default",
    "sampling": {},
    "groups": [{"group_id": 0, "prompt_ids": b"\x01\0\0\0", "samples": [SAMPLE]}],
}
RELOADED = {"version": 4, "digest": "e" * 32, "timings": {"load": 0.1}}
TENSORS = [
    LazyTensor(TensorSpec("a", "F32", (2,)), lambda: b"\0" * 8),
    LazyTensor(TensorSpec("b", "U8", (3,)), lambda: b"abc"),
]
STARTING = EngineUnavailable("the engine is starting", retry_after=0.01)

Answer = httpx.Response | Exception
Ask = Callable[[Any], Any]


def packed(document: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(
        status, content=msgpack.packb(document), headers={"content-type": MSGPACK}
    )


def failing(error: TitoError) -> httpx.Response:
    return packed(error.to_wire(), error.status)


class Server:
    """Answers with what it was given, in order, and remembers what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)

    def blocking(self, ask: Ask) -> Any:
        def sync_handle(request: httpx.Request) -> httpx.Response:
            request.read()
            return self.handle(request)

        with RolloutClient("http://tito", transport=httpx.MockTransport(sync_handle)) as client:
            return ask(client)

    def asynchronous(self, ask: Ask) -> Any:
        async def async_handle(request: httpx.Request) -> httpx.Response:
            await request.aread()
            return self.handle(request)

        async def run() -> Any:
            transport = httpx.MockTransport(async_handle)
            async with AsyncRolloutClient("http://tito", transport=transport) as client:
                return await ask(client)

        return asyncio.run(run())


@pytest.fixture(params=["blocking", "asynchronous"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "DELAYS_S", (0.001,) * 3)
    for name in ("client", "async_client"):
        monkeypatch.setattr(f"shared.{name}.POLL_S", 0.001)


def run(server: Server, flavour: str, ask: Ask) -> Any:
    return getattr(server, flavour)(ask)


def roll(client: Any) -> Any:
    return client.rollout(["a"], group_size=1)


def reload(client: Any) -> Any:
    return client.reload(TENSORS)


def reload_path(client: Any) -> Any:
    return client.reload_path("x")


def info(client: Any) -> Any:
    return client.info()


EVERYTHING = [roll, reload, reload_path, info]


def test_a_rollout_is_asked_for_packed(flavour: str) -> None:
    server = Server(packed(ROLLOUT))
    result = run(server, flavour, roll)
    (request,) = server.requests
    assert (request.method, request.url.path) == ("POST", "/rollout")
    assert request.headers["content-type"] == request.headers["accept"] == MSGPACK
    body = msgpack.unpackb(request.content)
    assert body == {"prompts": ["a"], "packed": True, "group_size": 1}
    (sample,) = result.samples
    assert sample.completion_ids.tolist() == [5]
    assert sample.logprobs.tolist() == [-0.5]
    assert isinstance(sample.completion_ids.base, bytes)


def test_prompts_may_be_tuples_arrays_and_mappings(flavour: str) -> None:
    server = Server(packed(ROLLOUT))
    prompts = ["a", (1, 2), np.array([3, 4], np.int64), ({"role": "user", "content": "hi"},)]
    run(server, flavour, lambda client: client.rollout(prompts, stop=("x",), temperature=0.5))
    body = msgpack.unpackb(server.requests[0].content)
    assert body["prompts"] == ["a", [1, 2], [3, 4], [{"role": "user", "content": "hi"}]]
    assert body["stop"] == ["x"]


def test_settings_may_be_numpy_numbers(flavour: str) -> None:
    # They come out of configurations and arrays; msgpack does not know them by itself.
    server = Server(packed(ROLLOUT))
    run(
        server,
        flavour,
        lambda client: client.rollout(
            [[np.int64(3)]], group_size=np.int64(2), temperature=np.float64(0.5)
        ),
    )
    body = msgpack.unpackb(server.requests[0].content)
    assert (body["prompts"], body["group_size"], body["temperature"]) == ([[3]], 2, 0.5)


def test_weights_are_streamed_with_their_digest_last(flavour: str) -> None:
    server = Server(packed(RELOADED))
    result = run(server, flavour, reload)
    (request,) = server.requests
    expected = b"".join(bytes(piece) for piece in stream_checkpoint(TENSORS))
    assert request.content == expected
    assert request.headers["content-length"] == str(len(expected))
    assert request.headers["content-type"] == SAFETENSORS
    assert request.headers[DIGEST_HEADER] == DIGEST_TRAILER
    assert asdict(result) == {**RELOADED, "durable": True}


def test_a_path_is_sent_as_it_is(flavour: str) -> None:
    server = Server(packed(RELOADED))
    run(server, flavour, lambda client: client.reload_path("step-3", digest="f" * 32))
    assert msgpack.unpackb(server.requests[0].content) == {"path": "step-3", "digest": "f" * 32}


def test_a_token_is_sent_with_every_request() -> None:
    server = Server(packed(asdict(INFO)))
    transport = httpx.MockTransport(server.handle)
    with RolloutClient("http://tito/", token="secret", transport=transport) as client:
        assert client.info() == INFO
    assert server.requests[0].headers["authorization"] == "Bearer secret"
    assert str(server.requests[0].url) == "http://tito/info"


@pytest.mark.parametrize("ask", EVERYTHING)
@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no", problems=[Problem("prompts[0]", "''", "a non-empty string")]),
        BodyTooLarge("too large"),
        WeightsRejected("bad weights"),
        EngineFailure("it broke"),
        EngineUnavailable("closed for good"),
    ],
)
def test_errors_are_those_of_the_server_and_final(flavour: str, ask: Ask, error: TitoError) -> None:
    server = Server(failing(error))
    with pytest.raises(type(error)) as caught:
        run(server, flavour, ask)
    assert str(caught.value) == str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("ask", [roll, info])
@pytest.mark.parametrize(
    "obstacle",
    [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow"), failing(STARTING)],
    ids=["refused", "timeout", "starting"],
)
def test_what_did_no_harm_is_tried_again(flavour: str, ask: Ask, obstacle: Answer) -> None:
    good = packed(ROLLOUT if ask is roll else asdict(INFO))
    server = Server(obstacle, obstacle, good)
    run(server, flavour, ask)
    assert len(server.requests) == 3


@pytest.mark.parametrize("ask", [roll, info])
def test_tries_are_bounded(flavour: str, ask: Ask) -> None:
    obstacles: list[tuple[Answer, type[TitoError]]] = [
        (httpx.ConnectError("refused"), ServerUnreachable),
        (failing(STARTING), EngineUnavailable),
    ]
    for obstacle, expected in obstacles:
        server = Server(obstacle)
        with pytest.raises(expected):
            run(server, flavour, ask)
        assert 2 <= len(server.requests) <= 5


@pytest.mark.parametrize("ask", EVERYTHING)
@pytest.mark.parametrize(
    "loss",
    [
        httpx.ReadError("reset"),
        httpx.ReadTimeout("silence"),
        httpx.WriteError("broken pipe"),
        httpx.RemoteProtocolError("half an answer"),
    ],
)
def test_an_answer_lost_half_way_is_never_asked_for_again(
    flavour: str, ask: Ask, loss: Exception
) -> None:
    server = Server(loss)
    with pytest.raises(ServerUnreachable, match=str(loss)):
        run(server, flavour, ask)
    assert len(server.requests) == 1


@pytest.mark.parametrize("ask", [reload, reload_path])
def test_a_publish_is_sent_once(flavour: str, ask: Ask) -> None:
    server = Server(failing(STARTING))
    with pytest.raises(EngineUnavailable):
        run(server, flavour, ask)
    assert len(server.requests) == 1


def test_an_unreachable_server_is_named(flavour: str) -> None:
    with pytest.raises(ServerUnreachable, match="http://tito: refused"):
        run(Server(httpx.ConnectError("refused")), flavour, roll)


def test_a_transport_error_without_words_is_named_by_kind(flavour: str) -> None:
    with pytest.raises(ServerUnreachable, match="ReadTimeout"):
        run(Server(httpx.ReadTimeout("")), flavour, roll)


@pytest.mark.parametrize("seconds", [1e9, float("inf"), -1.0])
def test_the_server_does_not_decide_how_long_the_client_sleeps(
    flavour: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def no_time(delay: float) -> None:
        slept.append(delay)

    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(asyncio, "sleep", no_time)
    endless = failing(EngineUnavailable("later", retry_after=seconds))
    with pytest.raises(EngineUnavailable):
        run(Server(endless), flavour, roll)
    assert all(0 <= delay <= 60 for delay in slept)


@pytest.mark.parametrize("ask", EVERYTHING)
@pytest.mark.parametrize("status", [200, 302, 404, 502, 503])
def test_a_proxy_that_speaks_html(flavour: str, ask: Ask, status: int) -> None:
    page = httpx.Response(status, html="<html>Bad Gateway</html>")
    server = Server(page)
    with pytest.raises((ServerUnreachable, MalformedBody)) as caught:
        run(server, flavour, ask)
    assert str(status) in str(caught.value) or status == 200
    assert len(server.requests) == 1


@pytest.mark.parametrize("ask", EVERYTHING)
@pytest.mark.parametrize(
    "document", [None, 5, "text", [], {}, {"groups": 5}, {"version": 1}, {"protocol": 1}]
)
def test_an_answer_of_another_form(flavour: str, ask: Ask, document: Any) -> None:
    with pytest.raises(TitoError):
        run(Server(packed(document)), flavour, ask)


@pytest.mark.parametrize("ask", EVERYTHING)
@pytest.mark.parametrize(
    "headers", [{"content-type": MSGPACK}, {"content-type": "application/json"}, {}]
)
def test_an_answer_of_garbage(flavour: str, ask: Ask, headers: dict[str, str]) -> None:
    response = httpx.Response(200, content=b"\xc1\xff{", headers=headers)
    with pytest.raises(MalformedBody, match="http://tito"):
        run(Server(response), flavour, ask)


def test_a_body_that_claims_a_compression_it_does_not_have(flavour: str) -> None:
    class Claiming(Server):
        def handle(self, request: httpx.Request) -> httpx.Response:
            headers = {"content-type": MSGPACK, "content-encoding": "gzip"}
            stream = httpx.ByteStream(b"not gzip")
            return httpx.Response(200, headers=headers, stream=stream, request=request)

    with pytest.raises(TitoError):
        run(Claiming(packed({})), flavour, roll)


def test_json_answers_are_read_too(flavour: str) -> None:
    answer = httpx.Response(
        200, content=orjson.dumps(asdict(INFO)), headers={"content-type": "application/json"}
    )
    assert run(Server(answer), flavour, info) == INFO


def test_another_protocol_is_refused(flavour: str) -> None:
    server = Server(packed(asdict(INFO) | {"protocol": 2}))
    with pytest.raises(ProtocolMismatch, match="protocol 2"):
        run(server, flavour, info)


def test_waiting_for_another_protocol_is_pointless(flavour: str) -> None:
    server = Server(packed({}), packed(asdict(INFO) | {"protocol": 2}))
    start = time.monotonic()
    with pytest.raises(ProtocolMismatch, match="protocol 2"):
        run(server, flavour, lambda client: client.wait_ready(3.0))
    assert time.monotonic() - start < 2


def test_a_newer_server_may_say_more(flavour: str) -> None:
    assert run(Server(packed(asdict(INFO) | {"new": 1})), flavour, info) == INFO


def test_waiting_until_ready(flavour: str) -> None:
    server = Server(
        httpx.ConnectError("refused"),
        failing(STARTING),
        httpx.Response(502, html="<html>"),
        packed({"status": "ready"}),
        packed(asdict(INFO)),
    )
    assert run(server, flavour, lambda client: client.wait_ready(10.0)) == INFO
    assert [request.url.path for request in server.requests] == ["/readyz"] * 4 + ["/info"]


def test_waiting_ends(flavour: str) -> None:
    server = Server(failing(STARTING))
    start = time.monotonic()
    with pytest.raises(EngineUnavailable, match="starting"):
        run(server, flavour, lambda client: client.wait_ready(0.1))
    assert time.monotonic() - start < 2


def test_a_failing_tensor_stops_the_upload(flavour: str) -> None:
    def lost() -> bytes:
        raise RuntimeError("the parameter is on a device that is gone")

    broken = [TENSORS[0], LazyTensor(TensorSpec("c", "F32", (1,)), lost)]
    server = Server(packed(RELOADED))
    with pytest.raises(RuntimeError, match="device that is gone"):
        run(server, flavour, lambda client: client.reload(broken))
    assert server.requests == []


def test_overload_is_reported(flavour: str) -> None:
    server = Server(failing(Overloaded("busy", retry_after=1.0)))
    with pytest.raises(Overloaded) as caught:
        run(server, flavour, lambda client: client.reload(TENSORS))
    assert caught.value.retry_after == 1.0


def test_a_server_that_is_away_for_long_is_asked_as_often_as_was_said(flavour: str) -> None:
    refused: Answer = httpx.ConnectError("refused")
    away = [refused] * 3 + [failing(STARTING)] * 3
    server = Server(*away, packed(ROLLOUT))
    rollout = run(server, flavour, lambda client: client.rollout(["a"], group_size=1, retries=3))
    assert len(rollout.samples) == 1
    assert len(server.requests) == 7
    server = Server(*away, packed(ROLLOUT))
    with pytest.raises(EngineUnavailable):
        run(server, flavour, lambda client: client.rollout(["a"], group_size=1, retries=2))


@pytest.mark.parametrize("make", [RolloutClient, AsyncRolloutClient])
@pytest.mark.parametrize(
    "token", ["sesame\x01open", "sésame", "sesame open", "sesame\r\nX: y", " "]
)
def test_a_token_that_no_header_can_carry_is_not_shown(make: Any, token: str) -> None:
    with pytest.raises(InvalidRequest, match="token") as caught:
        make("http://tito", token=token)
    assert "same" not in str(caught.value)


def test_a_token_from_a_file_may_end_its_line() -> None:
    server = Server(packed(asdict(INFO)))
    transport = httpx.MockTransport(server.handle)
    with RolloutClient("http://tito", token="sesame\n", transport=transport) as client:
        client.info()
    assert server.requests[0].headers["authorization"] == "Bearer sesame"


def test_a_token_in_the_address_is_sent_and_not_shown() -> None:
    server = Server(httpx.ConnectError("refused"))
    transport = httpx.MockTransport(server.handle)
    with (
        RolloutClient("http://any:sesame@tito", transport=transport) as client,
        pytest.raises(ServerUnreachable, match="http://tito: refused") as caught,
    ):
        client.info()
    assert "sesame" not in str(caught.value)
    assert server.requests[0].headers["authorization"].startswith("Basic ")

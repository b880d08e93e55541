"""Whatever a caller sends: a 4xx that says what is wrong, nothing run, and the next one served."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import orjson
import pytest

from shared.client import RolloutClient
from shared.errors import BodyTooLarge
from shared.protocol import DIGEST_HEADER, JSON, MAX_GROUP_SIZE, MSGPACK, SAFETENSORS
from tests.rollout_server.support import post, samples_run

USER = {"role": "user", "content": "hi"}
DEEP = 1000


@pytest.fixture(autouse=True)
def _nothing_ran(server_url: str) -> Iterator[None]:
    """No sample was produced, no weights were changed, and the server still works."""
    before, info = samples_run(server_url), httpx.get(f"{server_url}/info").json()
    yield
    assert samples_run(server_url) == before
    assert httpx.get(f"{server_url}/info").json() == info
    response = post(server_url, {"prompts": ["a"], "group_size": 1, "max_tokens": 1})
    assert response.status_code == 200, response.text


def body(**changes: Any) -> dict[str, Any]:
    return {"prompts": ["12+7="], "group_size": 2, "max_tokens": 4, **changes}


def refused(response: httpx.Response, status: int = 422) -> dict[str, Any]:
    """The error document of a refusal with this status."""
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert isinstance(error["code"], str)
    assert isinstance(error["message"], str)
    assert len(response.content) < 20_000, "the error is as long as what it complains about"
    return dict(error)


def problem_of(response: httpx.Response, where: str) -> dict[str, str]:
    """The problem with the field ``where``, which must be among those named."""
    problems = {problem["where"]: problem for problem in refused(response)["problems"]}
    assert where in problems
    assert problems[where]["got"]
    assert problems[where]["allowed"]
    return dict(problems[where])


@pytest.mark.parametrize(
    ("field", "value", "got", "allowed"),
    [
        ("group_size", 0, "0", "1"),
        ("group_size", -1, "-1", "1"),
        ("group_size", MAX_GROUP_SIZE + 1, str(MAX_GROUP_SIZE + 1), str(MAX_GROUP_SIZE)),
        ("group_size", 2**63, str(2**63), str(MAX_GROUP_SIZE)),
        ("group_size", 1.5, "1.5", "integer"),
        ("group_size", None, "None", "integer"),
        ("group_size", "many", "many", "integer"),
        ("group_size", [], "[]", "integer"),
        ("max_tokens", 0, "0", "1"),
        ("max_tokens", -5, "-5", "1"),
        ("max_tokens", 1024, "1024", "1023"),
        ("max_tokens", 2**62, str(2**62), "1023"),
        ("temperature", 0.0, "0.0", "above 0"),
        ("temperature", -0.5, "-0.5", "0"),
        ("temperature", math.nan, "nan", "finite"),
        ("temperature", math.inf, "inf", "finite"),
        ("temperature", -math.inf, "inf", "finite"),
        ("temperature", 2.5, "2.5", "2"),
        ("temperature", "hot", "hot", "number"),
        ("top_p", 0.0, "0.0", "0"),
        ("top_p", 0.9, "0.9", "1.0"),
        ("top_p", 1.1, "1.1", "1"),
        ("top_p", math.nan, "nan", "finite"),
        ("top_k", 5, "5", "0"),
        ("top_k", -1, "-1", "0"),
        ("min_p", 0.1, "0.1", "0.0"),
        ("presence_penalty", 0.5, "0.5", "0.0"),
        ("frequency_penalty", -0.5, "-0.5", "0.0"),
        ("repetition_penalty", 1.1, "1.1", "1.0"),
        ("repetition_penalty", 0.0, "0.0", "0"),
        ("stop", "x", "x", "list"),
        ("stop", ["x"] * 17, "x", "16"),
        ("stop_token_ids", list(range(65)), "0", "64"),
        ("purpose", "fun", "fun", "train"),
        ("text", "perhaps", "perhaps", "boolean"),
        ("packed", 7, "7", "boolean"),
        ("ignore_eos", None, "None", "boolean"),
        ("chat_template_kwargs", [], "[]", "dictionary"),
        ("prompts", [], "[]", "1"),
        ("prompts", "12+7=", "12+7=", "list"),
        ("prompts", None, "None", "list"),
        ("prompts", {}, "{}", "list"),
        ("prompts", ["a"] * 16385, "a", "16384"),
    ],
)
def test_a_wrong_setting_is_named(
    server_url: str, field: str, value: Any, got: str, allowed: str
) -> None:
    problem = problem_of(post(server_url, body(**{field: value})), field)
    assert got in problem["got"]
    assert allowed in problem["allowed"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("top_p", 0.5),
        ("top_k", 1),
        ("min_p", 0.5),
        ("presence_penalty", 1),
        ("frequency_penalty", 1),
        ("repetition_penalty", 2),
    ],
)
def test_a_refusal_for_training_tells_of_evaluation(
    server_url: str, field: str, value: float
) -> None:
    assert "eval" in problem_of(post(server_url, body(**{field: value})), field)["allowed"]


@pytest.mark.parametrize("temperature", [2.5, 50, 100])
def test_a_temperature_that_the_engine_refuses(server_url: str, temperature: float) -> None:
    for purpose in ("train", "eval"):
        asked = body(temperature=temperature, purpose=purpose)
        problem_of(post(server_url, asked), "temperature")


@pytest.mark.parametrize("token", [288, 100_000, 2**31, 2**62, 2**64 - 1])
def test_stop_token_ids_outside_the_vocabulary(server_url: str, token: int) -> None:
    error = refused(post(server_url, body(stop_token_ids=[5, token])))
    (problem,) = error["problems"]
    assert problem["where"] == "stop_token_ids[1]"
    assert problem["got"] == str(token)
    assert "288" in problem["allowed"]


@pytest.mark.parametrize("value", [-1, True, 1.0, "5", None, [5]])
def test_stop_token_ids_that_are_no_ids(server_url: str, value: Any) -> None:
    problem_of(post(server_url, body(stop_token_ids=[value])), "stop_token_ids[0]")


def test_an_empty_stop_string(server_url: str) -> None:
    problem_of(post(server_url, body(stop=["x", ""])), "stop[1]")


def test_several_problems_are_told_of_at_once(server_url: str) -> None:
    error = refused(post(server_url, body(temperature=0, top_p=0.5, max_tokens=5000)))
    found = {problem["where"] for problem in error["problems"]}
    assert found == {"temperature", "top_p", "max_tokens"}


@pytest.mark.parametrize("name", ["grup_size", "sede", "n", "model", "a b", "\u00e9"])
def test_an_unknown_field(server_url: str, name: str) -> None:
    problem = problem_of(post(server_url, body(**{name: 1})), name)
    assert "unknown" in problem["got"]
    assert "group_size" in problem["allowed"]


def test_a_very_long_unknown_field(server_url: str) -> None:
    refused(post(server_url, body(**{"x" * 500_000: 1})))


def test_no_prompts_at_all(server_url: str) -> None:
    problem_of(post(server_url, {"group_size": 2}), "prompts")


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ("", ""),
        ([], ""),
        (None, ""),
        (5, ""),
        (5.5, ""),
        ({}, ""),
        ({"role": "user", "content": "hi"}, ""),
        (b"bytes", ""),
        ([-1], ".ids[0]"),
        ([5, -(2**40)], ".ids[1]"),
        ([True], ".ids[0]"),
        ([5, 6, False], ".ids[2]"),
        ([1.0], ".ids[0]"),
        ([math.nan], ".ids[0]"),
        (["5"], ".ids[0]"),
        ([None], ".ids[0]"),
        ([[5]], ".ids[0]"),
        ([288], ".ids[0]"),
        ([5, 6, 2**31], ".ids[2]"),
        ([2**64 - 1], ".ids[0]"),
        ([5, {"role": "user"}], ".ids[1]"),
        ([5] * 1024, ""),
        ("x" * 5000, ""),
        ([{"role": "user", "content": "x" * 5000}], ""),
        ([{}], ".messages[0].role"),
        ([{"content": "hi"}], ".messages[0].role"),
        ([{"role": "", "content": "hi"}], ".messages[0].role"),
        ([{"role": 5, "content": "hi"}], ".messages[0].role"),
        ([USER, 5], ".messages[1]"),
        ([USER, {"role": "user", "content": 5}], ""),
        ([{"role": "user"}], ""),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], ""),
        ({"token_ids": [5, 6]}, ".begun.completion_from"),
        ({"completion_from": 1}, ".begun.token_ids"),
        ({"token_ids": [], "completion_from": 1}, ".begun.token_ids"),
        ({"token_ids": [5, 6], "completion_from": 0}, ".begun.completion_from"),
        ({"token_ids": [5, 6], "completion_from": 3}, ".begun.completion_from"),
        ({"token_ids": [5, 6], "completion_from": 1.5}, ".begun.completion_from"),
        ({"token_ids": [5, -6], "completion_from": 1}, ".begun.token_ids[1]"),
        ({"token_ids": [5, True], "completion_from": 1}, ".begun.token_ids[1]"),
        ({"token_ids": "ids", "completion_from": 1}, ".begun.token_ids"),
        ({"token_ids": [5, 6], "completion_from": 1, "text": "x"}, ".begun"),
        ({"token_ids": [5, 288], "completion_from": 1}, ".ids[1]"),
        ({"token_ids": [5] * 1024, "completion_from": 1}, ""),
    ],
)
def test_one_bad_prompt_is_named_by_its_index(server_url: str, prompt: Any, where: str) -> None:
    prompts = ["good", prompt, [5, 6]]
    response = post(server_url, body(prompts=prompts))
    problems = refused(response)["problems"]
    assert all(problem["where"].startswith(f"prompts[1]{where}") for problem in problems)
    assert problems
    assert all(problem["got"] and problem["allowed"] for problem in problems)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_that_would_leave_out_what_was_begun(server_url: str, penalty: str) -> None:
    begun = {"token_ids": [5, 6], "completion_from": 1}
    asked = body(prompts=["x", begun], purpose="eval", **{penalty: 0.5})
    assert "is continued" in problem_of(post(server_url, asked), penalty)["allowed"]


def test_an_id_outside_the_vocabulary_says_what_is_inside(server_url: str) -> None:
    problem = problem_of(post(server_url, body(prompts=[[5, 400]])), "prompts[0].ids[1]")
    assert problem["got"] == "400"
    assert "288" in problem["allowed"]


def test_a_long_prompt_says_how_long_it_may_be(server_url: str) -> None:
    problem = problem_of(post(server_url, body(prompts=[[5] * 1100])), "prompts[0]")
    assert "1100" in problem["got"]
    assert "1023" in problem["allowed"]


def test_more_samples_than_one_request_may_have(server_url: str) -> None:
    asked = body(prompts=[[5]] * 1000, group_size=5, max_tokens=1)
    problem = problem_of(post(server_url, asked), "group_size")
    assert "5000" in problem["got"]
    assert "4096" in problem["allowed"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"return_tensors": "pt"},
        {"return_tensors": "np"},
        {"chat_template": "{{ 'anything' }}"},
        {"chat_template": "{{ unclosed"},
        {"truncation": True, "max_length": 2},
        {"padding": "max_length", "max_length": 60},
        {"tokenize": False},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"return_dict": True},
        {"tools": 5},
        {"conversation": []},
        {"messages": []},
        {"self": 1},
    ],
)
def test_template_arguments_that_are_not_the_templates(
    server_url: str, arguments: dict[str, Any]
) -> None:
    refused(post(server_url, body(prompts=[[USER]], chat_template_kwargs=arguments)))


def test_many_bad_ids_do_not_take_long(server_url: str) -> None:
    # One byte an id: the error must not be made of as many problems as there are ids.
    count = 900_000
    raw = b"\x81\xa7prompts\x91\xdd" + count.to_bytes(4, "big") + b"\xff" * count
    response = post(server_url, raw=raw)
    refused(response)
    assert response.elapsed.total_seconds() < 1.0


def nested(opening: bytes, closing: bytes, depth: int = DEEP) -> bytes:
    return opening * depth + b"1" * (opening == b'{"a":') + closing * depth


@pytest.mark.parametrize("opening_closing", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize(
    "template",
    [
        b"%s",
        b'{"prompts": %s}',
        b'{"prompts": [%s]}',
        b'{"prompts": ["a"], "stop": %s}',
        b'{"prompts": ["a"], "group_size": %s}',
        b'{"prompts": ["a"], "unknown": %s}',
    ],
)
def test_deep_json(server_url: str, template: bytes, opening_closing: tuple[bytes, bytes]) -> None:
    raw = template.replace(b"%s", nested(*opening_closing))
    response = post(server_url, raw=raw, content_type=JSON)
    assert response.status_code in (400, 422), response.text[:300]
    assert response.json()["error"]


@pytest.mark.parametrize("depth", [100, 400, 500, 1000, 100_000])
@pytest.mark.parametrize("prefix", [b"", b"\x81\xa7prompts", b"\x81\xa7prompts\x91"])
def test_deep_msgpack(server_url: str, prefix: bytes, depth: int) -> None:
    response = post(server_url, raw=prefix + b"\x91" * depth + b"\xc0")
    assert response.status_code in (400, 422), response.text[:300]
    assert response.json()["error"]


PROMPTS_A = b"\xa7prompts\x91\xa1a"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x82" + PROMPTS_A,
        b"\x81" + PROMPTS_A + b"\x00",
        b"\x81\xa7prompts\xdd\xff\xff\xff\xff",
        b"\x81\xa7prompts\xdb\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa7prompts\xc9\xff\xff\xff\xff\x01",
        b"\x81\xa7prompts\x91\xa2\xff\xfe",
        b"\x81\xa7prompts\x91\xa3\xed\xa0\x80",
        b"\x81\xa7prompts\xd4\x05\x00",
        b"\x81\xa7prompts\xc7\x03\x05abc",
        b"\x81\x01\x02",
        b"\x81\xc0\x02",
        b"\x81\x90\x02",
        b"\x82" + PROMPTS_A + b"\xb4chat_template_kwargs\x81\x01\x02",
        b"\x82" + PROMPTS_A + b"\xb4chat_template_kwargs\x81\xa1a\xd6\xff\x00\x00\x00\x01",
        b"\x82" + PROMPTS_A + b"\xb4chat_template_kwargs\x81\xa1a\xd7\xff" + b"\xff" * 8,
        b"\x82" + PROMPTS_A + b"\xb4chat_template_kwargs\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12,
        b"\x82" + PROMPTS_A + b"\xb4chat_template_kwargs\x81\xc4\x01a\x01",
    ],
)
def test_malformed_msgpack(server_url: str, raw: bytes) -> None:
    error = refused(post(server_url, raw=raw), 400)
    assert error["code"] == "malformed_body"
    assert MSGPACK in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"{'prompts': []}",
        b'{"prompts": ["a"]} x',
        b'{"prompts": ["a"], "temperature": NaN}',
        b'{"prompts": ["a"], "temperature": Infinity}',
        b'{"prompts": ["\xff"]}',
        b'{"prompts": ["\\ud800"]}',
        b'{"prompts": ["\xed\xa0\x80"]}',
        b'{"prompts": ["a"],}',
        b"\xef\xbb\xbf" + b'{"prompts": ["a"]}',
        msgpack.packb(body()),
    ],
)
def test_malformed_json(server_url: str, raw: bytes) -> None:
    error = refused(post(server_url, raw=raw, content_type=JSON), 400)
    assert error["code"] == "malformed_body"
    assert JSON in error["message"]


@pytest.mark.parametrize("document", [None, True, 5, 1.5, "prompts", [], [1], [{}]])
def test_a_document_that_is_no_object(server_url: str, document: Any) -> None:
    problem_of(post(server_url, document), "body")


def test_byte_string_keys(server_url: str) -> None:
    refused_or_malformed = post(server_url, {b"prompts": ["a"], "group_size": 1})
    assert refused_or_malformed.status_code in (400, 422)


def test_numbers_beyond_64_bits(server_url: str) -> None:
    raw = json.dumps(body(prompts=[[10**30]])).encode()
    response = post(server_url, raw=raw, content_type=JSON)
    assert response.status_code in (400, 422)


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/octet-stream", "application/x-msgpack", SAFETENSORS, ";;", "x"],
)
def test_a_content_type_that_is_not_spoken(server_url: str, content_type: str) -> None:
    error = refused(post(server_url, body(), content_type=content_type), 415)
    assert MSGPACK in error["message"]
    assert JSON in error["message"]


def test_no_content_type(server_url: str) -> None:
    with httpx.Client() as http:
        request = http.build_request("POST", f"{server_url}/rollout", content=b"{}")
        request.headers.pop("content-type", None)
        assert http.send(request).status_code == 415


def test_a_body_over_the_limit(server_url: str) -> None:
    response = post(server_url, raw=b"x" * ((1 << 20) + 1))
    error = refused(response, 413)
    assert error["code"] == "body_too_large"
    assert str(1 << 20) in error["message"]


def test_a_body_over_the_limit_without_a_length(server_url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * (64 << 10)

    refused(post(server_url, raw=chunks()), 413)


@pytest.mark.parametrize("mebibytes", [2, 48])
def test_the_client_hears_that_its_body_is_too_large(client: RolloutClient, mebibytes: int) -> None:
    ids: Any = np.full(mebibytes << 19, 200)
    with pytest.raises(BodyTooLarge):
        client.rollout([ids], group_size=1, max_tokens=1)


def test_a_body_at_the_limit_is_read(server_url: str) -> None:
    raw = orjson.dumps(body(grup_size=1))
    padded = raw + b" " * ((1 << 20) - len(raw))
    problem_of(post(server_url, raw=padded, content_type=JSON), "grup_size")


def test_packed_json(server_url: str) -> None:
    problem = problem_of(post(server_url, body(packed=True), accept=JSON), "packed")
    assert MSGPACK in problem["allowed"]


def test_errors_follow_accept(server_url: str) -> None:
    wanted = body(group_size=0)
    for accept in (MSGPACK, JSON):
        response = post(server_url, wanted, accept=accept)
        assert response.headers["content-type"] == accept
    packed = post(server_url, wanted, accept=MSGPACK)
    assert msgpack.unpackb(packed.content) == post(server_url, wanted, accept=JSON).json()


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/rollout"), ("PUT", "/rollout"), ("DELETE", "/reload"), ("POST", "/info")],
)
def test_a_wrong_method(server_url: str, method: str, path: str) -> None:
    response = httpx.request(method, f"{server_url}{path}", headers={"accept": JSON})
    assert "Method Not Allowed" in refused(response, 405)["message"]


@pytest.mark.parametrize("path", ["/rollouts", "/rollout/x", "/v1/engines", "/%00"])
def test_an_unknown_route(server_url: str, path: str) -> None:
    response = httpx.post(f"{server_url}{path}", headers={"accept": JSON})
    assert refused(response, 404)["code"] == "not_found"


@pytest.mark.parametrize("digest", ["zz", "a" * 31, "a" * 33, "A" * 32, "trailers"])
def test_a_digest_header_that_is_no_digest(server_url: str, digest: str) -> None:
    response = post(
        server_url,
        raw=b"x" * 100,
        path="/reload",
        content_type=SAFETENSORS,
        headers={DIGEST_HEADER: digest},
    )
    assert "32 hex" in problem_of(response, DIGEST_HEADER)["allowed"]


@pytest.mark.parametrize(
    "asked",
    [{}, {"path": ""}, {"path": 5}, {"path": "x", "digest": "zz"}, {"path": "x", "force": True}],
)
def test_a_reload_body_that_is_wrong(server_url: str, asked: dict[str, Any]) -> None:
    assert refused(post(server_url, asked, path="/reload"))["problems"]


@pytest.mark.parametrize(
    "path", ["a\0b", "x" * 300, "x" * 5000, "x/" * 3000, "/dev/zero", "/proc/self/mem", "~"]
)
def test_a_reload_path_that_no_system_has(server_url: str, reload_dir: Path, path: str) -> None:
    for wanted in (path, f"{reload_dir}/{path}"):
        response = post(server_url, {"path": wanted}, path="/reload")
        assert 400 <= response.status_code < 500, response.text[:300]


@pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream", ""])
def test_a_reload_of_an_unknown_type(server_url: str, content_type: str) -> None:
    refused(post(server_url, raw=b"x", path="/reload", content_type=content_type), 415)


def raw_exchange(url: str, request: bytes) -> bytes:
    """What the server answers to these very bytes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(65536)


@pytest.mark.parametrize("length", ["-1", "1e3", "abc", "+5", "0x10", "5, 6", "9" * 40])
@pytest.mark.parametrize("path", ["/rollout", "/reload"])
def test_a_content_length_that_is_none(server_url: str, path: str, length: str) -> None:
    content_type = SAFETENSORS if path == "/reload" else MSGPACK
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
    answer = raw_exchange(server_url, f"{head}Content-Length: {length}\r\n\r\nx".encode())
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:200]


def test_a_connection_survives_a_refusal(server_url: str) -> None:
    with httpx.Client(base_url=server_url, headers={"accept": JSON}, timeout=30) as http:
        for _ in range(3):
            bad = http.post("/rollout", json=body(group_size=0))
            assert bad.status_code == 422
            assert http.get("/healthz").status_code == 200

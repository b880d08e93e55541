"""Streamed rollouts over real sockets: order, frames, back-pressure, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgpack
import orjson
import pytest

from rollout_server.engine import Completion
from rollout_server.settings import ServerSettings
from rollout_server.vllm_engine import VLLMEngine
from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import (
    DeadlineExceeded,
    EngineFailure,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
)
from shared.protocol import FRAMES, JSON, MSGPACK, NDJSON, Group
from tests.rollout_server.engines import PATIENCE_S, running
from tests.rollout_server.gates import Served, hang_up, raw_post, served
from tests.rollout_server.support import Weights, assert_agree, eventually, post, samples_run

PROMPTS = [[index, 7] for index in range(4)]
SMALL: dict[str, Any] = {"group_size": 2, "max_tokens": 3}


@pytest.fixture(scope="module")
def gated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tiny_model, tmp_path_factory.mktemp("staging"), keepalive_seconds=0.05) as server:
        yield server


@pytest.fixture
def server(gated: Served) -> Iterator[Served]:
    """The module's server with nothing held and nothing counted."""
    engine = gated.engine
    engine.withheld.clear()
    eventually(lambda: engine.running == 0)
    engine.begun.clear()
    engine.made.clear()
    engine.cancelled, engine.poison, engine.length, engine.drops = 0, None, None, None
    yield gated
    engine.withheld.clear()


def body(**more: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, "stream": True, **SMALL, **more}


def frames_of(content: bytes) -> list[dict[str, Any]]:
    """Length-prefixed msgpack, taken apart without the library that the server uses."""
    frames, at = [], 0
    while at < len(content):
        (length,) = struct.unpack_from("<I", content, at)
        frames.append(msgpack.unpackb(content[at + 4 : at + 4 + length]))
        at += 4 + length
    assert at == len(content)
    return frames


def test_groups_come_whole_as_soon_as_they_are_finished(server: Served) -> None:
    server.engine.withheld |= {0, 1, 2, 3}
    order = [2, 0, 3, 1]
    arrived: list[Group] = []
    with server.client.rollout_stream(PROMPTS, **SMALL) as stream:
        for expected in order:
            server.engine.withheld.remove(expected)
            arrived.append(next(stream))
            assert stream.end is None
        assert next(stream, None) is None
    assert [group.group_id for group in arrived] == order
    for group in arrived:
        assert group.prompt_ids.tolist() == PROMPTS[group.group_id]
        made = [sample.completion_ids.tolist() for sample in group.samples]
        assert server.engine.made[tuple(PROMPTS[group.group_id])] == [made]
    assert stream.end is not None
    assert stream.end.totals == stream.totals
    totals = stream.totals
    assert (totals.groups, totals.samples, totals.completion_tokens) == (4, 8, 24)
    assert (totals.prompt_tokens, totals.finish_reasons) == (8, {"length": 8})
    info = server.client.info()
    assert (stream.end.model, stream.end.tokenizer) == (info.model, info.tokenizer)
    assert stream.end.policy == "default"
    assert stream.end.sampling["max_tokens"] == 3
    assert stream.end.missing == ()


def test_the_asynchronous_client_streams_too(server: Served) -> None:
    server.engine.withheld |= {0, 1}

    async def run() -> list[int]:
        async with AsyncRolloutClient(server.url, timeout=60) as client:
            arrived = []
            async with client.rollout_stream(PROMPTS, **SMALL) as stream:
                async for group in stream:
                    arrived.append(group.group_id)
                    if len(arrived) == 2:
                        server.engine.withheld.clear()
            assert stream.end is not None
            assert stream.end.totals.groups == 4
            return arrived

    arrived = asyncio.run(run())
    assert sorted(arrived[:2]) == [2, 3]
    assert sorted(arrived[2:]) == [0, 1]


def test_frames_are_msgpack_behind_its_length(server: Served) -> None:
    response = post(server.url, body(packed=True), accept=MSGPACK)
    assert response.headers["content-type"] == FRAMES
    *groups, end = [f for f in frames_of(response.content) if f["frame"] != "keepalive"]
    assert [frame["frame"] for frame in groups] == ["group"] * 4
    assert sorted(frame["group_id"] for frame in groups) == [0, 1, 2, 3]
    assert all(len(sample["logprobs"]) == 12 for f in groups for sample in f["samples"])
    assert isinstance(groups[0]["prompt_ids"], bytes)
    assert end["frame"] == "end"
    assert end["totals"] == {
        "groups": 4,
        "samples": 8,
        "prompt_tokens": 8,
        "completion_tokens": 24,
        "finish_reasons": {"length": 8},
    }
    assert "missing" not in end


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (JSON, NDJSON),
        (NDJSON, NDJSON),
        ("text/html, application/json;q=0.9", NDJSON),
        (FRAMES, FRAMES),
        (f"{JSON}, {MSGPACK}", FRAMES),
        ("*/*", FRAMES),
    ],
)
def test_the_form_of_the_stream_follows_accept(server: Served, accept: str, expected: str) -> None:
    assert post(server.url, body(), accept=accept).headers["content-type"] == expected


def test_json_is_one_object_a_line(server: Served) -> None:
    server.engine.withheld.add(0)
    lines = []
    url, headers = f"{server.url}/rollout", {"content-type": JSON, "accept": JSON}
    content = orjson.dumps(body())
    with httpx.stream("POST", url, content=content, headers=headers, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(orjson.loads(line))
            if len(lines) == 6:
                server.engine.withheld.clear()
    kinds = [line["frame"] for line in lines]
    assert kinds[-1] == "end"
    assert kinds.count("group") == 4
    last = next(line for line in reversed(lines) if line["frame"] == "group")
    assert last["group_id"] == 0
    # While nothing was finished, something was sent all the same.
    assert {"frame": "keepalive"} in lines
    assert kinds.index("keepalive") < len(kinds) - 2


def test_packed_lines_are_refused(server: Served) -> None:
    response = post(server.url, body(packed=True), accept=NDJSON)
    assert response.status_code == 422
    assert server.engine.begun == {}


def test_the_stream_brings_what_the_plain_answer_does(
    client: RolloutClient, server_url: str, live: Weights
) -> None:
    prompts: list[Any] = [[5, 6, 7, index] for index in range(12)]
    greedy: dict[str, Any] = {"purpose": "eval", "temperature": 0, "group_size": 1}
    before = samples_run(server_url)
    with client.rollout_stream(prompts, max_tokens=8, **greedy) as stream:
        groups = {group.group_id: group for group in stream}
    assert samples_run(server_url) - before == 12
    plain = client.rollout(prompts, max_tokens=8, **greedy)
    assert sorted(groups) == list(range(12))
    assert stream.end is not None
    assert stream.end.sampling == plain.sampling
    for group in plain.groups:
        (expected,), (sample,) = group.samples, groups[group.group_id].samples
        assert sample.completion_ids.tolist() == expected.completion_ids.tolist()
        assert (sample.text, sample.version) == (expected.text, expected.version)
        ids = sample.prompt_ids.tolist(), sample.completion_ids.tolist()
        assert_agree(sample.logprobs, live.logprobs(*ids))


def test_short_samples_do_not_wait_for_long_ones(client: RolloutClient) -> None:
    # The context ends the first prompts after a few tokens, and the last after hundreds.
    context = client.info().limits["max_model_len"]
    prompts = [[5] * (context - 400), *([5] * (context - left) for left in (3, 4, 5))]
    with client.rollout_stream(prompts, group_size=1, max_tokens=399, ignore_eos=True) as stream:
        order = [group.group_id for group in stream]
    assert order[-1] == 0
    assert sorted(order) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_tokens": 10_000}, InvalidRequest),
        ({"policy": "nobody"}, NotFound),
        ({"min_version": 99}, PreconditionFailed),
    ],
)
def test_what_fails_before_the_stream_has_a_status(
    server: Served, settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        next(server.client.rollout_stream(PROMPTS, **{**SMALL, **settings}))
    assert post(server.url, body(**settings)).status_code in (404, 412, 422)
    assert server.engine.begun == {}


def test_bad_prompts_are_told_of_before_the_stream(server: Served) -> None:
    response = post(server.url, body(prompts=[[5], [10**6]]))
    assert response.status_code == 422
    assert response.json()["error"]["problems"][0]["where"] == "prompts[1].ids[0]"


def test_what_fails_while_it_waits_is_told_of_in_the_stream(server: Served) -> None:
    response = post(server.url, body(min_version=99, wait_seconds=1.0))
    assert response.status_code == 200
    *signs, error = [orjson.loads(line) for line in response.content.splitlines()]
    assert {"frame": "keepalive"} in signs
    assert error["frame"] == "error"
    assert (error["status"], error["error"]["code"]) == (412, "precondition_failed")
    with pytest.raises(PreconditionFailed) as refusal:
        next(server.client.rollout_stream(PROMPTS, min_version=99, wait_seconds=1.0, **SMALL))
    assert refusal.value.details["version"] == server.client.info().version


def test_a_failure_comes_after_the_groups_that_were_finished(server: Served) -> None:
    server.engine.withheld.add(3)
    server.engine.poison = 3
    server.engine.generate_error = EngineFailure("the engine failed on a prompt")
    arrived = []
    with pytest.raises(EngineFailure, match="failed on a prompt"):  # noqa: PT012
        for group in server.client.rollout_stream(PROMPTS, **SMALL):
            arrived.append(group.group_id)
            if len(arrived) == 3:
                server.engine.withheld.clear()
    assert sorted(arrived) == [0, 1, 2]


def test_what_an_engine_that_restarts_has_lost_is_asked_for_again(server: Served) -> None:
    server.engine.withheld.add(3)
    server.engine.poison = 3
    server.engine.generate_error = EngineUnavailable("restarting", retry_after=1.0)
    arrived = []

    def mend() -> None:
        eventually(lambda: not server.engine.running)
        server.engine.poison = None

    with ThreadPoolExecutor() as pool:
        for group in server.client.rollout_stream(PROMPTS, **SMALL):
            arrived.append(group.group_id)
            if len(arrived) == 3:
                server.engine.withheld.clear()
                pool.submit(mend)
    assert arrived[3:] == [3]
    assert [server.engine.begun[tuple(prompt)] for prompt in PROMPTS[:3]] == [1, 1, 1]


def test_a_bug_in_mid_stream_is_an_engine_failure(server: Served) -> None:
    server.engine.poison, server.engine.generate_error = 3, None
    with pytest.raises(EngineFailure, match="RuntimeError: poisoned"):
        list(server.client.rollout_stream(PROMPTS, **SMALL))


def test_a_group_that_the_engine_drops_is_missed(server: Served) -> None:
    server.engine.drops = 3
    for stream in (False, True):
        response = post(server.url, body(stream=stream))
        assert b"the engine dropped 1 of 4 groups" in response.content
        assert b"engine_failure" in response.content


def test_a_slow_reader_waits_alone_and_gets_everything(server: Served) -> None:
    server.engine.length = 900
    prompts = [[index, 9] for index in range(120)]
    # Far more than sockets buffer: 120 groups of 32 samples of 900 tokens, as lines of JSON.
    document = {"prompts": prompts, "stream": True, "group_size": 32, "max_tokens": 900}
    request = orjson.dumps(document | {"text": False})
    line = raw_post(server.url, request, content_type=JSON, accept=JSON)
    try:
        eventually(lambda: len(server.engine.made) == 120, 60)
        server.engine.length = 3
        for _ in range(3):
            assert len(server.client.rollout(PROMPTS, **SMALL).groups) == 4
            assert httpx.get(f"{server.url}/healthz").status_code == 200
        line.settimeout(60)
        content, ended = bytearray(), b"0\r\n\r\n"
        while not content.endswith(ended):
            received = line.recv(1 << 20)
            assert received, "the stream broke off"
            content += received
    finally:
        line.close()
    assert content.count(b'"frame":"group"') == 120
    assert content.count(b'"frame":"end"') == 1


PLAIN = orjson.dumps(body(stream=False))
STREAMED = orjson.dumps(body())


@pytest.mark.parametrize("request_body", [PLAIN, STREAMED], ids=["plain", "streamed"])
@pytest.mark.parametrize("end", ["close", "reset"])
def test_closing_the_connection_cancels_the_work(
    server: Served, request_body: bytes, end: str
) -> None:
    server.engine.withheld |= {1, 2, 3}
    line = raw_post(server.url, request_body, content_type=JSON)
    eventually(lambda: server.engine.running == 3 and len(server.engine.made) == 1)
    if end == "reset":
        hang_up(line)
    else:
        line.close()
    eventually(lambda: server.engine.running == 0)
    assert server.engine.cancelled == 3


def test_a_reader_that_hangs_up_while_it_is_behind_cancels_too(server: Served) -> None:
    server.engine.length = 900
    server.engine.withheld.add(0)
    prompts = [[index, 9] for index in range(60)]
    request = {"prompts": prompts, "stream": True, "group_size": 32, "max_tokens": 900}
    line = raw_post(server.url, orjson.dumps(request), content_type=JSON, accept=JSON)
    eventually(lambda: len(server.engine.made) == 59, 60)
    line.close()
    eventually(lambda: server.engine.running == 0)
    assert server.engine.cancelled == 1


@pytest.mark.parametrize("retries", [0, 3])
def test_leaving_the_stream_cancels_the_rest(server: Served, retries: int) -> None:
    server.engine.withheld |= {1, 2, 3}
    for group in server.client.rollout_stream(PROMPTS, retries=retries, **SMALL):
        assert group.group_id == 0
        break
    eventually(lambda: server.engine.running == 0)
    assert server.engine.cancelled == 3


@pytest.mark.parametrize("retries", [0, 3])
def test_leaving_the_asynchronous_stream_cancels_the_rest(server: Served, retries: int) -> None:
    server.engine.withheld |= {1, 2, 3}

    async def run(how: str) -> None:
        async with AsyncRolloutClient(server.url, timeout=60) as client:
            async with client.rollout_stream(PROMPTS, retries=retries, **SMALL) as stream:
                assert (await anext(stream)).group_id == 0
                if how == "cancelled":
                    waiting = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0.05)
                    waiting.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await waiting
            await asyncio.to_thread(eventually, lambda: server.engine.running == 0)

    asyncio.run(run("left"))
    assert server.engine.cancelled == 3
    asyncio.run(run("cancelled"))
    assert server.engine.cancelled == 6


def test_a_stream_that_was_never_started_asks_for_nothing(server: Served) -> None:
    server.client.rollout_stream(PROMPTS, retries=2, **SMALL).close()
    assert server.engine.begun == {}


# Deadlines

DEADLINE_S = 1.5
"""Enough for a busy machine to finish what is not held back."""


def test_a_deadline_without_partial_is_an_error(server: Served) -> None:
    server.engine.withheld |= {1, 2}
    response = post(server.url, body(stream=False, deadline_seconds=DEADLINE_S))
    assert response.status_code == 504
    error = response.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert "2 of 4 groups were not finished" in error["message"]
    eventually(lambda: server.engine.running == 0)
    assert server.engine.cancelled == 2


def test_a_deadline_in_mid_stream_is_an_error_frame(server: Served) -> None:
    server.engine.withheld |= {1, 2}
    arrived = []
    with pytest.raises(DeadlineExceeded):  # noqa: PT012
        for group in server.client.rollout_stream(PROMPTS, deadline_seconds=DEADLINE_S, **SMALL):
            arrived.append(group.group_id)
    assert sorted(arrived) == [0, 3]
    eventually(lambda: server.engine.running == 0)


def test_partial_answers_say_what_is_missing(server: Served) -> None:
    server.engine.withheld |= {1, 2}
    asked: dict[str, Any] = {"deadline_seconds": DEADLINE_S, "partial": True, **SMALL}
    rollout = server.client.rollout(PROMPTS, **asked)
    assert [group.group_id for group in rollout.groups] == [0, 3]
    assert rollout.missing == (1, 2)
    assert all(sample.finish_reason == "length" for sample in rollout.samples)
    with server.client.rollout_stream(PROMPTS, **asked) as stream:
        assert sorted(group.group_id for group in stream) == [0, 3]
    assert stream.end is not None
    assert stream.end.missing == (1, 2)
    assert stream.end.totals.groups == 2
    eventually(lambda: server.engine.running == 0)
    assert server.engine.cancelled == 4


def test_a_deadline_that_is_met_changes_nothing(server: Served) -> None:
    rollout = server.client.rollout(PROMPTS, deadline_seconds=60, partial=True, **SMALL)
    assert len(rollout.groups) == 4
    assert rollout.missing == ()
    document = post(server.url, body(stream=False, deadline_seconds=60)).json()
    assert "missing" not in document


@pytest.mark.parametrize("partial", [False, True])
def test_a_deadline_counts_the_wait_for_a_version(server: Served, partial: bool) -> None:
    with pytest.raises(DeadlineExceeded, match="had not begun"):
        server.client.rollout(
            PROMPTS, min_version=99, wait_seconds=60, deadline_seconds=0.2, partial=partial, **SMALL
        )
    assert server.engine.begun == {}


@pytest.mark.parametrize(
    ("fields", "where", "allowed"),
    [
        ({"deadline_seconds": 0}, "deadline_seconds", "greater than 0"),
        ({"deadline_seconds": -1}, "deadline_seconds", "greater than 0"),
        ({"deadline_seconds": 1e9}, "deadline_seconds", "86400"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds", "finite"),
        ({"partial": True}, "partial", "deadline_seconds"),
        ({"stream": 3}, "stream", "boolean"),
        ({"have": [4]}, "have", "0 to 3"),
        ({"have": [-1]}, "have", "0 to 3"),
        ({"have": [0], "stream": False}, "have", "set stream"),
        ({"have": ["0"]}, "have[0]", "integer"),
        ({"have": list(range(16385))}, "have", "16384"),
    ],
)
def test_what_makes_no_sense_is_refused(
    server: Served, fields: dict[str, Any], where: str, allowed: str
) -> None:
    response = post(server.url, body(**fields))
    assert response.status_code == 422
    (problem,) = response.json()["error"]["problems"]
    assert problem["where"] == where
    assert allowed in problem["allowed"]
    assert server.engine.begun == {}


def test_groups_that_the_caller_has_are_not_sampled(server: Served) -> None:
    with server.client.rollout_stream(PROMPTS, have=[1, 3], **SMALL) as stream:
        assert sorted(group.group_id for group in stream) == [0, 2]
    assert sorted(prompt[0] for prompt in server.engine.begun) == [0, 2]
    assert stream.totals.groups == 2


# vLLM itself


class LookedAtEngine(VLLMEngine):
    """vLLM itself, and a look at what its own process works on."""

    async def generate(self, *prompt: Any) -> list[Completion]:
        self._loop = asyncio.get_running_loop()
        return await super().generate(*prompt)

    def samples(self) -> int:
        """Requests that the frontend waits for: one a sample, at least."""
        return int(self._llm.output_processor.get_num_unfinished_requests())

    def is_idle(self) -> bool:
        """Whether the engine's process holds memory for no request any more."""
        reset = self._llm.reset_prefix_cache()  # refused while there is one
        return bool(asyncio.run_coroutine_threadsafe(reset, self._loop).result(PATIENCE_S))


def test_vllm_drops_what_nobody_waits_for(tiny_model: Path, tmp_path: Path) -> None:
    engines: list[LookedAtEngine] = []

    def build(settings: ServerSettings) -> LookedAtEngine:
        engines.append(LookedAtEngine(settings))
        return engines[0]

    settings = ServerSettings(model=str(tiny_model), staging_dir=tmp_path)
    long = {"prompts": [[5, 6], [7, 8]], "group_size": 24, "max_tokens": 1000, "ignore_eos": True}
    with running(settings, build) as server:
        engine = engines[0]
        for stream in (False, True):
            request = orjson.dumps({**long, "stream": stream})
            line = raw_post(server.url, request, content_type=JSON)
            eventually(lambda: engine.samples() >= 48, 60)
            eventually(lambda: not engine.is_idle(), 60)
            line.close()
            since = time.monotonic()
            eventually(engine.is_idle, 60)
            print(f"stream={stream}: idle {time.monotonic() - since:.3f} s after the line closed")
            assert engine.samples() == 0

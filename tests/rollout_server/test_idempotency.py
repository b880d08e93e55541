"""Keys: a rollout that is asked for again is the same one, however often its connection breaks."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgpack
import orjson
import pytest

from shared import exchange
from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import EngineFailure, ServerUnreachable
from shared.protocol import FRAMES, IDEMPOTENCY_HEADER, JSON, MSGPACK, Group
from tests.rollout_server.fakes import tokens_file
from tests.rollout_server.gates import CuttingProxy, Served, hang_up, raw_post, served
from tests.rollout_server.support import Weights, eventually, lazy, post, samples_run

PROMPTS = [[index, 7] for index in range(4)]
SMALL: dict[str, Any] = {"group_size": 2, "max_tokens": 3}
ALICE, BOB = "alice-token-0123456789", "bob-token-0123456789"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "DELAYS_S", (0.001,))


@pytest.fixture(scope="module")
def gated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tiny_model, tmp_path_factory.mktemp("staging")) as server:
        yield server


@pytest.fixture
def server(gated: Served) -> Iterator[Served]:
    """The module's server with nothing held and nothing counted."""
    engine = gated.engine
    engine.begun.clear()
    engine.made.clear()
    engine.cancelled, engine.poison = 0, None
    yield gated
    engine.withheld.clear()
    eventually(lambda: engine.running == 0)


def new_key() -> str:
    return uuid.uuid4().hex


def ask(server: Served, key: str, token: str | None = None, **more: Any) -> httpx.Response:
    """One plain request with a key."""
    headers = {IDEMPOTENCY_HEADER: key}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    return post(server.url, {"prompts": PROMPTS, **SMALL, **more}, headers=headers)


def ids_of(group: Group) -> list[list[int]]:
    return [sample.completion_ids.tolist() for sample in group.samples]


def assert_once(server: Served, prompts: Sequence[list[int]], groups: Sequence[Group]) -> None:
    """Every group came, once, as the engine made it, and the engine made it once."""
    assert sorted(group.group_id for group in groups) == list(range(len(prompts)))
    for group in groups:
        prompt = tuple(prompts[group.group_id])
        assert server.engine.begun[prompt] == 1
        assert server.engine.made[prompt] == [ids_of(group)]


def test_the_same_request_again_is_the_same_rollout(server: Served) -> None:
    key = new_key()
    first, second = ask(server, key), ask(server, key)
    assert first.status_code == 200
    assert first.content == second.content
    assert set(server.engine.begun.values()) == {1}
    assert ask(server, new_key()).content != first.content
    assert set(server.engine.begun.values()) == {2}


def test_two_at_once_share_the_work(server: Served) -> None:
    server.engine.withheld.add(0)
    key = new_key()
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask, server, key) for _ in range(3)]
        eventually(lambda: server.engine.running == 1 and len(server.engine.made) == 3)
        server.engine.withheld.clear()
        answers = {future.result(60).content for future in asking}
    assert len(answers) == 1
    assert set(server.engine.begun.values()) == {1}


def test_how_it_is_answered_may_differ(server: Served) -> None:
    key = new_key()
    plain = msgpack.unpackb(post_with(server, key, accept=MSGPACK).content)
    lines = post_with(server, key, stream=True, accept=JSON).content.splitlines()
    packed = post_with(server, key, stream=True, packed=True, accept=FRAMES)
    groups = [frame for line in lines if (frame := orjson.loads(line))["frame"] == "group"]
    for group in groups:
        del group["frame"]
    assert sorted(groups, key=lambda group: group["group_id"]) == plain["groups"]
    assert packed.headers["content-type"] == FRAMES
    assert set(server.engine.begun.values()) == {1}


def post_with(server: Served, key: str, *, accept: str, **more: Any) -> httpx.Response:
    request = {"prompts": PROMPTS, **SMALL, **more}
    return post(server.url, request, accept=accept, headers={IDEMPOTENCY_HEADER: key})


@pytest.mark.parametrize(
    "other", [{"max_tokens": 4}, {"prompts": PROMPTS[:3]}, {"temperature": 0.5}, {"text": False}]
)
def test_a_key_of_another_request_is_refused(server: Served, other: dict[str, Any]) -> None:
    key = new_key()
    ask(server, key)
    response = ask(server, key, **other)
    assert response.status_code == 422
    (problem,) = response.json()["error"]["problems"]
    assert (problem["where"], problem["got"]) == (IDEMPOTENCY_HEADER, repr(key))
    assert set(server.engine.begun.values()) == {1}
    assert ask(server, key).status_code == 200


@pytest.mark.parametrize(
    "key", ["short", "x" * 129, "with blank", "caf\u00e9-caf\u00e9", '"quoted!"']
)
def test_a_key_that_cannot_be_used(server: Served, key: str) -> None:
    headers = {IDEMPOTENCY_HEADER.encode(): key.encode()}
    content = msgpack.packb({"prompts": PROMPTS, **SMALL})
    for method in ("POST", "DELETE"):
        response = httpx.request(
            method,
            f"{server.url}/rollout",
            content=content if method == "POST" else None,
            headers={b"content-type": MSGPACK.encode(), b"accept": JSON.encode(), **headers},
        )
        assert response.status_code == 422
        assert response.json()["error"]["problems"][0]["where"] == IDEMPOTENCY_HEADER
    assert not server.engine.begun


def test_keys_of_different_callers_are_different(tiny_model: Path, tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, ("alice", ALICE, ["rollout"]), ("bob", BOB, ["rollout"]))
    with served(tiny_model, tmp_path, ALICE, tokens_file=tokens) as server:
        key = new_key()
        alices, bobs = ask(server, key, ALICE), ask(server, key, BOB)
        assert alices.content != bobs.content
        assert ask(server, key, ALICE).content == alices.content
        assert cancel(server, key, BOB).json() == {"cancelled": True}
        assert ask(server, key, ALICE).content == alices.content
        assert ask(server, key, BOB).content != bobs.content
        assert cancel(server, key).status_code == 401


def cancel(server: Served, key: str, token: str | None = None) -> httpx.Response:
    headers = {IDEMPOTENCY_HEADER: key}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    return httpx.delete(f"{server.url}/rollout", headers=headers)


def test_cancelling_by_key(server: Served) -> None:
    server.engine.withheld |= {0, 1}
    key = new_key()
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask, server, key)
        eventually(lambda: len(server.engine.made) == 2)
        assert cancel(server, key).json() == {"cancelled": True}
        assert asking.result(60).status_code == 409
    eventually(lambda: server.engine.running == 0)
    assert server.engine.cancelled == 2
    assert cancel(server, key).json() == {"cancelled": False}
    response = httpx.delete(f"{server.url}/rollout")
    assert response.status_code == 422


def test_work_with_a_key_outlives_its_connection(server: Served) -> None:
    server.engine.withheld.add(0)
    key = new_key()
    request = orjson.dumps({"prompts": PROMPTS, **SMALL})
    hang_up_amid(server, request, key)
    server.engine.withheld.clear()
    eventually(lambda: len(server.engine.made) == 4)
    answer = ask(server, key)
    assert answer.status_code == 200
    assert server.engine.cancelled == 0
    assert set(server.engine.begun.values()) == {1}


def hang_up_amid(server: Served, request: bytes, key: str) -> None:
    """A request that the engine has begun with, and a connection that breaks."""
    before = sum(server.engine.begun.values())
    line = raw_post(server.url, request, content_type=JSON, idempotency_key=key)
    eventually(lambda: sum(server.engine.begun.values()) == before + 4)
    hang_up(line)


def test_nobody_comes_back_in_time(tiny_model: Path, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, grace_seconds=0.1) as server:
        server.engine.withheld.add(0)
        hang_up_amid(server, orjson.dumps({"prompts": PROMPTS, **SMALL}), new_key())
        eventually(lambda: server.engine.cancelled == 1)
        assert server.engine.running == 0


def test_what_is_finished_is_kept_for_a_while(tiny_model: Path, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, kept_seconds=0.1) as server:
        key = new_key()
        first = ask(server, key).content
        eventually(lambda: ask_after_a_pause(server, key) != first)


def ask_after_a_pause(server: Served, key: str) -> bytes:
    # To ask is to keep it for another while.
    time.sleep(0.3)
    return ask(server, key).content


def test_what_is_finished_is_kept_within_bounds(tiny_model: Path, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, kept_mib=1) as server:
        keys = [new_key() for _ in range(6)]
        many: dict[str, Any] = {"group_size": 16, "max_tokens": 500, "text": False}
        answers = {key: ask(server, key, **many).content for key in keys}  # 0.25 MiB and more each
        assert ask(server, keys[-1], **many).content == answers[keys[-1]]
        assert ask(server, keys[-2], **many).content == answers[keys[-2]]
        assert ask(server, keys[0], **many).content != answers[keys[0]]


def test_a_rollout_that_failed_runs_again(server: Served) -> None:
    server.engine.poison, server.engine.generate_error = 2, EngineFailure("no")
    key = new_key()
    assert ask(server, key).status_code == 500
    server.engine.poison = None
    assert ask(server, key).status_code == 200
    assert server.engine.begun[(2, 7)] == 2


def test_groups_of_a_key_keep_their_version(server: Served, base: Weights) -> None:
    key = new_key()
    first = ask(server, key)
    version = server.client.reload(lazy(base.tensors)).version
    assert ask(server, key).content == first.content
    made = {s["version"] for g in ask(server, new_key()).json()["groups"] for s in g["samples"]}
    assert made == {version}
    assert {s["version"] for g in first.json()["groups"] for s in g["samples"]} == {version - 1}


def test_a_stream_goes_on_with_what_is_lacking(server: Served) -> None:
    server.engine.withheld |= {1, 3}
    key = new_key()
    request = {"prompts": PROMPTS, "stream": True, **SMALL}
    hang_up_amid(server, orjson.dumps(request), key)
    server.engine.withheld.clear()
    lines = post_with(server, key, stream=True, have=[0, 2], accept=JSON).content.splitlines()
    *groups, end = [f for line in lines if (f := orjson.loads(line))["frame"] != "keepalive"]
    assert sorted(group["group_id"] for group in groups) == [1, 3]
    assert end["totals"]["groups"] == 2
    assert set(server.engine.begun.values()) == {1}


def test_a_server_that_forgot_the_key_samples_only_what_is_lacking(server: Served) -> None:
    key = new_key()
    post_with(server, key, stream=True, have=[0, 2], accept=JSON)
    assert sorted(prompt[0] for prompt in server.engine.begun) == [1, 3]
    # Whoever lacks more than that has another rollout in mind.
    response = post_with(server, key, stream=True, have=[0], accept=JSON)
    assert response.status_code == 409
    assert "group 2" in response.json()["error"]["message"]


def test_whatever_a_request_may_hold_has_a_fingerprint(server: Served) -> None:
    key = new_key()
    odd: dict[str, Any] = {"chat_template_kwargs": {"a": b"\xff\xfe", "b": [None, 2**63, 1e300]}}
    assert ask(server, key, **odd).status_code == 200
    assert ask(server, key, **odd).status_code == 200
    assert ask(server, key, chat_template_kwargs={"a": b"\xff"}).status_code == 422
    assert set(server.engine.begun.values()) == {1}


# Random cuts

MANY = [[index, 11] for index in range(40)]


@pytest.mark.parametrize("flavour", ["blocking", "asynchronous"])
def test_a_stream_survives_two_hundred_cuts(server: Served, flavour: str) -> None:
    proxy = CuttingProxy(server.url, seed=1, most_bytes=3000, most_cuts=200)
    streams = 0
    while proxy.cuts < proxy.most_cuts:
        server.engine.begun.clear()
        server.engine.made.clear()
        held = [[*prompt, random.randrange(256), streams] for prompt in MANY]
        groups = STREAMED[flavour](proxy.url, held)
        assert_once(server, held, groups)
        streams += 1
    assert proxy.cuts == 200
    proxy.close()


def all_groups(url: str, prompts: list[list[int]]) -> list[Group]:
    with RolloutClient(url, timeout=60) as client:
        stream = client.rollout_stream(prompts, retries=50, group_size=2, max_tokens=20)
        groups = list(stream)
    assert stream.end is not None
    assert stream.end.totals.groups == len(groups)
    assert stream.end.totals.completion_tokens == len(groups) * 40
    return groups


def all_groups_async(url: str, prompts: list[list[int]]) -> list[Group]:
    async def run() -> list[Group]:
        async with (
            AsyncRolloutClient(url, timeout=60) as client,
            client.rollout_stream(prompts, retries=50, group_size=2, max_tokens=20) as stream,
        ):
            return [group async for group in stream]

    return asyncio.run(run())


STREAMED = {"blocking": all_groups, "asynchronous": all_groups_async}


@pytest.mark.parametrize("flavour", ["blocking", "asynchronous"])
def test_a_plain_rollout_survives_cuts(server: Served, flavour: str) -> None:
    proxy = CuttingProxy(server.url, seed=2, most_bytes=20_000, most_cuts=30)
    number = 0
    while proxy.cuts < proxy.most_cuts:
        prompts = [[*prompt, number] for prompt in MANY]
        rollout = PLAIN[flavour](proxy.url, prompts)
        assert_once(server, prompts, rollout.groups)
        number += 1
    proxy.close()


def whole(url: str, prompts: list[list[int]]) -> Any:
    with RolloutClient(url, timeout=60) as client:
        return client.rollout(prompts, retries=50, group_size=2, max_tokens=20)


def whole_async(url: str, prompts: list[list[int]]) -> Any:
    async def run() -> Any:
        async with AsyncRolloutClient(url, timeout=60) as client:
            return await client.rollout(prompts, retries=50, group_size=2, max_tokens=20)

    return asyncio.run(run())


PLAIN = {"blocking": whole, "asynchronous": whole_async}


def test_without_retries_a_cut_is_an_error(server: Served) -> None:
    proxy = CuttingProxy(server.url, seed=3, most_bytes=1, most_cuts=1000, chance=1.0)
    with RolloutClient(proxy.url, timeout=60) as client:
        with pytest.raises(ServerUnreachable):
            list(client.rollout_stream(MANY, **SMALL))
        with pytest.raises(ServerUnreachable):
            client.rollout(MANY, **SMALL)
        with pytest.raises(ServerUnreachable):
            list(client.rollout_stream(MANY, retries=4, **SMALL))
    proxy.close()
    eventually(lambda: server.engine.running == 0)


def test_vllm_samples_each_group_once_however_often_the_line_is_cut(server_url: str) -> None:
    proxy = CuttingProxy(server_url, seed=4, most_bytes=4000, most_cuts=12)
    before = samples_run(server_url)
    prompts = [[5, 6, index] for index in range(32)]
    with RolloutClient(proxy.url, timeout=120) as client:
        stream = client.rollout_stream(
            prompts, retries=50, group_size=2, max_tokens=32, ignore_eos=True
        )
        groups = list(stream)
    proxy.close()
    assert proxy.cuts > 0
    assert sorted(group.group_id for group in groups) == list(range(32))
    assert [len(group.samples) for group in groups] == [2] * 32
    assert samples_run(server_url) - before == 64
    for group in groups:
        assert group.prompt_ids.tolist() == prompts[group.group_id]

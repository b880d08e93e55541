"""``/score``: given token ids as the live policy sees them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollout_server.app import create_app
from rollout_server.settings import ServerSettings
from shared.client import AsyncRolloutClient, RolloutClient
from shared.codec import decode
from shared.errors import InvalidRequest, NotFound, Overloaded
from shared.protocol import JSON, MSGPACK, Score
from tests.rollout_server.support import (
    FakeEngine,
    Weights,
    assert_agree,
    eventually,
    lazy,
    make_live,
    serving,
)

PROMPTS = [[5, 6, 7], [8] * 40, [9]]


def test_it_agrees_with_a_forward_pass_and_with_the_sampler(
    client: RolloutClient, first: Weights, live: Weights
) -> None:
    rollout = client.rollout(PROMPTS, group_size=2, max_tokens=60, ignore_eos=True)
    samples = rollout.samples
    scores = client.score(
        [sample.prompt_ids for sample in samples], [sample.completion_ids for sample in samples]
    )
    info = client.info()
    for sample, score in zip(samples, scores, strict=True):
        assert (score.version, score.digest) == (info.version, info.digest)
        assert score.logprobs.dtype == np.float32
        assert score.logprobs.shape == sample.completion_ids.shape
        expected = live.logprobs(sample.prompt_ids.tolist(), sample.completion_ids.tolist())
        assert_agree(score.logprobs, expected)
        assert_agree(score.logprobs, sample.logprobs)
    assert live is first


def test_nothing_of_it_is_cached_wrongly(client: RolloutClient, live: Weights) -> None:
    # The beginning was sampled before, so its keys and values are there, but no log-probabilities.
    ids = client.rollout([[5] * 100], group_size=1, max_tokens=40, ignore_eos=True).samples[0]
    sequence = [*ids.prompt_ids.tolist(), *ids.completion_ids.tolist()]
    for begin in (1, 50, 139, 140):
        (score,) = client.score([sequence[:begin]], [sequence[begin:]])
        if begin == len(sequence):
            assert score.logprobs.shape == (0,)
        else:
            assert_agree(score.logprobs, live.logprobs(sequence[:begin], sequence[begin:]))


def test_every_score_is_that_of_the_weights_it_names(
    client: RolloutClient, server_url: str, first: Weights, second: Weights
) -> None:
    make_live(client, first)
    by_digest = {weights.digest: weights for weights in (first, second)}
    prompt, completion = [5, 6, 7], [(7 * index) % 256 for index in range(300)]
    expected = {digest: w.logprobs(prompt, completion) for digest, w in by_digest.items()}
    stop, scores = threading.Event(), list[Score]()

    def score_on() -> None:
        with RolloutClient(server_url, timeout=120) as own:
            while not stop.is_set():
                scores.extend(own.score([prompt] * 4, [completion] * 4))

    def is_scored(digest: str, before: int) -> bool:
        return any(score.digest == digest for score in scores[before:])

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(score_on) for _ in range(3)]
        for index in range(8):
            before, weights = len(scores), (second, first)[index % 2]
            client.reload(lazy(weights.tensors))
            eventually(partial(is_scored, weights.digest, before), 60)
        stop.set()
        for future in futures:
            future.result(120)
    assert {score.digest for score in scores} == by_digest.keys()
    for score in scores:
        assert_agree(score.logprobs, expected[score.digest])


@pytest.mark.usefixtures("live")
def test_in_every_form(server_url: str, client: RolloutClient) -> None:
    asked = {"sequences": [{"token_ids": [5, 6, 7, 8], "completion_from": 2}]}
    (score,) = client.score([[5, 6]], [[7, 8]])
    for packed, accept in ((False, JSON), (False, MSGPACK), (True, MSGPACK)):
        answer = httpx.post(
            f"{server_url}/score",
            json={**asked, "packed": packed},
            headers={"accept": accept},
            timeout=60,
        )
        assert answer.headers["content-type"] == accept
        document = decode(answer.content, accept)
        assert document["policy"] == "default"
        (entry,) = document["scores"]
        assert (entry["version"], entry["digest"]) == (score.version, score.digest)
        values = entry["logprobs"]
        got = np.frombuffer(values, "<f4") if packed else np.array(values, np.float32)
        assert_agree(got, score.logprobs)


@pytest.mark.parametrize(
    ("sequence", "where"),
    [
        ({"token_ids": [5], "completion_from": 1}, "sequences[0].token_ids"),
        ({"token_ids": [5] * 1024, "completion_from": 1}, "sequences[0].token_ids"),
        ({"token_ids": [5, 288], "completion_from": 1}, "sequences[0].token_ids[1]"),
        ({"token_ids": [5, -1], "completion_from": 1}, "sequences[0].token_ids[1]"),
        ({"token_ids": [5, 6], "completion_from": 0}, "sequences[0].completion_from"),
        ({"token_ids": [5, 6], "completion_from": 3}, "sequences[0].completion_from"),
        ({"token_ids": [5, 6]}, "sequences[0].completion_from"),
        ([5, 6], "sequences[0]"),
        ("12+7=", "sequences[0]"),
    ],
)
def test_bad_sequences(server_url: str, sequence: Any, where: str) -> None:
    answer = httpx.post(f"{server_url}/score", json={"sequences": [sequence]}, timeout=60)
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["error"]["problems"]
    assert problem["where"] == where
    assert problem["allowed"]


def test_bad_requests(server_url: str, client: RolloutClient) -> None:
    one: dict[str, Any] = {"sequences": [{"token_ids": [5, 6], "completion_from": 1}]}
    bodies: list[Any] = [{}, {"sequences": []}, {**one, "group_size": 2}, {**one, "policy": "a b"}]
    for body in bodies:
        assert httpx.post(f"{server_url}/score", json=body, timeout=60).status_code == 422
    packed = httpx.post(
        f"{server_url}/score", json={**one, "packed": True}, headers={"accept": JSON}, timeout=60
    )
    assert packed.status_code == 422
    with pytest.raises(NotFound, match="nobody"):
        client.score([[5]], [[6]], policy="nobody")
    with pytest.raises(InvalidRequest):
        client.score([[5]], [[]])


def settings(model: Path, staging: Path, **more: Any) -> ServerSettings:
    return ServerSettings(model=str(model), staging_dir=staging, **more)


def test_the_asynchronous_client(tiny_model: Path, tmp_path: Path) -> None:
    async def score(url: str) -> list[Score]:
        async with AsyncRolloutClient(url) as client:
            return await client.score([[5, 6]], [[7, 8]])

    app = create_app(settings(tiny_model, tmp_path), build_engine=lambda _: FakeEngine())
    with serving(app) as url, RolloutClient(url) as client:
        client.wait_ready(30)
        assert asyncio.run(score(url))[0].logprobs.tolist() == [-7.0, -8.0]


def test_it_waits_in_the_queue_and_leaves_it(tiny_model: Path, tmp_path: Path) -> None:
    engine = FakeEngine()
    app = create_app(
        settings(tiny_model, tmp_path, max_num_seqs=2, max_queued_samples=4),
        build_engine=lambda _: engine,
    )
    with serving(app) as url, RolloutClient(url, timeout=60) as client:
        client.wait_ready(30)
        with pytest.raises((Overloaded, InvalidRequest), match="samples"):
            client.score([[5]] * 500, [[6]] * 500)
        engine.gate.clear()
        body = {"sequences": [{"token_ids": [5, 6], "completion_from": 1}] * 3}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/score", json=body, timeout=0.5)
        eventually(lambda: app.state.startup.service.admission.running_samples == 0)
        assert app.state.startup.service.admission.queued.samples == 0
        engine.gate.set()
        assert client.score([[5]], [[6]])[0].logprobs.tolist() == [-6.0]

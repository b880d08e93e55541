"""vLLM's OpenAI-compatible routes on our engine: one client we did not write, and plain HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from transformers import PreTrainedTokenizerFast

from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.protocol import DIGEST_HEADER
from tests.conftest import StartServer
from tests.rollout_server.engines import (
    LONG_PROMPT,
    PATIENCE_S,
    Running,
    engine_processes,
    greedy,
    requests_in_flight,
    running,
    server_process,
)
from tests.rollout_server.fakes import ask, error_of, idle_app, tokens_file
from tests.rollout_server.support import (
    FakeEngine,
    Weights,
    assert_agree,
    eventually,
    lazy,
    make_live,
)
from tests.rollout_server.test_lora import Lora, deleted, lora, publish

ALICE, GUEST = (f"{name}-token-0123456789" for name in ("alice", "guest"))
ROUTES = {
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/inference/v1/generate"),
}
MESSAGES: Any = [{"role": "user", "content": "12+7=?"}]


@pytest.fixture
def idle(tmp_path: Path) -> FastAPI:
    """An application whose engine never starts."""
    callers = [("alice", ALICE, ["rollout"]), ("guest", GUEST, [])]
    return idle_app(tokens_file=tokens_file(tmp_path, *callers), max_body_mib=1)


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server with vLLM that takes LoRA policies."""
    flags = ["--model", str(tiny_model), "--max-loras", "2"]
    with (
        start_server(*flags, "--staging-dir", str(tmp_path_factory.mktemp("staging"))) as url,
        RolloutClient(url, timeout=PATIENCE_S) as client,
    ):
        yield Running(url, client)


@pytest.fixture
def adapter(server: Running, base: Weights) -> Iterator[Lora]:
    """Weights of a LoRA policy ``small`` on the base."""
    make_live(server.client, base)
    adapter = lora(base, 5)
    publish(server.client, "small", adapter)
    yield adapter
    eventually(lambda: deleted(server.client, "small"), 60)


@pytest.fixture(scope="module")
def gpt(server: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that server."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def paths(app: FastAPI) -> set[tuple[str, str]]:
    return {(m, r.path) for r in app.routes if isinstance(r, APIRoute) for m in r.methods}


def complete(server: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)


def test_only_the_intended_routes_of_vllm_are_there(idle: FastAPI) -> None:
    without = idle_app(openai_routes=False)
    assert paths(idle) - paths(without) == ROUTES
    for path in ("/v1/completions", "/health"):
        assert ask(without, "POST", path, token=ALICE).status_code == 404
    for path in (
        "/collective_rpc", "/abort_requests", "/inference/v1/abort_requests", "/scale_elastic_ep",
        "/v1/chat/completions/batch", "/v1/load_lora_adapter", "/v1/responses", "/v1/messages",
        "/start_profile", "/invocations", "/reset_mm_cache", "/update_weight_version",
    ):  # fmt: skip
        assert ask(idle, "POST", path, token=ALICE, json={}).status_code == 404, path


@pytest.mark.parametrize(("method", "path"), sorted(ROUTES - {("GET", "/health")}))
def test_errors_before_vllm_have_openais_shape(idle: FastAPI, method: str, path: str) -> None:
    stranger = ask(idle, method, path)
    assert stranger.status_code == 401
    assert stranger.headers["www-authenticate"] == "Bearer"
    assert error_of(stranger)["type"] == "authentication_error"
    guest = ask(idle, method, path, token=GUEST)
    assert guest.status_code == (403 if method == "POST" else 503)
    early = ask(idle, method, path, token=ALICE, json={})
    assert early.status_code == 503
    assert int(early.headers["retry-after"]) >= 1
    error = error_of(early)
    assert error["type"] == "api_error"
    assert error["message"] == "the engine is starting"
    assert "param" in error


def test_an_engine_that_is_not_vllm_has_no_such_routes(tiny_model: Path, tmp_path: Path) -> None:
    settings = ServerSettings(model=str(tiny_model), staging_dir=tmp_path, dtype="bfloat16")
    with running(settings, lambda _: FakeEngine()) as fake:
        answer = httpx.post(f"{fake.url}/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 404
        assert "OpenAI" in error_of(answer)["message"]
        assert httpx.get(f"{fake.url}/health").status_code == 200


def test_they_queue_with_rollouts(tiny_model: Path, tmp_path: Path) -> None:
    engine = FakeEngine()
    settings = ServerSettings(
        model=str(tiny_model), staging_dir=tmp_path, max_running_samples=1, max_queued_samples=2
    )
    body = {"prompt": "x", "n": 2}
    with running(settings, lambda _: engine) as fake, ThreadPoolExecutor(2) as pool:
        engine.gate.clear()  # the server has tried it by now
        try:
            rollouts = [
                pool.submit(fake.client.rollout, [[5]], group_size=1, max_tokens=2)
                for _ in range(2)
            ]
            eventually(lambda: 'tito_queued{unit="samples"} 1.0' in metrics(fake))
            full = httpx.post(f"{fake.url}/v1/completions", json=body)
            assert full.status_code == 429
            assert int(full.headers["retry-after"]) >= 1
            assert error_of(full)["type"] == "rate_limit_error"
            never = httpx.post(f"{fake.url}/v1/completions", json={**body, "n": 3})
            assert never.status_code == 422
            # To tokenize takes no turn, and comes as far as this engine, which is not vLLM.
            tokens = httpx.post(f"{fake.url}/tokenize", json={"prompt": "x"})
            assert tokens.status_code == 404
        finally:
            engine.gate.set()
        for rollout in rollouts:
            rollout.result(PATIENCE_S)
        assert httpx.post(f"{fake.url}/v1/completions", json=body).status_code == 404
        assert 'tito_queued{unit="samples"} 0.0' in metrics(fake)


def metrics(server: Running) -> str:
    return httpx.get(f"{server.url}/metrics").text


@pytest.mark.usefixtures("adapter")
def test_models_are_the_policies(gpt: openai.OpenAI, tiny_model: Path) -> None:
    names = [model.id for model in gpt.models.list()]
    assert names == [str(tiny_model), "default", "small"]


def test_completions_are_what_rollout_gives(
    gpt: openai.OpenAI, server: Running, base: Weights, tiny_model: Path
) -> None:
    make_live(server.client, base)
    for name in (str(tiny_model), "default"):
        answer = gpt.completions.create(
            model=name, prompt=[LONG_PROMPT, [5, 6, 7]], max_tokens=10, logprobs=0,
            temperature=0, extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        choice: Any = answer.choices[0]
        assert choice.token_ids == greedy(server.client)
        assert choice.prompt_token_ids == LONG_PROMPT
        assert len(answer.choices) == 2
    sampled: Any = gpt.completions.create(
        model="default", prompt=LONG_PROMPT, max_tokens=30, logprobs=0, n=3, temperature=0.7,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    for choice in sampled.choices:
        logprobs = np.array(choice.logprobs.token_logprobs, np.float32)
        assert_agree(logprobs, base.logprobs(LONG_PROMPT, choice.token_ids, 0.7))


def test_chat_streams_what_it_answers_whole(gpt: openai.OpenAI) -> None:
    asked: Any = {
        "model": "default", "messages": MESSAGES, "max_tokens": 20, "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = gpt.chat.completions.create(**asked)
    stream = gpt.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 2
    assert "".join(pieces) == whole.choices[0].message.content


def test_text_and_ids_by_vllms_tokenizer(
    server: Running, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "12+7=19"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert ids == tokenizer.encode(text)
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": ids})
    assert back.json()["prompt"] == text


def test_ids_in_ids_out(server: Running) -> None:
    body = {
        "token_ids": LONG_PROMPT,
        "sampling_params": {"max_tokens": 10, "temperature": 0, "ignore_eos": True, "logprobs": 0},
    }
    answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=PATIENCE_S)
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == greedy(server.client)
    assert [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"]] == [
        (str(server.client.info().version), 0, 10)
    ]


@pytest.mark.usefixtures("adapter")
def test_answers_say_which_policy_made_them(server: Running) -> None:
    for name in ("default", "small"):
        known = httpx.get(f"{server.url}/policies/{name}").json()
        answer = complete(server, model=name, prompt=[5, 6], max_tokens=2)
        assert answer.headers["x-tito-version"] == str(known["version"])
        assert answer.headers[DIGEST_HEADER] == known["digest"]
        assert "x-tito-end-version" not in answer.headers


def test_a_lora_policy_is_a_model(gpt: openai.OpenAI, base: Weights, adapter: Lora) -> None:
    answer: Any = gpt.completions.create(
        model="small", prompt=LONG_PROMPT, max_tokens=30, logprobs=0, temperature=1,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert answer.model == "small"
    (choice,) = answer.choices
    logprobs = np.array(choice.logprobs.token_logprobs, np.float32)
    assert_agree(logprobs, adapter.onto(base).logprobs(LONG_PROMPT, choice.token_ids))
    with pytest.raises(openai.NotFoundError, match="nobody"):
        gpt.completions.create(model="nobody", prompt="x")


def test_what_is_wrong_is_refused_in_openais_shape(server: Running) -> None:
    def send(path: str, **request: Any) -> httpx.Response:
        return httpx.post(f"{server.url}{path}", timeout=PATIENCE_S, **request)

    json_type = {"content-type": "application/json"}
    for answer, status in (
        (send("/v1/completions", content=b"{", headers=json_type), 400),
        (send("/v1/completions", content=b"[" * 100_000, headers=json_type), 400),
        (send("/v1/completions", json=[1]), 400),
        (send("/v1/completions", json={"prompt": "x", "n": 10**9}), 422),
        (send("/v1/completions", json={"prompt": [10**9]}), 400),
        (send("/v1/completions", json={"prompt": [1] * 5000}), 400),
        (send("/v1/chat/completions", json={"messages": 7}), 400),
        (send("/inference/v1/generate", json={"token_ids": "x"}), 400),
        (send("/detokenize", json={"tokens": [-1]}), 400),
    ):
        assert answer.status_code == status, answer.text
        assert set(error_of(answer)) >= {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_who_hangs_up_cancels_the_work(server: Running) -> None:
    body = {"prompt": LONG_PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 4}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()  # closes the stream when it is collected
        assert next(lines).startswith("data: {"), stream.status_code
        assert requests_in_flight(server.url) >= 2
    eventually(lambda: requests_in_flight(server.url) == 1, seconds=30)


def test_a_stream_says_that_the_weights_changed(
    server: Running, base: Weights, first: Weights
) -> None:
    version = make_live(server.client, base)
    body = {"prompt": LONG_PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        published = server.client.reload(lazy(first.tensors))
        rest = list(lines)
    assert stream.headers["x-tito-version"] == str(version)
    assert stream.headers[DIGEST_HEADER] == base.digest
    assert f": x-tito-end-version: {published.version}" in rest
    assert f": x-tito-end-digest: {published.digest}" in rest
    assert [line for line in rest if line][-1] == "data: [DONE]"


def test_when_the_engine_died_its_successor_answers(server: Running, first: Weights) -> None:
    version = make_live(server.client, first)
    body = {"prompt": LONG_PROMPT, "max_tokens": 900, "ignore_eos": True, "n": 4}
    with ThreadPoolExecutor(1) as pool:
        doomed = pool.submit(complete, server, **body)
        eventually(lambda: requests_in_flight(server.url) >= 2 or doomed.done(), 60)
        engine_processes(server_process(server.url))["core"].kill()
        answer = doomed.result(PATIENCE_S)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert error_of(answer)["type"] == "api_error"
    server.client.wait_ready(PATIENCE_S)
    again = complete(
        server, prompt=LONG_PROMPT, max_tokens=10, temperature=0, ignore_eos=True,
        return_token_ids=True,
    )  # fmt: skip
    assert again.headers["x-tito-version"] == str(version)
    assert again.json()["choices"][0]["token_ids"] == first.greedy(LONG_PROMPT, 10)

"""Rollouts over a real socket from a real engine: shapes, ids, labels and log-probabilities."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import Any

import httpx
import msgpack
import numpy as np
import orjson
import pytest
from transformers import PreTrainedTokenizerFast

from shared.calls import PromptLike
from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import InvalidRequest
from shared.protocol import IDEMPOTENCY_HEADER, JSON, MSGPACK, Sample
from shared.requests import SamplingSettings
from shared.tokens import tokenizer_fingerprint
from tests.rollout_server.support import (
    BF16_MEAN_NATS,
    Weights,
    assert_agree,
    distance,
    make_live,
    post,
)

CHAT = [{"role": "user", "content": "12+7=?"}]
GREEDY: dict[str, Any] = {"purpose": "eval", "temperature": 0.0, "group_size": 1}


def chat_ids(tokenizer: PreTrainedTokenizerFast, messages: Any, **template: Any) -> list[int]:
    ids: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template
    )
    return [int(token) for token in ids]


def test_groups_come_in_prompt_order_with_every_sample(client: RolloutClient) -> None:
    prompts = [[index + 1] * (index % 7 + 1) for index in range(20)]
    rollout = client.rollout(prompts, group_size=3, max_tokens=4)
    assert [group.group_id for group in rollout.groups] == list(range(20))
    assert [group.prompt_ids.tolist() for group in rollout.groups] == prompts
    assert [len(group.samples) for group in rollout.groups] == [3] * 20
    assert [sample.group_id for sample in rollout.samples] == [i for i in range(20) for _ in "abc"]
    for sample in rollout.samples:
        assert sample.prompt_ids.tolist() == prompts[sample.group_id]


def test_defaults_are_those_of_the_issue(client: RolloutClient) -> None:
    rollout = client.rollout([[5, 6]], max_tokens=2)
    assert len(rollout.samples) == 8
    fields = SamplingSettings()
    assert (fields.max_tokens, fields.temperature, fields.top_p) == (512, 1.0, 1.0)


def test_ids_are_carried_through_untouched(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    # Every id, specials and those that no token has, and an order that no encoder would produce.
    everything = list(range(client.info().vocab_size))
    backwards = tokenizer.encode("assistant")[::-1]
    specials = [tokenizer.eos_token_id, tokenizer.pad_token_id] * 2
    prompts = [everything, backwards, specials, [0]]
    rollout = client.rollout(prompts, group_size=1, max_tokens=1)
    assert [group.prompt_ids.tolist() for group in rollout.groups] == prompts
    assert all(group.prompt_ids.dtype == np.int32 for group in rollout.groups)


@pytest.mark.parametrize(
    "messages",
    [
        CHAT,
        [{"role": "system", "content": "Be brief."}, *CHAT],
        [*CHAT, {"role": "assistant", "content": "19"}, {"role": "user", "content": "and 2+2?"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "<|im_end|> \u00e9\U0001f600\n\t"}],
    ],
)
def test_chat_prompts_are_rendered_by_the_template(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]
) -> None:
    rollout = client.rollout([messages], group_size=1, max_tokens=1)
    assert rollout.groups[0].prompt_ids.tolist() == chat_ids(tokenizer, messages)


def test_the_three_forms_may_be_mixed(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    array: Any = np.array([9, 8], np.int64)
    prompts: list[PromptLike] = ["12+7=", CHAT, [5, 6, 7], "\u00e9", array]
    rollout = client.rollout(prompts, group_size=2, max_tokens=3)
    expected = [tokenizer.encode("12+7="), chat_ids(tokenizer, CHAT), [5, 6, 7]]
    expected += [tokenizer.encode("\u00e9"), [9, 8]]
    assert [group.prompt_ids.tolist() for group in rollout.groups] == expected


def test_answers_within_a_group_differ(client: RolloutClient) -> None:
    rollout = client.rollout([CHAT], group_size=8, max_tokens=48, ignore_eos=True)
    answers = {tuple(sample.completion_ids.tolist()) for sample in rollout.samples}
    assert len(answers) == 8


def test_the_same_request_twice_differs(client: RolloutClient) -> None:
    twice = [client.rollout([CHAT], group_size=2, max_tokens=32, ignore_eos=True) for _ in "ab"]
    answers = {tuple(s.completion_ids.tolist()) for rollout in twice for s in rollout.samples}
    assert len(answers) == 4


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_the_sampled_distribution(
    client: RolloutClient, live: Weights, temperature: float
) -> None:
    rollout = client.rollout(
        [CHAT, "7-5=", [1, 2, 3]],
        group_size=3,
        max_tokens=40,
        temperature=temperature,
        ignore_eos=True,
    )
    other = 0.7 if temperature == 1.0 else 1.0
    wrong = []
    for sample in rollout.samples:
        ids = sample.prompt_ids.tolist(), sample.completion_ids.tolist()
        expected = live.logprobs(*ids, temperature)
        assert_agree(sample.logprobs, expected)
        wrong.append(distance(sample.logprobs, live.logprobs(*ids, other)))
    # Had the other temperature been applied, the same comparison would have failed.
    assert np.mean(wrong) > 3 * BF16_MEAN_NATS


def test_every_token_has_one_finite_logprob(client: RolloutClient) -> None:
    info = client.info()
    rollout = client.rollout([[5], CHAT], group_size=16, max_tokens=64, temperature=1.9)
    for sample in rollout.samples:
        assert sample.completion_ids.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert sample.logprobs.shape == sample.completion_ids.shape
        assert len(sample.completion_ids) >= 1
        assert np.isfinite(sample.logprobs).all()
        assert (sample.logprobs <= 0).all()
        assert sample.completion_ids.min() >= 0
        assert sample.completion_ids.max() < info.vocab_size


def test_samples_bear_the_live_version(client: RolloutClient) -> None:
    info = client.info()
    for sample in client.rollout([[5]], group_size=4, max_tokens=5).samples:
        assert (sample.version, sample.digest) == (info.version, info.digest)
        (span,) = sample.spans
        assert (span.version, span.digest) == (info.version, info.digest)
        assert (span.start, span.end) == (0, len(sample.completion_ids))


def stopped(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.finish_reason == "stop"]


def test_the_stop_token_is_kept_with_its_logprob(
    client: RolloutClient, base: Weights, tokenizer: PreTrainedTokenizerFast
) -> None:
    make_live(client, base)
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}  # as generation_config.json has them
    rollout = client.rollout([CHAT], group_size=64, max_tokens=200)
    assert stopped(rollout.samples), "none of the samples ended; the test needs another policy"
    for sample in rollout.samples:
        inside = set(sample.completion_ids.tolist()[:-1])
        assert not inside & ends
        ended = int(sample.completion_ids[-1]) in ends
        assert ended == (sample.finish_reason == "stop")
    sample = stopped(rollout.samples)[0]
    ids = sample.prompt_ids.tolist(), sample.completion_ids.tolist()
    assert_agree(sample.logprobs, base.logprobs(*ids))


def test_truncated_samples_say_length(client: RolloutClient) -> None:
    rollout = client.rollout([CHAT], group_size=4, max_tokens=7, ignore_eos=True)
    assert [sample.finish_reason for sample in rollout.samples] == ["length"] * 4
    assert [len(sample.completion_ids) for sample in rollout.samples] == [7] * 4


def test_the_context_truncates_too(client: RolloutClient) -> None:
    context = client.info().limits["max_model_len"]
    rollout = client.rollout(
        [[5] * (context - 3)], group_size=2, max_tokens=50, ignore_eos=True, text=False
    )
    for sample in rollout.samples:
        assert sample.finish_reason == "length"
        assert len(sample.prompt_ids) + len(sample.completion_ids) == context


def test_a_prompt_may_leave_room_for_one_token_alone(client: RolloutClient) -> None:
    context = client.info().limits["max_model_len"]
    rollout = client.rollout([[5] * (context - 1)], group_size=1, max_tokens=5)
    assert len(rollout.samples[0].completion_ids) == 1


def test_stop_token_ids_end_a_completion_and_stay_in_it(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    stops = set(range(0, 240, 8))
    rollout = client.rollout([CHAT], group_size=16, max_tokens=200, stop_token_ids=sorted(stops))
    assert len(stopped(rollout.samples)) == 16
    last = {int(sample.completion_ids[-1]) for sample in rollout.samples}
    assert last & stops
    assert last <= stops | {tokenizer.eos_token_id, tokenizer.pad_token_id}
    for sample in rollout.samples:
        assert not set(sample.completion_ids.tolist()[:-1]) & stops


@pytest.mark.usefixtures("live")
def test_stop_strings_end_a_completion(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    letters = [chr(code) for code in range(ord("a"), ord("p"))]
    rollout = client.rollout([CHAT], group_size=16, max_tokens=200, stop=letters, ignore_eos=True)
    found = stopped(rollout.samples)
    assert found
    for sample in found:
        ids = sample.completion_ids.tolist()
        assert set(tokenizer.decode(ids)) & set(letters)
        assert not set(tokenizer.decode(ids[:-1], skip_special_tokens=True)) & set(letters)
        assert len(sample.logprobs) == len(sample.completion_ids)


def test_a_special_token_may_be_a_stop_string(
    client: RolloutClient, base: Weights, tokenizer: PreTrainedTokenizerFast
) -> None:
    make_live(client, base)
    end = tokenizer.eos_token
    asked: dict[str, Any] = {"group_size": 64, "max_tokens": 200, "ignore_eos": True}
    rollout = client.rollout([CHAT], stop=[end], **asked)
    assert stopped(rollout.samples), "none of the samples ended; the test needs another policy"
    for sample in rollout.samples:
        ids = sample.completion_ids.tolist()
        assert tokenizer.eos_token_id not in ids[:-1]
        assert (sample.finish_reason == "stop") == (ids[-1] == tokenizer.eos_token_id)
        assert sample.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_text_is_the_decoded_completion(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    for sample in client.rollout([CHAT], group_size=8, max_tokens=24).samples:
        ids = sample.completion_ids.tolist()
        assert sample.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_text_may_be_switched_off(client: RolloutClient, server_url: str) -> None:
    rollout = client.rollout([CHAT], group_size=2, max_tokens=4, text=False)
    assert [sample.text for sample in rollout.samples] == [None, None]
    body = {"prompts": ["a"], "group_size": 1, "max_tokens": 2, "text": False}
    document = orjson.loads(post(server_url, body).content)
    assert "text" not in document["groups"][0]["samples"][0]


def test_sampling_parameters_come_back(client: RolloutClient) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 3,
        "temperature": 0.8,
        "stop": ["x"],
        "stop_token_ids": [7],
    }
    rollout = client.rollout([[5]], group_size=1, ignore_eos=True, **asked)
    assert rollout.sampling == {
        **SamplingSettings().model_dump(),
        **asked,
        "ignore_eos": True,
        "purpose": "train",
    }


def test_the_model_and_its_tokenizer_are_named(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    info, rollout = client.info(), client.rollout([[5]], group_size=1, max_tokens=1)
    assert rollout.model == info.model
    assert rollout.tokenizer == info.tokenizer == tokenizer_fingerprint(tokenizer)
    assert rollout.policy == info.policy


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.05])
def test_a_temperature_comes_back_as_it_was_asked_for(
    client: RolloutClient, temperature: float
) -> None:
    purpose = "eval" if temperature == 0 else "train"
    rollout = client.rollout(
        [CHAT], group_size=1, max_tokens=16, temperature=temperature, purpose=purpose
    )
    assert rollout.sampling["temperature"] == temperature


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-300])
def test_a_temperature_that_the_engine_would_raise_is_refused(
    client: RolloutClient, temperature: float
) -> None:
    # vLLM takes anything between 0 and 0.01 for 0.01; the answer would then name another one.
    with pytest.raises(InvalidRequest, match="temperature"):
        client.rollout([CHAT], group_size=1, max_tokens=1, temperature=temperature)


def test_greedy_evaluation_takes_the_likeliest_token(client: RolloutClient, live: Weights) -> None:
    prompt = [5, 6, 7, 8]
    sample = client.rollout([prompt], max_tokens=12, ignore_eos=True, **GREEDY).samples[0]
    assert sample.completion_ids.tolist() == live.greedy(prompt, 12)


def test_greedy_evaluation_of_a_group(client: RolloutClient) -> None:
    rollout = client.rollout([CHAT], **{**GREEDY, "group_size": 3}, max_tokens=8)
    answers = [sample.completion_ids.tolist() for sample in rollout.samples]
    assert len(answers) == 3
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "setting",
    [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"presence_penalty": 1.0}, {"temperature": 2.0}],
)
def test_evaluation_may_truncate_the_distribution(
    client: RolloutClient, setting: dict[str, Any]
) -> None:
    rollout = client.rollout([CHAT], group_size=2, max_tokens=8, purpose="eval", **setting)
    assert rollout.sampling.items() >= {**setting, "purpose": "eval"}.items()


def test_top_k_of_one_is_the_likeliest_token(client: RolloutClient, live: Weights) -> None:
    prompt = [5, 6, 7, 8]
    rollout = client.rollout(
        [prompt], group_size=2, max_tokens=6, purpose="eval", top_k=1, ignore_eos=True
    )
    for sample in rollout.samples:
        assert sample.completion_ids.tolist() == live.greedy(prompt, 6)
        np.testing.assert_allclose(sample.logprobs, 0.0, atol=1e-5)


def greedy_body(**more: Any) -> dict[str, Any]:
    return {"prompts": [[5, 6, 7], "12+7=", CHAT], "max_tokens": 9, **GREEDY, **more}


def test_three_encodings_carry_one_answer(server_url: str) -> None:
    key = {IDEMPOTENCY_HEADER: uuid.uuid4().hex}  # one rollout, asked for three times
    plain = post(server_url, greedy_body(), accept=MSGPACK, headers=key)
    packed = post(server_url, greedy_body(packed=True), accept=MSGPACK, headers=key)
    json = post(server_url, greedy_body(), accept=JSON, headers=key)
    kinds = [answer.headers["content-type"] for answer in (plain, packed, json)]
    assert kinds == [MSGPACK, MSGPACK, JSON]
    document = msgpack.unpackb(plain.content)
    assert orjson.loads(json.content) == document
    assert unpacked(msgpack.unpackb(packed.content)) == document


def unpacked(document: Any) -> Any:
    """The packed answer written out, without the library that the server uses."""
    for group in document["groups"]:
        group["prompt_ids"] = np.frombuffer(group["prompt_ids"], "<i4").tolist()
        for sample in group["samples"]:
            sample["completion_ids"] = np.frombuffer(sample["completion_ids"], "<i4").tolist()
            sample["logprobs"] = np.frombuffer(sample["logprobs"], "<f4").tolist()
    return document


@pytest.mark.parametrize("content_type", [JSON, MSGPACK, "application/JSON; charset=utf-8"])
def test_requests_may_be_json_or_msgpack(server_url: str, content_type: str) -> None:
    body = greedy_body()
    raw = msgpack.packb(body) if content_type == MSGPACK else orjson.dumps(body)
    response = post(server_url, raw=raw, content_type=content_type)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", MSGPACK),
        ("*/*", MSGPACK),
        (JSON, JSON),
        ("application/json, text/plain;q=0.5", JSON),
        ("Application/JSON; q=1", JSON),
        (MSGPACK, MSGPACK),
    ],
)
def test_the_answer_follows_accept(server_url: str, accept: str, expected: str) -> None:
    body = {"prompts": ["a"], "group_size": 1, "max_tokens": 1}
    assert post(server_url, body, accept=accept).headers["content-type"] == expected


def test_packed_arrays_are_not_copied(client: RolloutClient) -> None:
    rollout = client.rollout([[5, 6], [7]], group_size=2, max_tokens=5)
    for sample in rollout.samples:
        for array in (sample.prompt_ids, sample.completion_ids, sample.logprobs):
            base: Any = array.base
            assert isinstance(base, bytes)
            assert not array.flags.owndata
            assert not array.flags.writeable


def test_plain_arrays_have_the_same_types(client: RolloutClient) -> None:
    sample = client.rollout([[5]], group_size=1, max_tokens=3, packed=False).samples[0]
    assert sample.completion_ids.dtype == np.int32
    assert sample.logprobs.dtype == np.float32


def test_ten_lines_of_plain_python_suffice(server_url: str) -> None:
    body = {"prompts": ["2 + 2 ="], "group_size": 4, "max_tokens": 8}
    answer = httpx.post(
        f"{server_url}/rollout",
        content=msgpack.packb(body),
        headers={"content-type": "application/msgpack"},
        timeout=60,
    )
    (group,) = msgpack.unpackb(answer.content)["groups"]
    assert len(group["samples"]) == 4
    for sample in group["samples"]:
        assert len(sample["completion_ids"]) == len(sample["logprobs"])


def test_the_async_client_is_the_same(server_url: str) -> None:
    async def many() -> list[int]:
        async with AsyncRolloutClient(server_url) as client:
            prompts = [[index + 1] for index in range(12)]
            rollouts = await asyncio.gather(
                *(client.rollout([prompt], group_size=2, max_tokens=4) for prompt in prompts)
            )
        return [int(rollout.groups[0].prompt_ids[0]) for rollout in rollouts]

    assert asyncio.run(many()) == list(range(1, 13))


def test_hundreds_of_prompts_in_one_request(client: RolloutClient) -> None:
    prompts = [[index % 280 + 1, index // 280 + 1] for index in range(400)]
    rollout = client.rollout(prompts, group_size=2, max_tokens=2, text=False)
    assert [group.prompt_ids.tolist() for group in rollout.groups] == prompts
    assert len(rollout.samples) == 800


def test_health_answers_while_rollouts_run(server_url: str) -> None:
    async def probe() -> float:
        body = msgpack.packb({"prompts": [[5]] * 32, "group_size": 8, "max_tokens": 64})
        headers = {"content-type": MSGPACK}
        async with httpx.AsyncClient(base_url=server_url, timeout=60) as http:
            working = asyncio.create_task(http.post("/rollout", content=body, headers=headers))
            slowest = 0.0
            while not working.done():
                answer = await http.get("/healthz")
                assert answer.json() == {"status": "alive"}
                slowest = max(slowest, answer.elapsed.total_seconds())
                await asyncio.sleep(0.02)
            assert working.result().status_code == 200
            return slowest

    assert asyncio.run(probe()) < 1.0


def test_a_caller_who_hangs_up_does_not_disturb_the_next(
    server_url: str, client: RolloutClient
) -> None:
    body = {"prompts": [[5]] * 16, "group_size": 16, "max_tokens": 512, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server_url}/rollout",
            content=msgpack.packb(body),
            headers={"content-type": MSGPACK},
            timeout=0.3,
        )
    assert len(client.rollout([[5]], group_size=2, max_tokens=2).samples) == 2


# Completions that were begun before


def test_a_begun_completion_is_gone_on_with(
    client: RolloutClient, live: Weights, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt, begun = chat_ids(tokenizer, CHAT), tokenizer.encode("so far \u20ac")[:-1]
    ids = [*prompt, *begun]
    rollout = client.rollout(
        [{"token_ids": ids, "completion_from": len(prompt)}, ids],
        group_size=4,
        max_tokens=12,
        ignore_eos=True,
    )
    for sample in rollout.samples:
        assert sample.prompt_ids.tolist() == ids
        assert len(sample.completion_ids) == len(sample.logprobs) == 12
        assert_agree(sample.logprobs, live.logprobs(ids, sample.completion_ids.tolist()))
    for sample in rollout.groups[0].samples:
        whole = [*begun, *sample.completion_ids.tolist()]
        assert sample.text == tokenizer.decode(whole, skip_special_tokens=True)
    for sample in rollout.groups[1].samples:
        added = sample.completion_ids.tolist()
        assert sample.text == tokenizer.decode(added, skip_special_tokens=True)


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize("last", ["far", "<|im_end|>"])
def test_a_stop_string_may_begin_before_the_seam(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast, last: str
) -> None:
    special = "" if last == "far" else last
    prompt, begun = chat_ids(tokenizer, CHAT), tokenizer.encode(f"so far{special}")
    prompts: list[PromptLike] = [{"token_ids": [*prompt, *begun], "completion_from": len(prompt)}]
    asked: dict[str, Any] = {"group_size": 256, "max_tokens": 3, "temperature": 2.0}
    likely = Counter(
        first
        for sample in client.rollout(prompts, ignore_eos=True, **asked).samples
        if (first := (sample.text or "")[len("so far") :][:1]) not in ("", "\ufffd")
    )
    firsts = [first for first, _ in likely.most_common(16)]
    stops = [f"{last}{first}" for first in firsts]
    samples = client.rollout(prompts, stop=stops, ignore_eos=True, **asked).samples
    assert stopped(samples)
    for sample in samples:
        made = sample.completion_ids.tolist()
        text, before = (tokenizer.decode([*begun, *ids]) for ids in (made, made[:-1]))
        assert sample.text == tokenizer.decode([*begun, *made], skip_special_tokens=True)
        ends = any(stop in text for stop in stops)
        assert (sample.finish_reason == "stop") == ends
        assert not any(stop in before for stop in stops)
        assert len(sample.logprobs) == sample.spans[-1].end == len(made)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from shared.client import RolloutClient
from shared.codec import decode, encode, rollout_to_wire
from shared.protocol import MSGPACK, Rollout, Sample
from trainer.config import Config, RewardConfig
from trainer.evaluate import Evaluation, evaluate, summarise
from trainer.prompts import Task, held_out_tasks
from trainer.rewards import Failed, Score, open_reward


def test_failures_are_counted_and_left_out_of_the_mean() -> None:
    accuracy = summarise([Score(1.0), Score(0.0), Failed("x"), Score(1.0)], version=3)
    assert accuracy.accuracy == pytest.approx(2 / 3)
    assert (accuracy.scored, accuracy.errors, accuracy.version) == (3, 1, 3)


def test_without_a_verdict_the_accuracy_is_unknown() -> None:
    accuracy = summarise([Failed("x")], version=1)
    assert math.isnan(accuracy.accuracy)
    assert str(Evaluation(2, accuracy, None)) == (
        "held-out accuracy: greedy unknown of 0, 1 reward errors (v1)"
    )


def test_asks_greedily_and_then_at_the_training_temperature(
    make_config: Callable[..., Config],
    make_rollout: Callable[..., Rollout],
    make_sample: Callable[..., Sample],
) -> None:
    asked: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = decode(request.read(), MSGPACK)
        asked.append(body)
        # Every other sample is right.
        groups = [
            [make_sample(g, text="07"[s % 2]) for s in range(body["group_size"])]
            for g in range(len(body["prompts"]))
        ]
        content = encode(rollout_to_wire(make_rollout(groups), packed=True), MSGPACK)
        return httpx.Response(200, content=content, headers={"content-type": MSGPACK})

    config = make_config(
        rollout={"temperature": 0.8, "max_tokens": 9}, evaluation={"samples": 2, "max_tokens": 5}
    )
    with (
        open_reward(RewardConfig(function="exact")) as reward,
        RolloutClient("http://t", transport=httpx.MockTransport(handler)) as client,
    ):
        found = evaluate(client.rollout, config, [Task("q", "7")] * 3, reward, step=4)
    assert found.greedy.accuracy == 0.0
    assert found.sampled is not None
    assert found.sampled.accuracy == 0.5
    assert found.sampled.scored == 6
    assert str(found) == ("held-out accuracy: greedy 0.0% of 3, sampled 50.0% of 6 (v4)")
    keys = ("group_size", "temperature", "purpose", "max_tokens")
    assert [[body[key] for key in keys] for body in asked] == [
        [1, 0.0, "eval", 5],
        [2, 0.8, "eval", 5],
    ]


def test_greedy_accuracy_of_a_real_server_is_repeatable(
    server_url: str, make_config: Callable[..., Config]
) -> None:
    config = make_config(
        data={"arithmetic": {"max_operand": 20}},
        rollout={"max_tokens": 8},
        evaluation={"prompts": 16},
    )
    tasks = held_out_tasks(config)

    def measure() -> Evaluation:
        with open_reward(config.reward) as reward, RolloutClient(server_url) as client:
            return evaluate(client.rollout, config, tasks, reward, step=0)

    first, second = measure(), measure()
    assert first.greedy.scored == 16
    assert first == second

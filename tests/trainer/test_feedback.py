from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shared.client import AsyncRolloutClient, RolloutClient
from shared.protocol import Rollout, Sample
from tests.rollout_server.viewer_support import scripted
from trainer.feedback import report, rewards_of
from trainer.rewards import Failed, Outcome, Score


def pool(*clients: RolloutClient) -> Any:
    return SimpleNamespace(current=[SimpleNamespace(url="u", client=client) for client in clients])


def reward(*names: str) -> Any:
    return SimpleNamespace(parts=[SimpleNamespace(name=name) for name in names])


def test_scores_arrive_beside_their_samples(untrained_model: Path, tmp_path: Path) -> None:
    with scripted(untrained_model, tmp_path, lambda _: ["7", "8"]) as (server, _):
        rollout = server.client.rollout(["3+4=", "1+1="], group_size=2, max_tokens=8)
        right, wrong = Score(1.5, (1.0, 0.5)), Score(0.0, (0.0, 0.0))
        outcomes: list[list[Outcome]] = [[right, Failed("it raised")], [wrong, wrong]]
        told = report(pool(server.client), rollout, outcomes, reward("answer", "format"))
        assert told is None
        group = rollout.groups[0].id
        shown = httpx.get(f"{server.url}/viewer/groups/{group}").json()["samples"]
        assert [sample["reward"] for sample in shown] == [1.5, None]
        assert [s["components"] for s in shown] == [{"answer": 1.0, "format": 0.5}, {}]

        async def again() -> int:
            async with AsyncRolloutClient(server.url) as client:
                return await client.report_rewards([{"id": group, "rewards": [0.0, 1.0]}])

        assert asyncio.run(again()) == 1


def test_a_server_without_a_page_is_no_problem(untrained_model: Path, tmp_path: Path) -> None:
    with scripted(untrained_model, tmp_path, lambda _: ["7"], viewer=False) as (server, _):
        rollout = server.client.rollout(["3+4="], group_size=2, max_tokens=8)
        outcomes = [[Score(1.0), Score(0.0)]]
        assert report(pool(server.client), rollout, outcomes, reward("answer")) is None


def test_a_server_that_does_not_answer_is_told_of_and_the_others_are_asked(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    asked: list[str] = []

    def client(status: int) -> RolloutClient:
        def answer(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            if not status:
                raise httpx.ReadError("gone")
            return httpx.Response(status, json={"noted": 1, "forgotten": 0})

        return RolloutClient("http://tito", transport=httpx.MockTransport(answer))

    rollout = named(make_rollout([[make_sample(), make_sample()]]))
    outcomes = [[Score(1.0), Score(0.0)]]
    problem = report(pool(client(0), client(200)), rollout, outcomes, reward("answer"))
    assert problem is not None
    assert "no answer" in problem
    assert asked == ["/rewards", "/rewards"]


def named(rollout: Rollout) -> Rollout:
    groups = tuple(replace(group, id=f"{group.group_id:016x}") for group in rollout.groups)
    return replace(rollout, groups=groups)


def test_groups_without_a_name_and_single_parts_are_left_out(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    rollout = make_rollout([[make_sample()], [make_sample(group_id=1)]])
    outcomes = [[Score(1.0, (1.0,))], [Score(2.0, (2.0,))]]
    assert rewards_of(rollout, outcomes, ["answer"]) == []
    first, second = rewards_of(named(rollout), outcomes, ["answer"])
    assert first == {"id": f"{0:016x}", "rewards": [1.0], "components": None}
    assert second["rewards"] == [2.0]


@pytest.mark.parametrize("answer", [{}, {"noted": "x"}, []])
def test_an_answer_that_is_none_is_told_as_such(answer: Any) -> None:
    from shared.errors import MalformedBody

    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    with (
        RolloutClient("http://tito", transport=transport) as client,
        pytest.raises(MalformedBody, match="rewards answer"),
    ):
        client.report_rewards([{"id": "0", "rewards": [1.0]}])

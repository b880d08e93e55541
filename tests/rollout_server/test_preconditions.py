"""Rollouts that ask for a version, a digest or an age of the live policy."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from rollout_server.app import create_app
from rollout_server.policies import Policy
from rollout_server.preconditions import hold
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.errors import InvalidRequest, NotFound, PreconditionFailed
from shared.requests import RolloutRequest
from tests.rollout_server.support import FakeEngine, Weights, lazy, serving


def digest(version: int) -> str:
    return f"{version:032x}"


@dataclass
class Live:
    """A policy as far as preconditions see it."""

    name: str = "default"
    version: int = 5
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def digest(self) -> str:
        return digest(self.version)

    async def publish(self) -> None:
        self.version += 1
        async with self.changed:
            self.changed.notify_all()


def request(**conditions: Any) -> RolloutRequest:
    return RolloutRequest(prompts=["x"], **conditions)


@pytest.mark.parametrize(
    "conditions",
    [
        {},
        {"version": 5},
        {"digest": digest(5)},
        {"min_version": 5},
        {"min_version": 0},
        {"version": 5, "digest": digest(5), "min_version": 3},
        {"trainer_version": 5, "max_staleness": 0},
        {"trainer_version": 7, "max_staleness": 2},
        {"trainer_version": 0, "max_staleness": 9},
        {"trainer_version": 3, "max_staleness": 0},
    ],
)
def test_conditions_that_hold_let_the_rollout_start(conditions: dict[str, Any]) -> None:
    asyncio.run(hold(Live(), request(**conditions)))


@pytest.mark.parametrize(
    ("conditions", "named"),
    [
        ({"version": 4}, "asked for: version 4"),
        ({"version": 6}, "asked for: version 6"),
        ({"digest": digest(4)}, f"asked for: digest {digest(4)}"),
        ({"min_version": 6}, "asked for: version 6 or later"),
        (
            {"trainer_version": 8, "max_staleness": 2},
            r"asked for: version 6 or later \(trainer_version 8, max_staleness 2\)",
        ),
        ({"version": 5, "digest": digest(6)}, "asked for: digest"),
        ({"version": 6, "digest": digest(6)}, "asked for: version 6, digest"),
    ],
)
def test_conditions_that_do_not_are_named_with_what_is_live(
    conditions: dict[str, Any], named: str
) -> None:
    with pytest.raises(PreconditionFailed, match=named) as refusal:
        asyncio.run(hold(Live(), request(**conditions)))
    assert refusal.value.details == {"version": 5, "digest": digest(5)}
    assert "is at version 5" in refusal.value.message


@pytest.mark.parametrize(
    "conditions", [{"min_version": 7}, {"version": 7}, {"digest": digest(7)}, {"version": 6}]
)
def test_a_rollout_waits_for_its_policy(conditions: dict[str, Any]) -> None:
    async def scenario() -> None:
        live = Live()
        waiting = asyncio.create_task(hold(live, request(**conditions, wait_seconds=60)))
        while live.version < (conditions.get("version") or 7):
            await asyncio.sleep(0)
            assert not waiting.done()
            await live.publish()
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


def test_one_publish_wakes_every_waiter() -> None:
    async def scenario() -> None:
        live = Live()
        waiting = [
            asyncio.create_task(hold(live, request(min_version=6, wait_seconds=60)))
            for _ in range(100)
        ]
        await asyncio.sleep(0)
        await live.publish()
        await asyncio.wait_for(asyncio.gather(*waiting), 5)

    asyncio.run(scenario())


def test_waiting_ends_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(PreconditionFailed):
        asyncio.run(hold(Live(), request(min_version=6, wait_seconds=0.05)))
    assert 0.05 <= time.monotonic() - start < 5


def test_nobody_waits_for_a_version_that_has_passed() -> None:
    async def scenario() -> None:
        live = Live()
        with pytest.raises(PreconditionFailed):
            await asyncio.wait_for(hold(live, request(version=4, wait_seconds=60)), 5)
        never = request(version=6, digest="f" * 32, wait_seconds=60)
        waiting = asyncio.create_task(hold(live, never))
        for _ in range(2):
            await asyncio.sleep(0)
            await live.publish()
        with pytest.raises(PreconditionFailed) as refusal:
            await asyncio.wait_for(waiting, 5)
        assert refusal.value.details["version"] == 7

    asyncio.run(scenario())


def test_a_waiter_that_hangs_up_leaves_the_policy_usable() -> None:
    async def scenario() -> None:
        live = Live()
        waiting = asyncio.create_task(hold(live, request(min_version=6, wait_seconds=60)))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(live.publish(), 5)
        await hold(live, request(min_version=6))

    asyncio.run(scenario())


def test_the_servers_own_policy_wakes_waiters() -> None:
    async def scenario() -> None:
        policy = Policy("default", 5, digest(5))
        waiting = asyncio.create_task(hold(policy, request(min_version=6, wait_seconds=60)))
        await asyncio.sleep(0)
        await policy.advance(policy.begin("alice"), 6, digest(6))
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"trainer_version": 3}, "max_staleness"),
        ({"max_staleness": 3}, "max_staleness"),
        ({"trainer_version": 3, "max_staleness": -1}, "max_staleness"),
        ({"trainer_version": -1, "max_staleness": 3}, "trainer_version"),
        ({"version": -1}, "version"),
        ({"min_version": 1.5}, "min_version"),
        ({"digest": "abc"}, "digest"),
        ({"wait_seconds": -1}, "wait_seconds"),
        ({"wait_seconds": 1e9}, "wait_seconds"),
        ({"wait_seconds": float("nan")}, "wait_seconds"),
        ({"policy": ""}, "policy"),
        ({"policy": "../x"}, "policy"),
        ({"policy": "x" * 65}, "policy"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        request(**fields)
    assert [error["loc"] for error in refusal.value.errors()] == [(where,)]


@pytest.fixture
def app(tiny_model: Path, tmp_path: Path) -> FastAPI:
    settings = ServerSettings(model=str(tiny_model), staging_dir=tmp_path)
    return create_app(settings, build_engine=lambda _: FakeEngine())


@pytest.fixture
def live_client(app: FastAPI) -> Iterator[RolloutClient]:
    with serving(app) as url, RolloutClient(url, timeout=60) as client:
        client.wait_ready(60)
        yield client


def test_over_the_wire(live_client: RolloutClient, base: Weights) -> None:
    prompt: list[Any] = [[5, 6]]
    settings: dict[str, Any] = {"group_size": 1, "max_tokens": 2}
    live_client.rollout(prompt, policy="default", version=0, digest=base.digest, **settings)
    with pytest.raises(PreconditionFailed) as refusal:
        live_client.rollout(prompt, min_version=1, wait_seconds=0.05, **settings)
    assert refusal.value.details == {"version": 0, "digest": base.digest}
    with pytest.raises(NotFound, match="no policy 'other'"):
        live_client.rollout(prompt, policy="other", **settings)
    with pytest.raises(InvalidRequest, match="max_staleness: got None; allowed: set together"):
        live_client.rollout(prompt, trainer_version=1, **settings)


def test_a_rollout_over_the_wire_starts_when_its_version_is_published(
    live_client: RolloutClient, base: Weights
) -> None:
    conditions: dict[str, Any] = {"min_version": 1, "wait_seconds": 60}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(
            live_client.rollout, [[5, 6]], group_size=1, max_tokens=2, **conditions
        )
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        live_client.reload(lazy(base.tensors))
        assert waiting.result(30).samples[0].version == 1

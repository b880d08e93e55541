"""Answers of vLLM's own routes: which versions they say their tokens are of."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from rollout_server.policies import Policy, Publish
from rollout_server.routes.openai import _Label

OLD, NEW = "a" * 32, "b" * 32


@pytest.fixture
def policy() -> Policy:
    return Policy("default", 4, OLD)


def headers_after(label: _Label, sent: list[Message]) -> dict[str, str]:
    asyncio.run(label.send({"type": "http.response.start", "status": 200, "headers": []}))
    return {name.decode(): value.decode() for name, value in sent[-1]["headers"]}


def labelled(policy: Policy) -> tuple[_Label, list[Message]]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    return _Label(policy, send), sent


def test_a_version_that_tokens_may_be_of_already_is_told(policy: Policy) -> None:
    label, sent = labelled(policy)
    policy.announce(5, NEW)
    headers = headers_after(label, sent)
    assert (headers["x-tito-version"], headers["x-tito-end-version"]) == ("4", "5")
    assert headers["x-tito-end-digest"] == NEW


@pytest.mark.parametrize("ends_well", [True, False])
def test_afterwards_the_live_one_is(policy: Policy, *, ends_well: bool) -> None:
    policy.announce(5, NEW)
    if ends_well:
        asyncio.run(policy.advance(Publish("me"), 5, NEW))
    else:
        asyncio.run(policy.go_back())
    headers = headers_after(*labelled(policy))
    assert headers["x-tito-version"] == ("5" if ends_well else "4")
    assert "x-tito-end-version" not in headers

"""``/policies``: looking, leasing, and publishing under a lease over a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from fastapi import FastAPI

from rollout_server.app import create_app
from rollout_server.leases import Leases
from rollout_server.policies import Policy
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.errors import Conflict
from shared.protocol import FENCE_HEADER, SAFETENSORS
from tests.rollout_server.fakes import (
    DIGEST,
    Clock,
    ask,
    error_of,
    idle_app,
    leases_on,
    tokens_file,
)
from tests.rollout_server.support import FakeEngine, Weights, lazy, serving, upload_of

ALICE, BOB, OPS = (f"{name}-token-0123456789" for name in ("alice", "bob", "ops"))


def lease_of(app: FastAPI, name: str = "default", **body: Any) -> httpx.Response:
    return ask(app, "POST", f"/policies/{name}/lease", json=body)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def app() -> FastAPI:
    return idle_app(Policy("default", 3, DIGEST))


def test_a_policy_shows_what_is_live_and_what_became_of_every_publish() -> None:
    policy = Policy("default", 3, DIGEST)
    asyncio.run(policy.advance(policy.begin("alice"), 4, "f" * 32))
    app = idle_app(policy, Policy("math", 1, "e" * 32))
    shown = ask(app, "GET", "/policies/default").json()
    assert {key: shown[key] for key in ("name", "kind", "version", "digest", "lease")} == {
        "name": "default",
        "kind": "full",
        "version": 4,
        "digest": "f" * 32,
        "lease": None,
    }
    newest = shown["history"][0]
    assert (newest["publisher"], newest["state"], newest["version"]) == ("alice", "live", 4)
    listed = ask(app, "GET", "/policies").json()["policies"]
    assert [(p["name"], p["kind"], p["version"]) for p in listed] == [
        ("default", "full", 4),
        ("math", "lora", 1),
    ]
    assert all("history" not in policy for policy in listed)


def test_answers_come_as_msgpack_too(app: FastAPI) -> None:
    headers = {"accept": "application/msgpack"}
    response = ask(app, "GET", "/policies/default", headers=headers)
    assert msgpack.unpackb(response.content)["digest"] == DIGEST


def test_an_unknown_policy_is_not_found(app: FastAPI) -> None:
    response = ask(app, "GET", "/policies/other")
    assert response.status_code == 404
    assert "there are: default" in error_of(response)["message"]


def test_a_lease_is_granted_shown_renewed_and_given_up(app: FastAPI, clock: Clock) -> None:
    leases_on(app, clock)
    granted = lease_of(app, holder="trainer-a", ttl_seconds=30).json()
    assert granted["holder"] == "trainer-a"
    assert (granted["ttl_seconds"], granted["expires_in"]) == (30, 30)
    clock.tick(20)
    shown = ask(app, "GET", "/policies/default").json()["lease"]
    assert (shown["holder"], shown["seconds_left"]) == ("trainer-a", 10)
    fence = granted["fence"]
    renewed = ask(app, "POST", "/policies/default/lease/renew", json={"fence": fence}).json()
    assert (renewed["fence"], renewed["expires_in"]) == (fence, 30)
    assert ask(app, "DELETE", f"/policies/default/lease?fence={fence}").json() == {"lease": None}
    assert ask(app, "GET", "/policies/default").json()["lease"] is None


def test_a_second_trainer_is_told_when_to_come_back(app: FastAPI, clock: Clock) -> None:
    leases_on(app, clock)
    lease_of(app, holder="trainer-a", ttl_seconds=30)
    refusal = lease_of(app, holder="trainer-b", ttl_seconds=30)
    assert refusal.status_code == 409
    assert refusal.headers["retry-after"] == "30"
    assert error_of(refusal)["details"]["holder"] == "trainer-a"
    clock.tick(30)
    assert lease_of(app, holder="trainer-b", ttl_seconds=30).status_code == 200


def test_two_that_give_no_name_are_two(app: FastAPI) -> None:
    assert lease_of(app).status_code == 200
    assert lease_of(app).status_code == 409


def test_a_policy_can_be_leased_before_it_exists_and_before_the_engine_is_up() -> None:
    assert lease_of(idle_app(), "math").status_code == 200


@pytest.mark.parametrize(
    ("name", "body", "where"),
    [
        ("default", {"ttl_seconds": 0}, "ttl_seconds"),
        ("default", {"ttl_seconds": -1}, "ttl_seconds"),
        ("default", {"ttl_seconds": 601}, "ttl_seconds"),
        ("default", {"ttl_seconds": "soon"}, "ttl_seconds"),
        ("default", {"holder": ""}, "holder"),
        ("default", {"holder": "x" * 129}, "holder"),
        ("default", {"ttl": 3}, "ttl"),
        ("a.b", {}, "name"),
        ("*", {}, "name"),
        ("%2e%2e", {}, "name"),
        ("x" * 65, {}, "name"),
    ],
)
def test_a_bad_request_names_the_field(
    app: FastAPI, name: str, body: dict[str, Any], where: str
) -> None:
    response = lease_of(app, name, **body)
    assert response.status_code == 422
    assert [problem["where"] for problem in error_of(response)["problems"]] == [where]


@pytest.mark.parametrize("fence", ["x", "-1", "1.5", "", "9" * 19, "1_0", "\u0661"])
def test_a_number_that_is_none_is_refused(app: FastAPI, fence: str) -> None:
    response = ask(app, "DELETE", "/policies/default/lease", params={"fence": fence})
    assert response.status_code == 422
    assert error_of(response)["problems"][0]["where"] == "fence"


def test_a_late_heartbeat_is_refused(app: FastAPI, clock: Clock) -> None:
    leases_on(app, clock)
    fence = lease_of(app, ttl_seconds=30).json()["fence"]
    clock.tick(31)
    response = ask(app, "POST", "/policies/default/lease/renew", json={"fence": fence})
    assert response.status_code == 409


def test_only_its_owner_and_an_operator_end_a_lease(tmp_path: Path) -> None:
    scopes = ["publish:*"]
    callers = [("alice", ALICE, scopes), ("bob", BOB, scopes), ("ops", OPS, ["admin"])]
    app = idle_app(Policy("default", 3, DIGEST), tokens_file=tokens_file(tmp_path, *callers))
    path = "/policies/default/lease"
    fence = ask(app, "POST", path, token=ALICE, json={"holder": "a"}).json()["fence"]
    assert ask(app, "POST", path, token=BOB, json={"holder": "a"}).status_code == 409
    for method, url, body in (
        ("POST", f"{path}/renew", {"fence": fence}),
        ("DELETE", f"{path}?fence={fence}", None),
    ):
        assert ask(app, method, url, token=BOB, json=body).status_code == 403
    assert ask(app, "GET", "/policies/default", token=BOB).json()["lease"]["owner"] == "alice"
    assert ask(app, "DELETE", path, token=ALICE).status_code == 403
    assert ask(app, "DELETE", path, token=OPS).status_code == 200
    assert ask(app, "POST", path, token=BOB, json={"holder": "a"}).status_code == 200


# Publishing, with an engine that holds no weights.


def server_app(tiny_model: Path, tmp_path: Path, **settings: Any) -> FastAPI:
    return create_app(
        ServerSettings(model=str(tiny_model), staging_dir=tmp_path, **settings),
        build_engine=lambda _: FakeEngine(),
    )


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[FastAPI, RolloutClient]]:
    app = server_app(tiny_model, tmp_path)
    with serving(app) as url, RolloutClient(url, timeout=60) as client:
        client.wait_ready(60)
        yield app, client


def test_a_publish_carries_the_number_of_its_lease(
    served: tuple[FastAPI, RolloutClient], base: Weights
) -> None:
    app, client = served
    leases: Leases = app.state.leases
    assert client.reload(lazy(base.tensors)).version == 1
    lease = leases.acquire("default", "a", 60, owner="anonymous")
    for fence in (None, lease.fence - 1, lease.fence + 1):
        with pytest.raises(Conflict) as refusal:
            client.reload(lazy(base.tensors), fence=fence)
        assert refusal.value.details["fence"] == lease.fence
    assert client.reload(lazy(base.tensors), fence=lease.fence).version == 2
    assert client.info().version == 2


def test_a_publish_that_lost_its_lease_under_way_is_refused_at_the_end(
    served: tuple[FastAPI, RolloutClient], base: Weights
) -> None:
    app, client = served
    leases: Leases = app.state.leases
    old = leases.acquire("default", "a", 60, owner="anonymous")
    body, half_sent, go_on = upload_of(base.tensors), threading.Event(), threading.Event()

    def slowly() -> Iterator[bytes]:
        yield body[: len(body) // 2]
        half_sent.set()
        go_on.wait(30)
        yield body[len(body) // 2 :]

    def take_over() -> None:
        half_sent.wait(30)
        leases.revoke("default")
        leases.acquire("default", "b", 60, owner="anonymous")
        go_on.set()

    rival = threading.Thread(target=take_over)
    rival.start()
    headers = {
        "content-type": SAFETENSORS,
        "x-tito-digest": "trailer",
        FENCE_HEADER: str(old.fence),
    }
    response = httpx.post(
        f"{client._exchange.url}/reload", content=slowly(), headers=headers, timeout=60
    )
    rival.join()
    assert response.status_code == 409, response.text
    assert error_of(response)["details"]["holder"] == "b"
    assert client.info().version == 0


def test_a_shared_server_takes_weights_under_a_lease_only(
    tiny_model: Path, tmp_path: Path, base: Weights
) -> None:
    app = server_app(tiny_model, tmp_path, require_lease=True)
    with serving(app) as url, RolloutClient(url, timeout=60) as client:
        client.wait_ready(60)
        with pytest.raises(Conflict, match="under a lease only"):
            client.reload(lazy(base.tensors))
        with client.lease() as lease:
            assert client.reload(lazy(base.tensors), fence=lease.fence).version == 1


def test_a_token_publishes_the_policies_of_its_scopes(
    tiny_model: Path, tmp_path: Path, base: Weights
) -> None:
    callers = [("alice", ALICE, ["publish:default"]), ("bob", BOB, ["publish:math", "rollout"])]
    app = server_app(tiny_model, tmp_path, tokens_file=tokens_file(tmp_path, *callers))
    with serving(app) as url:
        with RolloutClient(url, token=ALICE, timeout=60) as alice:
            alice.wait_ready(60)
            assert alice.reload(lazy(base.tensors)).version == 1
            shown = ask(app, "GET", "/policies/default", token=BOB).json()
            assert shown["history"][0]["publisher"] == "alice"
        headers = {"content-type": SAFETENSORS, "authorization": f"Bearer {BOB}"}
        refusal = httpx.post(f"{url}/reload", content=b"", headers=headers)
        assert refusal.status_code == 403
        assert "publish:default" in error_of(refusal)["message"]


def test_leases_survive_a_restart_beside_the_committed_versions(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    granted = lease_of(idle_app(Policy("default", 3, DIGEST), spool_dir=spool), holder="a").json()
    app = idle_app(Policy("default", 3, DIGEST), spool_dir=spool)
    assert lease_of(app, holder="b").status_code == 409
    body = {"fence": granted["fence"]}
    assert ask(app, "POST", "/policies/default/lease/renew", json=body).status_code == 200

"""Holding a lease from the client's side: heartbeats, losing it, dying with it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from rollout_server.leases import Leases
from shared.async_lease import AsyncLease
from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import (
    Conflict,
    EngineFailure,
    Forbidden,
    InsufficientStorage,
    ServerUnreachable,
    TitoError,
)
from shared.lease import Lease, default_holder
from tests.rollout_server.fakes import Clock, idle_app, leases_on
from tests.rollout_server.support import eventually, serving

OWNER = "anonymous"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def served(clock: Clock) -> Iterator[tuple[str, Leases]]:
    """A server whose leases run out only when the test lets time pass."""
    app = idle_app()
    leases = leases_on(app, clock)
    with serving(app) as url:
        yield url, leases


def is_fresh(leases: Leases) -> bool:
    """Whether a heartbeat came since the clock was last moved."""
    held = leases.current("default")
    return held is not None and leases.seconds_left(held) > 0.5


def is_lost(lease: Lease | AsyncLease) -> bool:
    try:
        return lease.fence < 0
    except Conflict:
        return True


def test_a_lease_is_held_inside_and_free_outside(served: tuple[str, Leases]) -> None:
    url, leases = served
    with RolloutClient(url) as client:
        with client.lease("default", holder="a", ttl=30) as lease:
            held = leases.current("default")
            assert held is not None
            assert (held.fence, held.holder, held.ttl_s) == (lease.fence, "a", 30)
        assert leases.current("default") is None
        with pytest.raises(Conflict, match="not held"):
            _ = lease.fence


def test_a_lease_can_be_entered_again(served: tuple[str, Leases]) -> None:
    url, _ = served
    with RolloutClient(url) as client:
        lease = client.lease()
        with lease:
            first = lease.fence
        with lease:
            assert lease.fence > first


def test_a_trainer_that_fails_frees_the_policy(served: tuple[str, Leases]) -> None:
    url, leases = served
    with RolloutClient(url) as client:
        with pytest.raises(ZeroDivisionError), client.lease():
            _ = 1 / 0
        assert leases.current("default") is None


def test_heartbeats_keep_it_alive(served: tuple[str, Leases], clock: Clock) -> None:
    url, leases = served
    with RolloutClient(url) as client, client.lease(ttl=0.6) as lease:
        for _ in range(3):
            clock.tick(0.5)
            eventually(lambda: is_fresh(leases))
        leases.check("default", lease.fence, owner=OWNER)


def test_a_lost_lease_is_known_before_the_next_publish(served: tuple[str, Leases]) -> None:
    url, leases = served
    with RolloutClient(url) as client, client.lease(ttl=0.3) as lease:
        leases.revoke("default")
        rival = leases.acquire("default", "rival", 30, owner=OWNER)
        eventually(lambda: is_lost(lease))
        with pytest.raises(Conflict, match=r"was lost: .*'rival' holds a newer one") as refusal:
            client.reload([], fence=lease.fence)
        assert refusal.value.details["fence"] == rival.fence
    assert leases.current("default") == rival, "leaving must not end somebody else's lease"


def test_two_clients_of_one_process_are_two(served: tuple[str, Leases]) -> None:
    url, _ = served
    assert default_holder() != default_holder()
    with RolloutClient(url) as client, client.lease():
        with pytest.raises(Conflict) as refusal, client.lease():
            pytest.fail("both write")
        assert 0 < (refusal.value.retry_after or 0) <= 30


def test_a_trainer_can_wait_for_its_turn(served: tuple[str, Leases]) -> None:
    url, leases = served
    first = leases.acquire("default", "first", 0.2, owner=OWNER)
    with RolloutClient(url) as client:
        start = time.monotonic()
        with pytest.raises(Conflict), client.lease(wait=0.3):
            pytest.fail("it is not free")
        assert 0.3 <= time.monotonic() - start < 10
        done = threading.Timer(0.2, leases.release, ("default", first.fence), {"owner": OWNER})
        done.start()
        with client.lease(wait=30) as lease:
            assert lease.fence > first.fence


def test_a_policy_is_free_again_when_its_trainer_is_killed() -> None:
    app = idle_app()
    program = (
        "import sys, time; from shared.client import RolloutClient\n"
        "with RolloutClient(sys.argv[1]) as client, client.lease(ttl=1) as lease:\n"
        "    time.sleep(1.5); print(lease.fence, flush=True); time.sleep(600)\n"
    )
    with serving(app) as url, RolloutClient(url) as client:
        command = [sys.executable, "-c", program, url]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout is not None
            fence = int(trainer.stdout.readline())
            app.state.leases.check("default", fence, owner=OWNER)  # older than its time to live
            trainer.send_signal(signal.SIGKILL)
        with client.lease(wait=30) as lease:
            assert lease.fence > fence


class Line:
    """Answers as a server would, until it is cut."""

    def __init__(self) -> None:
        self.error: TitoError | None = None
        self.calls: list[tuple[str, str]] = []

    def __call__(self, method: str, path: str, **_: Any) -> Any:
        self.calls.append((method, path))
        if self.error is not None:
            raise self.error
        return {"fence": 7}

    async def later(self, method: str, path: str, **request: Any) -> Any:
        return self(method, path, **request)


@pytest.mark.parametrize(
    "error", [ServerUnreachable("cut"), EngineFailure("a bug"), InsufficientStorage("disk full")]
)
def test_a_lease_is_doubted_while_no_heartbeat_is_answered(error: TitoError) -> None:
    line = Line()
    with Lease(line, "default", ttl=0.3) as lease:
        assert lease.fence == 7
        line.error = error
        eventually(lambda: is_lost(lease))
        with pytest.raises(Conflict, match="no heartbeat"):
            _ = lease.fence
        line.error = None
        eventually(lambda: not is_lost(lease))
    assert line.calls[-1] == ("DELETE", "/policies/default/lease?fence=7")


def test_a_refused_heartbeat_is_final() -> None:
    line = Line()
    with Lease(line, "default", ttl=0.3) as lease:
        line.error = Forbidden("the token was withdrawn")
        eventually(lambda: is_lost(lease))
        line.error = None
        beats = len(line.calls)
        time.sleep(0.3)
        assert len(line.calls) == beats
        assert is_lost(lease)
    assert line.calls[-1][0] != "DELETE"


def test_leaving_does_not_fail_when_the_server_is_gone() -> None:
    line = Line()
    with suppress(KeyError), Lease(line, "default", ttl=30):
        line.error = ServerUnreachable("cut")
        raise KeyError


@pytest.mark.parametrize("answer", [None, {}, {"fence": "x"}, []])
def test_an_answer_that_is_none_is_no_lease(answer: Any) -> None:
    with (
        pytest.raises(TitoError, match="not an answer about a lease"),
        Lease(lambda *_, **__: answer, "default", ttl=30),
    ):
        pytest.fail("nothing was granted")


def test_the_path_of_a_policy_is_quoted() -> None:
    line = Line()
    with Lease(line, "a/../b", ttl=30):
        pass
    assert line.calls[0] == ("POST", "/policies/a%2F..%2Fb/lease")


def test_the_asynchronous_twin(served: tuple[str, Leases], clock: Clock) -> None:
    url, leases = served

    async def scenario() -> None:
        async with AsyncRolloutClient(url) as client:
            async with client.lease(ttl=0.6) as lease:
                clock.tick(0.5)
                await asyncio.to_thread(eventually, lambda: is_fresh(leases))
                with pytest.raises(Conflict):
                    async with client.lease(wait=0.1):
                        pytest.fail("both write")
                leases.revoke("default")
                await asyncio.to_thread(eventually, lambda: is_lost(lease))
                with pytest.raises(Conflict, match="was lost"):
                    await client.reload([], fence=lease.fence)
            async with client.lease():
                assert leases.current("default") is not None
            assert leases.current("default") is None

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_the_asynchronous_twin_doubts_too() -> None:
    async def scenario() -> None:
        line = Line()
        async with AsyncLease(line.later, "default", ttl=0.3) as lease:
            line.error = ServerUnreachable("cut")
            await asyncio.to_thread(eventually, lambda: is_lost(lease))
            line.error = None
            await asyncio.to_thread(eventually, lambda: not is_lost(lease))

    asyncio.run(asyncio.wait_for(scenario(), 30))

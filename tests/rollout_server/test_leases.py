"""One writer for each policy, whoever dies, sleeps or comes late."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_server.lease_file import Lease, LeaseFileError
from rollout_server.leases import Leases
from shared.errors import Conflict, Forbidden, InsufficientStorage, InvalidRequest
from tests.rollout_server.fakes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    return Leases(clock=clock)


def acquire(leases: Leases, holder: str = "a", *, owner: str = "team", policy: str = "p") -> Lease:
    return leases.acquire(policy, holder, 30.0, owner=owner)


def may_publish(leases: Leases, fence: int | None, *, owner: str = "team") -> bool:
    try:
        leases.check("p", fence, owner=owner)
    except Conflict:
        return False
    return True


def test_a_second_writer_is_told_who_writes_and_for_how_long(leases: Leases, clock: Clock) -> None:
    first = acquire(leases)
    clock.tick(10)
    with pytest.raises(Conflict, match="leased to 'a'") as refusal:
        acquire(leases, "b")
    assert refusal.value.retry_after == 20.0
    assert refusal.value.details == {"fence": first.fence, "holder": "a", "seconds_left": 20.0}
    assert may_publish(leases, first.fence)


def test_policies_have_writers_of_their_own(leases: Leases) -> None:
    first, other = acquire(leases), acquire(leases, "b", policy="q")
    leases.check("p", first.fence, owner="team")
    leases.check("q", other.fence, owner="team")
    with pytest.raises(Conflict):
        leases.check("q", first.fence, owner="team")


def test_a_writer_that_dies_frees_the_policy_by_itself(leases: Leases, clock: Clock) -> None:
    dead = acquire(leases)
    clock.tick(29.9)
    assert leases.current("p") == dead
    clock.tick(0.1)
    assert leases.current("p") is None
    successor = acquire(leases, "b")
    assert successor.fence > dead.fence
    assert may_publish(leases, successor.fence)
    with pytest.raises(Conflict, match="'b' holds a newer one") as refusal:
        leases.check("p", dead.fence, owner="team")
    assert refusal.value.details["fence"] == successor.fence


def test_heartbeats_keep_a_lease_alive(leases: Leases, clock: Clock) -> None:
    lease = acquire(leases)
    for _ in range(10):
        clock.tick(20)
        renewed = leases.renew("p", lease.fence, owner="team")
        assert renewed.fence == lease.fence
        assert leases.seconds_left(renewed) == 30.0
    assert may_publish(leases, lease.fence)


def test_a_lease_that_ran_out_does_not_come_back(leases: Leases, clock: Clock) -> None:
    lease = acquire(leases)
    clock.tick(31)
    assert not may_publish(leases, lease.fence)
    with pytest.raises(Conflict, match="nobody holds one now"):
        leases.renew("p", lease.fence, owner="team")
    with pytest.raises(Conflict):
        leases.release("p", lease.fence, owner="team")


def test_release_frees_at_once_and_an_old_number_releases_nothing(leases: Leases) -> None:
    first = acquire(leases)
    leases.release("p", first.fence, owner="team")
    second = acquire(leases, "b")
    with pytest.raises(Conflict):
        leases.release("p", first.fence, owner="team")
    assert leases.current("p") == second


def test_the_same_holder_takes_over_from_itself_with_a_new_number(leases: Leases) -> None:
    before = acquire(leases)
    after = acquire(leases)
    assert after.fence > before.fence
    assert may_publish(leases, after.fence)
    assert not may_publish(leases, before.fence)


def test_a_holders_name_is_worth_nothing_to_another_caller(leases: Leases) -> None:
    lease = acquire(leases, owner="team")
    with pytest.raises(Conflict):
        acquire(leases, owner="rival")
    for use in (leases.check, leases.renew, leases.release):
        with pytest.raises(Forbidden, match="another caller"):
            use("p", lease.fence, owner="rival")
    assert may_publish(leases, lease.fence)


def test_a_lone_trainer_needs_no_lease_until_there_is_one(leases: Leases, clock: Clock) -> None:
    assert may_publish(leases, None)
    lease = acquire(leases)
    assert not may_publish(leases, None)
    with pytest.raises(Conflict, match="leased to 'a'") as refusal:
        leases.check("p", None, owner="somebody")
    assert refusal.value.details["fence"] == lease.fence
    clock.tick(30)
    assert may_publish(leases, None)


def test_a_lease_can_be_required(clock: Clock) -> None:
    leases = Leases(require=True, clock=clock)
    with pytest.raises(Conflict, match="under a lease only"):
        leases.check("p", None, owner="team")
    assert may_publish(leases, acquire(leases).fence)


@pytest.mark.parametrize("fence", [0, 1, 10**17])
def test_a_number_that_nobody_was_given_is_refused(leases: Leases, fence: int) -> None:
    assert not may_publish(leases, fence)
    acquire(leases)
    assert not may_publish(leases, fence)


def test_an_operator_can_free_a_policy_whose_trainer_hangs_but_beats(leases: Leases) -> None:
    lease = acquire(leases)
    leases.revoke("p")
    leases.revoke("p")
    assert not may_publish(leases, lease.fence)
    with pytest.raises(Conflict):
        leases.renew("p", lease.fence, owner="team")
    acquire(leases, "b")


def test_a_lease_cannot_live_for_too_long(clock: Clock) -> None:
    leases = Leases(max_ttl_s=60.0, clock=clock)
    with pytest.raises(InvalidRequest, match=r"up to 60\.0"):
        leases.acquire("p", "a", 60.1, owner="team")
    leases.acquire("p", "a", 60.0, owner="team")


def test_a_lease_lost_during_the_upload_is_refused_at_the_commit(
    leases: Leases, clock: Clock
) -> None:
    lease = acquire(leases)
    leases.check("p", lease.fence, owner="team")
    clock.tick(31)
    successor = acquire(leases, "b")
    with pytest.raises(Conflict), leases.commit("p", lease.fence, owner="team"):
        pytest.fail("it must not be loaded")
    with leases.commit("p", successor.fence, owner="team"):
        pass


@pytest.mark.parametrize("leased", [True, False])
def test_nobody_takes_over_in_the_middle_of_a_load(
    leases: Leases, clock: Clock, leased: bool
) -> None:
    fence = acquire(leases).fence if leased else None
    with leases.commit("p", fence, owner="team"):
        clock.tick(60)
        with pytest.raises(Conflict, match="being loaded") as refusal:
            acquire(leases, "b")
        assert refusal.value.retry_after == 1.0
    acquire(leases, "b")


def test_a_policy_is_free_only_when_the_last_of_its_commits_has_ended(leases: Leases) -> None:
    with leases.commit("p", None, owner="team"):
        with leases.commit("p", None, owner="team"):
            pass
        with pytest.raises(Conflict, match="being loaded"):
            acquire(leases)
    acquire(leases)


def test_a_lease_does_not_run_out_in_the_middle_of_its_load(leases: Leases, clock: Clock) -> None:
    lease = acquire(leases)
    with leases.commit("p", lease.fence, owner="team"):
        clock.tick(60)
        assert leases.current("p") == lease
        leases.renew("p", lease.fence, owner="team")
    assert may_publish(leases, lease.fence)


def test_a_load_that_fails_lets_go_of_the_lease(leases: Leases, clock: Clock) -> None:
    lease = acquire(leases)
    with pytest.raises(RuntimeError), leases.commit("p", lease.fence, owner="team"):
        raise RuntimeError("the engine died")
    assert may_publish(leases, lease.fence)
    clock.tick(30)
    acquire(leases, "b")


def test_numbers_grow_over_restarts_with_and_without_a_directory(
    tmp_path: Path, clock: Clock
) -> None:
    for directory in (None, tmp_path / "spool"):
        seen: list[int] = []
        for holder in "abc":
            leases = Leases(directory, clock=clock)
            clock.tick(100)
            seen += [acquire(leases, holder).fence for _ in range(3)]
        assert seen[:3] == sorted(set(seen[:3]))
        if directory is not None:
            assert seen == list(range(seen[0], seen[0] + 9))


def test_a_directory_that_was_emptied_gives_out_no_number_twice(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = acquire(Leases(tmp_path, clock=clock))
    (tmp_path / "leases.json").unlink()
    a_second_later = time.time_ns() + 10**9
    monkeypatch.setattr(time, "time_ns", lambda: a_second_later)
    assert acquire(Leases(tmp_path, clock=clock), "b").fence > old.fence


def test_a_restart_lets_the_holder_go_on_and_finds_out_the_dead(
    tmp_path: Path, clock: Clock
) -> None:
    lease = acquire(Leases(tmp_path, clock=clock))
    restarted = Clock(5.0)
    leases = Leases(tmp_path, clock=restarted)
    assert may_publish(leases, lease.fence)
    assert may_publish(leases, leases.renew("p", lease.fence, owner="team").fence)
    with pytest.raises(Conflict):
        acquire(leases, "b")
    restarted.tick(30)
    assert acquire(leases, "b").fence == lease.fence + 1


@pytest.mark.parametrize("end", ["release", "expire", "revoke"])
def test_what_has_ended_stays_ended_after_a_restart(tmp_path: Path, clock: Clock, end: str) -> None:
    leases = Leases(tmp_path, clock=clock)
    lease = acquire(leases)
    if end == "release":
        leases.release("p", lease.fence, owner="team")
    elif end == "revoke":
        leases.revoke("p")
    else:
        clock.tick(30)
        leases.check("p", None, owner="somebody")  # a lone trainer published in between
    leases = Leases(tmp_path, clock=clock)
    assert leases.current("p") is None
    assert not may_publish(leases, lease.fence)


def test_a_number_is_on_the_disk_before_it_is_handed_out(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(tmp_path, clock=clock)
    first = acquire(leases)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    second = acquire(leases)
    assert len(synced) == 2, "the file and its directory"
    assert json.loads((tmp_path / "leases.json").read_text())["last_fence"] == second.fence

    def disk_full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space left"):
        acquire(leases)
    assert leases.current("p") == second
    assert may_publish(leases, second.fence)
    assert not may_publish(leases, first.fence)
    assert Leases(tmp_path, clock=clock).current("p") == second


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"last_fence": 3}', '{"leases": []}', '{"last_fence": 3, "leases": [{}]}'],
)
def test_a_damaged_file_stops_the_server_rather_than_the_count(tmp_path: Path, text: str) -> None:
    (tmp_path / "leases.json").write_text(text)
    with pytest.raises(LeaseFileError, match=r"leases\.json cannot be read"):
        Leases(tmp_path)


def test_of_many_who_ask_at_once_one_gets_it(tmp_path: Path, clock: Clock) -> None:
    leases = Leases(tmp_path, clock=clock)
    start = threading.Barrier(8)

    def ask(holder: int) -> int | None:
        start.wait()
        try:
            return acquire(leases, str(holder)).fence
        except Conflict:
            return None

    with ThreadPoolExecutor(8) as pool:
        fences = [fence for fence in pool.map(ask, range(8)) if fence is not None]
    assert len(fences) == 1
    assert may_publish(leases, fences[0])


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_gives_no_number(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(tmp_path, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InsufficientStorage):
            acquire(leases)
    assert leases.current("p") is None
    acquire(leases)


def test_a_full_disk_ends_no_lease_but_those_that_have_expired(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(tmp_path, clock=clock)
    dead, alive = acquire(leases, policy="q"), acquire(leases)
    clock.tick(20)
    leases.renew("p", alive.fence, owner="team")
    clock.tick(20)
    monkeypatch.setattr(os, "fsync", full)
    leases.renew("p", alive.fence, owner="team")
    leases.check("p", alive.fence, owner="team")
    with pytest.raises(Conflict):
        leases.renew("q", dead.fence, owner="team")
    monkeypatch.undo()
    acquire(leases, "b", policy="r")  # what is written next knows that it has ended
    assert Leases(tmp_path, clock=clock).current("q") is None

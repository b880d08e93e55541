"""Who may queue, whose turn it is, and when to come again: without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.admission import Admission, Reservation
from rollout_server.auth import ANONYMOUS, Caller, Quota
from rollout_server.quotas import Bounds, Cost
from shared.errors import InvalidRequest, Overloaded
from tests.rollout_server.fakes import Clock

WIDE = Bounds(queued_samples=10**6, queued_tokens=10**9, running_samples=8)
NARROW = Bounds(queued_samples=100, queued_tokens=10**9, running_samples=8)


def caller(name: str, **quota: Any) -> Caller:
    return Caller(name, frozenset({"rollout"}), Quota(**quota))


def groups(count: int, samples: int = 8, tokens: int = 800) -> list[Cost]:
    return [Cost(samples, tokens)] * count


@dataclass
class Floor:
    """Requests whose groups run until the test ends them.

    Attributes:
        started: names of the requests, one for each group that began.
    """

    admission: Admission
    started: list[str] = field(default_factory=list)
    _ends: list[asyncio.Event] = field(default_factory=list)
    _requests: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def send(self, name: str, who: Caller, costs: Sequence[Cost]) -> None:
        """A request; it raises here if it is refused."""
        reservation = self.admission.admit(who, costs)
        self._requests[name] = asyncio.create_task(self._serve(name, reservation))

    async def _serve(self, name: str, reservation: Reservation) -> None:
        with reservation:
            async with asyncio.TaskGroup() as tasks:
                async for slot in reservation:
                    end = asyncio.Event()
                    self.started.append(name)
                    self._ends.append(end)
                    tasks.create_task(self._run(slot, end))

    async def _run(self, slot: Any, end: asyncio.Event) -> None:
        with slot:
            await end.wait()

    async def end(self, count: int = 1) -> None:
        """The oldest groups end, one after the other."""
        for _ in range(count):
            await settle()
            self._ends.pop(0).set()
        await settle()

    async def cancel(self, name: str) -> None:
        """Its caller hangs up."""
        self._requests[name].cancel()
        await settle()


async def settle() -> None:
    """Let everything happen that waits for nothing but its turn on the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


def on_floor(
    bounds: Bounds, act: Callable[[Floor], Coroutine[Any, Any, None]], **options: Any
) -> list[str]:
    """Which groups began in what order; afterwards nothing may be left over."""

    async def run() -> list[str]:
        floor = Floor(Admission(bounds, **options))
        await act(floor)
        await settle()
        started = floor.started.copy()
        for name in floor._requests:
            await floor.cancel(name)
        assert floor.admission.queued == Cost(0, 0)
        assert floor.admission.running_samples == 0
        return started

    return asyncio.run(run())


def test_groups_of_two_callers_alternate() -> None:
    async def act(floor: Floor) -> None:
        floor.send("big", caller("alice"), groups(1000))
        await settle()
        floor.send("small", caller("bob"), groups(3))
        await floor.end(8)

    # One of the big caller's runs already; from then on they take turns until bob has all.
    started = on_floor(WIDE, act)
    assert started == ["big", "small", "big", "small", "big", "small", "big", "big", "big"]


def test_weights_divide_the_engine() -> None:
    async def act(floor: Floor) -> None:
        floor.send("full", caller("alice"), groups(1))
        floor.send("light", caller("bob", weight=1), groups(100))
        floor.send("heavy", caller("carol", weight=3), groups(100))
        await floor.end(80)

    started = on_floor(WIDE, act)[1:]
    assert started.count("heavy") == 60
    for turns in range(4, len(started), 4):  # and at no time far from it
        assert abs(started[:turns].count("heavy") - turns * 3 / 4) <= 1


def test_turns_are_counted_in_tokens() -> None:
    async def act(floor: Floor) -> None:
        floor.send("full", caller("alice"), groups(1))
        floor.send("long", caller("bob"), groups(100, tokens=8000))
        floor.send("short", caller("carol"), groups(100, tokens=2000))
        await floor.end(50)

    assert on_floor(WIDE, act)[1:].count("long") == 10


def test_a_pause_gives_no_claim_on_the_past() -> None:
    async def act(floor: Floor) -> None:
        floor.send("early", caller("bob"), groups(1))
        await floor.end()
        floor.send("big", caller("alice"), groups(100))
        await floor.end(50)
        floor.send("late", caller("bob"), groups(10))
        await floor.end(6)

    assert on_floor(WIDE, act)[-6:] == ["late", "big"] * 3


def test_requests_of_one_caller_take_turns() -> None:
    async def act(floor: Floor) -> None:
        floor.send("first", ANONYMOUS, groups(100))
        floor.send("second", ANONYMOUS, groups(2))
        await floor.end(5)

    assert on_floor(WIDE, act) == ["first", "first", "second", "first", "second", "first"]


def test_slots_that_free_up_together_are_shared() -> None:
    async def act(floor: Floor) -> None:
        floor.send("full", caller("alice"), groups(4, samples=2))
        await settle()
        for index in range(4):
            floor.send(f"many {index}", caller("bob"), groups(10, samples=2))
        floor.send("one", caller("carol"), groups(10, samples=2))
        for end in floor._ends[:4]:  # all in one turn of the loop
            end.set()
        await settle()

    assert sorted(on_floor(WIDE, act)[4:]) == ["many 0", "many 1", "one", "one"]


def test_the_engine_gets_no_more_than_it_can_use() -> None:
    async def act(floor: Floor) -> None:
        floor.send("a", caller("alice"), groups(100, samples=3))
        await settle()
        assert floor.admission.running_samples == 9  # begun at 6, which was below 8
        assert floor.admission.queued == Cost(97 * 3, 97 * 800)
        await floor.end()
        assert floor.admission.running_samples == 9

    on_floor(WIDE, act)


def test_a_group_larger_than_the_engine_runs() -> None:
    async def act(floor: Floor) -> None:
        floor.send("huge", caller("alice"), groups(1, samples=64))
        floor.send("small", caller("bob"), groups(1))
        await floor.end(2)

    assert on_floor(WIDE, act) == ["huge", "small"]


def test_what_is_cancelled_leaves_at_once() -> None:
    async def act(floor: Floor) -> None:
        floor.send("big", caller("alice"), groups(100))
        floor.send("small", caller("bob"), groups(5))
        await settle()
        await floor.cancel("big")
        assert floor.started == ["big", "small"]
        assert floor.admission.queued == Cost(4 * 8, 4 * 800)
        assert floor.admission.running_samples == 8

    on_floor(WIDE, act)


def test_a_group_that_never_ran_gives_its_slot_back() -> None:
    async def run() -> None:
        admission = Admission(WIDE)
        with admission.admit(ANONYMOUS, groups(3)):
            assert admission.running_samples == 8
        assert admission.running_samples == 0
        assert admission.queued == Cost(0, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("costs", "name"),
    [
        (groups(11, samples=10), "max_queued_samples"),
        (groups(1, samples=1, tokens=10_001), "max_queued_tokens"),
    ],
)
def test_what_never_fits_is_not_told_to_come_again(costs: list[Cost], name: str) -> None:
    bounds = Bounds(queued_samples=100, queued_tokens=10_000, running_samples=8)
    with pytest.raises(InvalidRequest, match=name) as refused:
        Admission(bounds).admit(ANONYMOUS, costs)
    assert refused.value.retry_after is None


def test_beyond_the_bound_is_refused_with_the_numbers() -> None:
    refusals: list[tuple[str, str]] = []

    async def act(floor: Floor) -> None:
        floor.send("first", caller("alice"), groups(10))
        await settle()
        with pytest.raises(Overloaded) as refused:
            floor.admission.check(caller("bob"), groups(4))
        assert refused.value.details == {"max_queued_samples": {"most": 100, "queued": 72}}
        assert "72 of 100 samples" in str(refused.value)
        assert "up to 28" in str(refused.value)
        floor.send("fits", caller("bob"), groups(3))

    on_floor(NARROW, act, refused=lambda *who: refusals.append(who))
    assert refusals == [("bob", "max_queued_samples")]


def test_the_first_to_overflow_hears_of_the_tightest_bound() -> None:
    async def act(floor: Floor) -> None:
        floor.send("first", caller("alice"), groups(10))
        await settle()
        with pytest.raises(Overloaded, match="7200 of 10000 tokens"):
            floor.admission.check(caller("bob"), groups(4))

    on_floor(Bounds(queued_samples=1000, queued_tokens=10_000, running_samples=8), act)


def test_retry_after_is_the_time_until_there_is_room() -> None:
    clock = Clock()

    async def act(floor: Floor) -> None:
        floor.send("first", caller("alice"), groups(12))
        for _ in range(4):  # eight samples every two seconds
            await settle()
            clock.tick(2)
            await floor.end()
        assert floor.admission.queued.samples == 56
        with pytest.raises(Overloaded) as refused:
            floor.admission.check(caller("bob"), groups(6))
        assert refused.value.retry_after == 1  # 4 samples have to go: a second
        with pytest.raises(Overloaded) as refused:
            floor.admission.check(caller("bob"), groups(12))
        assert refused.value.retry_after == 13  # 52 have to go

    on_floor(NARROW, act, clock=clock)


def test_idle_time_does_not_make_the_server_slow() -> None:
    clock = Clock()

    async def act(floor: Floor) -> None:
        floor.send("warm", caller("alice"), groups(2))
        for _ in range(2):
            await settle()
            clock.tick(2)
            await floor.end()
        clock.tick(3600)
        floor.send("first", caller("alice"), groups(12))
        with pytest.raises(Overloaded) as refused:
            floor.admission.check(caller("bob"), groups(11))
        assert refused.value.retry_after == 19  # 76 samples at 4 a second

    on_floor(NARROW, act, clock=clock)


def test_before_anything_has_ended_the_wait_grows_with_what_runs() -> None:
    clock = Clock()

    async def act(floor: Floor) -> None:
        floor.send("first", caller("alice"), groups(12))
        waits: list[float] = []
        for _ in range(3):
            with pytest.raises(Overloaded) as refused:
                floor.admission.check(caller("bob"), groups(11))
            waits.append(refused.value.retry_after or 0.0)
            clock.tick(5)
        assert waits[0] == 1
        assert waits == sorted(set(waits))

    on_floor(NARROW, act, clock=clock)


def test_what_was_cancelled_says_nothing_about_speed() -> None:
    clock = Clock()

    async def act(floor: Floor) -> None:
        floor.send("gone", caller("carol"), groups(1))
        floor.send("first", caller("alice"), groups(12))
        await settle()
        await floor.cancel("gone")
        floor._ends.pop(0)
        clock.tick(2)
        await floor.end()
        with pytest.raises(Overloaded) as refused:
            floor.admission.check(caller("bob"), groups(12))
        assert refused.value.retry_after == 19  # 76 samples at 4 a second

    on_floor(NARROW, act, clock=clock)


def test_a_quota_on_the_queue_is_the_callers_own() -> None:
    async def act(floor: Floor) -> None:
        alice = caller("alice", max_queued_samples=20)
        floor.send("first", alice, groups(2))
        await settle()
        floor.send("second", alice, groups(1))
        with pytest.raises(Overloaded, match="16 of 20 samples") as refused:
            floor.admission.check(alice, groups(1))
        assert refused.value.problems[0].where == "max_queued_samples of 'alice'"
        with pytest.raises(InvalidRequest, match="'alice'"):
            floor.admission.check(alice, groups(3))
        floor.send("other", caller("bob"), groups(100))

    on_floor(WIDE, act)


def test_a_quota_on_what_runs_leaves_the_rest_to_others() -> None:
    async def act(floor: Floor) -> None:
        alice = caller("alice", max_running_samples=5)
        floor.send("first", alice, groups(10, samples=2))
        await settle()
        assert floor.admission.running_samples == 4
        floor.send("other", caller("bob"), groups(10, samples=2))
        await settle()
        assert floor.started.count("first") == 2
        assert floor.started.count("other") == 2
        with pytest.raises(InvalidRequest, match="this token's max_running_samples"):
            floor.admission.check(alice, groups(1, samples=6))

    on_floor(WIDE, act)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 12), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    )
)
def test_every_group_runs_once_and_the_books_balance(
    requests: list[tuple[int, int, int, int]],
) -> None:
    """Whatever comes, ends and is cancelled in between."""

    async def act(floor: Floor) -> None:
        kept: dict[str, int] = {}
        for number, (who, count, samples, ends) in enumerate(requests):
            quota = {"max_running_samples": 12} if who == 3 else {}
            floor.send(str(number), caller(f"caller {who}", **quota), groups(count, samples))
            kept[str(number)] = count
            await floor.end(min(ends, len(floor._ends)))
            if number % 5 == 4:
                await floor.cancel(str(number))
                del kept[str(number)]
        while any(not floor._requests[name].done() for name in kept):
            await floor.end()
        assert {name: floor.started.count(name) for name in kept} == kept

    on_floor(WIDE, act)

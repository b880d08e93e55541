"""Who may queue how much, and whose group runs next.

    with admission.admit(caller, [Cost(samples=8, tokens=8 * 600)] * 100) as reservation:
        await reservation.run_each(run)  # run(slot) releases the slot; slot.index says which group

What is admitted waits here, not in the engine, which gets only as many samples as keep it busy.
Groups of different callers take turns by start-time fair queueing (Goyal, Vin and Cheng 1996): each
caller has a virtual time, which a group advances by its tokens over the caller's weight; the caller
with the least goes next, and one that comes back from a pause starts at the current virtual time,
with no claim on the past. So a small caller waits for about one turn, however much others have
queued. Requests of one caller take turns too, group by group.

Not thread-safe: use it from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rollout_server.auth import Caller, Quota
from rollout_server.quotas import Bounds, Cost, Limit, Load, overloaded, total_of
from rollout_server.throughput import Throughput
from shared.errors import InvalidRequest, Problem


class Slot:
    """One group's leave to run; release it when the group has ended, one way or another.

    Attributes:
        index: which of the reservation's groups.
        cost: what it takes.
    """

    def __init__(self, reservation: Reservation, index: int, cost: Cost) -> None:
        self._reservation = reservation
        self.index = index
        self.cost = cost

    def release(self, *, finished: bool = True) -> None:
        """Make room for the next group. Again has no effect."""
        self._reservation.end(self, finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release(finished=kind is None)


class Reservation:
    """Groups that were admitted: an async iterator of slots, in order, as their turns come.

    Leaving the context takes whatever has not ended out of the queue and off the engine's count.
    """

    def __init__(self, admission: Admission, line: _Line, groups: Sequence[Cost]) -> None:
        self._admission = admission
        self._line = line
        self._groups = deque(groups)
        self._granted = 0
        self._unclaimed: deque[Slot] = deque()
        self._running: set[Slot] = set()
        self._turn = asyncio.Event()

    @property
    def next(self) -> Cost:
        """The next group to start."""
        return self._groups[0]

    def start(self) -> bool:
        """Its turn has come. Returns whether there are more groups."""
        slot = Slot(self, self._granted, self._groups.popleft())
        self._granted += 1
        self._running.add(slot)
        self._unclaimed.append(slot)
        self._turn.set()
        return bool(self._groups)

    def end(self, slot: Slot, finished: bool) -> None:
        """A slot is free again."""
        if slot in self._running:
            self._running.remove(slot)
            self._admission.end(self._line, slot.cost, finished)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Slot:
        if not (self._groups or self._unclaimed):
            raise StopAsyncIteration
        # Starting a group takes a good part of a millisecond, so others get a word in between.
        await asyncio.sleep(0)
        while not self._unclaimed:
            self._turn.clear()
            await self._turn.wait()
        return self._unclaimed.popleft()

    async def run_each(self, run: Callable[[Slot], Coroutine[Any, Any, None]]) -> None:
        """Run every group when its turn comes, side by side; the first failure cancels the others.

        Args:
            run: a group's work, which releases the slot in the end.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                async for slot in self:
                    tasks.create_task(run(slot))
        except ExceptionGroup as failures:
            # It is the one to tell of.
            raise failures.exceptions[0] from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self._line, self, self._groups)
        self._groups.clear()
        for slot in list(self._running):
            slot.release(finished=False)


class Admission:
    """Admits requests within bounds and quotas, and hands out the engine's slots in turn.

    Args:
        bounds: over all callers.
        clock: seconds, monotonic.
        refused: told the caller's name and the limit whenever somebody is turned away.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[str, str], None] = lambda _, __: None,
    ) -> None:
        self._bounds = bounds
        self._clock = clock
        self._refused = refused
        self._load = Load(Throughput(clock))
        self._lines: dict[str, _Line] = {}
        self._virtual_time = 0.0

    @property
    def queued(self) -> Cost:
        """What waits."""
        return Cost(self._load.queued_samples, self._load.queued_tokens)

    @property
    def running_samples(self) -> int:
        """What the engine has."""
        return self._load.running_samples

    def check(self, caller: Caller, groups: Sequence[Cost]) -> None:
        """Go on only if a request could be admitted just now.

        Raises:
            InvalidRequest: it never could.
            Overloaded: others have to finish first; ``retry_after`` estimates when they will have.
        """
        line = self._line(caller)
        most = line.quota.max_running_samples
        largest = max((cost.samples for cost in groups), default=0)
        if most is not None and largest > most:
            problem = Problem("group_size", str(largest), f"up to {most}")
            reason = "group_size exceeds this token's max_running_samples"
            raise InvalidRequest(reason, problems=[problem])
        limits = list(self._limits(line, total_of(groups)))
        if never := [limit for limit in limits if limit.asked > limit.most]:
            problems = [limit.problem(limit.most) for limit in never]
            raise InvalidRequest("the request is larger than the queue", problems=problems)
        if full := [limit for limit in limits if limit.excess > 0]:
            self._refused(caller.name, full[0].name)
            raise overloaded(full)

    def admit(self, caller: Caller, groups: Sequence[Cost]) -> Reservation:
        """Queue all groups of a request, or nothing. Use what is returned as a context manager.

        Args:
            caller: whose turn and quota they take.
            groups: in the order in which they shall start.

        Raises:
            InvalidRequest, Overloaded: see :meth:`check`.
        """
        self.check(caller, groups)
        line = self._line(caller)
        reservation = Reservation(self, line, groups)
        for load in (self._load, line.load):
            load.enter(total_of(groups))
        if not line.waiting:
            line.virtual_time = max(line.virtual_time, self._virtual_time)
        if groups:
            line.waiting[reservation] = None
        self._dispatch()
        return reservation

    def end(self, line: _Line, cost: Cost, finished: bool) -> None:
        """A group has ended."""
        for load in (self._load, line.load):
            load.end(cost, finished)
        self._dispatch()

    def leave(self, line: _Line, reservation: Reservation, groups: Sequence[Cost]) -> None:
        """Groups of a reservation that have not begun shall not."""
        line.waiting.pop(reservation, None)
        for load in (self._load, line.load):
            load.leave(total_of(groups))
        self._dispatch()  # what left may have stood in the way of the caller's next request

    def _line(self, caller: Caller) -> _Line:
        if caller.name not in self._lines:
            self._lines[caller.name] = _Line(caller, Load(Throughput(self._clock)))
        return self._lines[caller.name]

    def _limits(self, line: _Line, asked: Cost) -> Iterator[Limit]:
        bounds, quota = self._bounds, line.quota
        yield Limit.of_samples("max_queued_samples", bounds.queued_samples, self._load, asked)
        yield Limit.of_tokens("max_queued_tokens", bounds.queued_tokens, self._load, asked)
        if quota.max_queued_samples is not None:
            name = f"max_queued_samples of {line.caller.name!r}"
            yield Limit.of_samples(name, quota.max_queued_samples, line.load, asked)

    def _dispatch(self) -> None:
        while self._load.running_samples < self._bounds.running_samples:
            ready = [line for line in self._lines.values() if line.may_start]
            if not ready:
                break
            self._start_next(min(ready, key=lambda line: line.virtual_time))

    def _start_next(self, line: _Line) -> None:
        self._lines[line.caller.name] = self._lines.pop(line.caller.name)  # loses the next tie
        reservation, _ = line.waiting.popitem(last=False)
        cost = reservation.next
        self._virtual_time = max(self._virtual_time, line.virtual_time)
        line.virtual_time += cost.tokens / line.quota.weight
        for load in (self._load, line.load):
            load.start(cost)
        if reservation.start():
            line.waiting[reservation] = None


@dataclass(slots=True, eq=False)
class _Line:
    """One caller; its reservations that have groups left to start take turns."""

    caller: Caller
    load: Load
    virtual_time: float = 0.0
    waiting: OrderedDict[Reservation, None] = field(default_factory=OrderedDict)

    @property
    def quota(self) -> Quota:
        return self.caller.quota

    @property
    def may_start(self) -> bool:
        if not self.waiting:
            return False
        most = self.quota.max_running_samples
        return (
            most is None
            or self.load.running_samples + next(iter(self.waiting)).next.samples <= most
        )

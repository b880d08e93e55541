"""Rollouts as work that outlives a connection.

A job is one rollout. Whoever asked for it is attached to it; when nobody is, it is cancelled,
unless its caller named it with an idempotency key. Such a job goes on for a while, and what it made
is kept for a while, so that the same request, sent again, attaches to it and nothing is sampled
twice. A job that failed is forgotten: the same request then runs again.

Not thread-safe: use it from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollout_server.auth import Caller
from rollout_server.job import Job, Name
from rollout_server.logs import event
from rollout_server.policies import Policies, Policy
from rollout_server.preconditions import hold
from rollout_server.recent import RecentGroups, RecentRollout
from rollout_server.rollouts import RolloutService
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailure,
    EngineUnavailable,
    InvalidRequest,
    Problem,
    TitoError,
)
from shared.protocol import IDEMPOTENCY_HEADER, Group
from shared.requests import RolloutRequest

log = logging.getLogger("tito.jobs")

_CLOSING = EngineUnavailable("the server is closing")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long named jobs are there for those who come back.

    Attributes:
        grace_s: that unfinished work goes on without a caller.
        kept_s: that finished groups are kept.
        kept_bytes: of finished jobs at most; the one asked for longest ago goes first.
    """

    grace_s: float
    kept_s: float
    kept_bytes: int


class Jobs:
    """Runs rollouts, and keeps those that have a name.

    Args:
        rollouts: samples.
        policies: to sample from.
        retention: how long named jobs are there.
        observe: told each group that is finished.
        recent: where groups are kept to be looked at, if they are.
    """

    def __init__(
        self,
        rollouts: RolloutService,
        policies: Policies,
        *,
        retention: Retention,
        observe: Callable[[Group], None],
        recent: RecentGroups | None = None,
    ) -> None:
        self._rollouts = rollouts
        self._policies = policies
        self._retention = retention
        self._observe = observe
        self._recent = recent
        self._running: set[Job] = set()
        # By caller and key; the one that was asked for longest ago comes first.
        self._named: OrderedDict[tuple[str, str], Job] = OrderedDict()
        self._kept_bytes = 0

    @contextlib.contextmanager
    def attached(
        self, caller: Caller, request: RolloutRequest, name: Name | None = None
    ) -> Iterator[Job]:
        """The job of a request: a new one, or the one that has its name already.

        Raises:
            InvalidRequest: a setting cannot be used, or the key belongs to another request.
            NotFound: there is no such policy.
            Overloaded: the queue has no room for it.
        """
        job = None if name is None else self._find(name, request)
        if job is None:
            job = self._begin(caller, request, name)
        job.attached += 1
        try:
            yield job
        finally:
            job.attached -= 1
            self._settle(job)

    def cancel(self, caller: Caller, key: str) -> bool:
        """Stop and forget a named job; whether there was one."""
        job = self._named.get((caller.name, key))
        if job is not None:
            self._drop(job, Conflict("the rollout was cancelled by its caller"))
        return job is not None

    def close(self) -> None:
        """Stop everything."""
        for job in list(self._running):
            self._drop(job, _CLOSING)

    def _find(self, name: Name, request: RolloutRequest) -> Job | None:
        job = self._named.get(name[:2])
        if job is None:
            return None
        assert job.name is not None
        if job.name.fingerprint != name.fingerprint:
            allowed = "the request that the key was first sent with, or another key"
            problem = Problem(IDEMPOTENCY_HEADER, repr(name.key), allowed)
            raise InvalidRequest("this key belongs to another request", problems=[problem])
        if left_out := job.had - set(request.have):
            raise Conflict(
                f"group {min(left_out)} was not sampled under this key: the request that began it "
                "had that group already"
            )
        self._named.move_to_end(name[:2])
        self._cancel_timer(job)
        return job

    def _begin(self, caller: Caller, request: RolloutRequest, name: Name | None) -> Job:
        self._rollouts.check(caller, request)
        policy = self._policies[request.policy]
        job = Job(caller, name, request.have)
        if name is not None:
            self._named[name[:2]] = job
        self._running.add(job)
        job.task = asyncio.create_task(self._run(job, request, policy))
        job.task.add_done_callback(lambda _: self._ended(job))
        return job

    async def _run(self, job: Job, request: RolloutRequest, policy: Policy) -> None:
        try:
            async with asyncio.timeout(request.deadline_seconds) as deadline:
                await self._sample(job, request, policy)
        except Exception as error:
            job.failure = _at_deadline(job, request) if deadline.expired() else _told(job, error)

    async def _sample(self, job: Job, request: RolloutRequest, policy: Policy) -> None:
        # Bad prompts are told of at once, and not after a wait for a version.
        prompts = await self._rollouts.prepare(request)
        await hold(policy, request)
        looked_at: contextlib.AbstractContextManager[RecentRollout | None] = (
            contextlib.nullcontext()
            if self._recent is None
            else self._recent.rollout(job.caller.name, request, prompts, lambda: policy.version)
        )
        queued = self._rollouts.admit(job.caller, request, prompts)
        with queued as reservation, looked_at as rollout:
            job.begin(self._rollouts.heading(request, policy))

            def finished(group: Group) -> None:
                self._observe(group)
                _log_group(group, policy)
                if rollout is not None:
                    rollout.finished(group)
                job.add(group)

            await self._rollouts.run(request, policy, prompts, reservation, finished)
        if lost := len(prompts) - len(job.groups) - len(job.had):
            raise EngineFailure(f"the engine dropped {lost} of {len(prompts)} groups")

    def _ended(self, job: Job) -> None:
        job.ended = True
        self._running.discard(job)
        if job.failure is None and job.task is not None and job.task.cancelled():
            job.failure = _CLOSING
        if self._is_named(job):
            self._kept_bytes += job.size
        _log_end(job)
        self._settle(job)
        job.tell()

    def _settle(self, job: Job) -> None:
        """Decide how long a job stays, now that it has ended or somebody has left."""
        self._cancel_timer(job)
        if job.ended and job.failure is not None:
            self._drop(job)
        elif not job.attached and job.name is None:
            self._drop(job, Conflict("nobody waits for the rollout any more"))
        elif not job.attached and self._is_named(job):
            seconds = self._retention.kept_s if job.ended else self._retention.grace_s
            reason = Conflict("nobody came back for the rollout in time")
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(seconds, self._drop, job, reason)
            self._trim()

    def _trim(self) -> None:
        """Let go of finished jobs that nobody is attached to, until the rest fit."""
        while self._kept_bytes > self._retention.kept_bytes:
            kept = (job for job in self._named.values() if job.ended and not job.attached)
            if (oldest := next(kept, None)) is None:
                break
            self._drop(oldest)

    def _drop(self, job: Job, reason: TitoError | None = None) -> None:
        self._cancel_timer(job)
        if reason is not None:
            job.stop(reason)
        if self._is_named(job):
            assert job.name is not None
            del self._named[job.name[:2]]
            self._kept_bytes -= job.size if job.ended else 0

    def _is_named(self, job: Job) -> bool:
        return job.name is not None and self._named.get(job.name[:2]) is job

    @staticmethod
    def _cancel_timer(job: Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None


def _log_group(group: Group, policy: Policy) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    event(
        log,
        logging.DEBUG,
        "group",
        group=group.id,
        policy=policy.name,
        version=group.samples[0].version,
        samples=len(group.samples),
        tokens=sum(len(sample.completion_ids) for sample in group.samples),
    )


def _log_end(job: Job) -> None:
    event(
        log,
        logging.INFO,
        "rollout",
        caller=job.caller.name,
        policy=job.heading.policy if job.heading else None,
        groups=len(job.groups),
        versions=",".join(map(str, sorted({s.version for g in job.groups for s in g.samples}))),
        failure=job.failure.code if job.failure else None,
    )


def _told(job: Job, error: Exception) -> TitoError:
    """A failure in words that a caller may hear."""
    if isinstance(error, TitoError):
        return error
    log.error("unexpected error in a rollout of %s", job.caller.name, exc_info=error)
    return EngineFailure(f"unexpected {type(error).__name__}: {error}")


def _at_deadline(job: Job, request: RolloutRequest) -> TitoError | None:
    """What a deadline makes of a job: a failure, or an answer that says what is missing."""
    seconds = request.deadline_seconds
    if job.heading is None:
        return DeadlineExceeded(f"sampling had not begun after deadline_seconds = {seconds:g}")
    finished = job.had.union(group.group_id for group in job.groups)
    missing = [index for index in range(len(request.prompts)) if index not in finished]
    if not request.partial:
        return DeadlineExceeded(
            f"{len(missing)} of {len(request.prompts)} groups were not finished after "
            f"deadline_seconds = {seconds:g}; ask for partial to get those that are"
        )
    job.missing = tuple(missing)
    return None

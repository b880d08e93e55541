"""One writer for each policy: leases that run out by themselves, numbers that fence off the late.

A lease belongs to one holder for a time to live, which its heartbeats renew. Its fencing number is
higher than any that was ever handed out, for any policy, so that of two writers who both believe
in their lease the number tells which is the later one. A publish names its number; it is checked
when the upload begins and again just before the load, so a publish of an old lease is refused
however late it arrives. Once a lease has run out it is gone, even if nobody has taken its place.

What must not be forgotten lies in one small file: the last number, written before it is handed
out, and who holds what. After a restart every lease has its whole time to live once more, so a
trainer whose server was restarted goes on, and one that died meanwhile is soon found out.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_server.lease_file import Lease, first_number, read_leases, write_leases
from rollout_server.staging import storage_errors
from shared.errors import Conflict, Forbidden, InsufficientStorage, InvalidRequest, Problem

_FILE = "leases.json"
_COMMIT_RETRY_S = 1.0


class Leases:
    """Who may publish which policy. Thread-safe; acquiring and releasing wait for the disk.

    Args:
        directory: where they survive a restart; None forgets them.
        require: refuse to publish without a lease. Else that is allowed while nobody holds one.
        max_ttl_s: longest time to live that is granted.
        clock: seconds, monotonic.

    Raises:
        LeaseFileError: the file in the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        require: bool = False,
        max_ttl_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = None if directory is None else directory / _FILE
        self._require = require
        self.max_ttl_s = max_ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._committing: Counter[str] = Counter()
        self._last_fence = first_number()
        self._leases: dict[str, Lease] = {}
        if self._file is not None:
            self._last_fence, self._leases = read_leases(self._file, clock())

    def acquire(self, policy: str, holder: str, ttl_s: float, *, owner: str) -> Lease:
        """Become the one writer of a policy.

        The same holder of the same owner may acquire again and gets a new number; the old one is
        void from then on.

        Raises:
            Conflict: another trainer holds it, or a publish is being loaded; ``retry_after`` says
                when to ask again, ``details`` who holds it.
            InvalidRequest: it would live too long.
        """
        if ttl_s > self.max_ttl_s:
            problem = Problem("ttl_seconds", str(ttl_s), f"up to {self.max_ttl_s}")
            raise InvalidRequest("the lease would live too long", problems=[problem])
        with self._lock:
            self._drop_expired()
            if policy in self._committing:
                reason = f"a publish of policy {policy!r} is being loaded"
                raise Conflict(reason, retry_after=_COMMIT_RETRY_S)
            current = self._leases.get(policy)
            if current and (current.holder, current.owner) != (holder, owner):
                reason = f"policy {policy!r} is leased to {current.holder!r}"
                left = self.seconds_left(current)
                raise Conflict(reason, retry_after=left, details=self._details(policy))
            number, expires_at = self._last_fence + 1, self._clock() + ttl_s
            lease = Lease(policy, holder, owner, number, ttl_s, expires_at)
            self._keep(number, {**self._leases, policy: lease})
            return lease

    def renew(self, policy: str, fence: int, *, owner: str) -> Lease:
        """Let a lease live for its whole time again.

        Raises:
            Conflict: it has run out or was taken over; it does not come back.
            Forbidden: it is another caller's.
        """
        with self._lock:
            self._drop_expired()
            lease = self._held(policy, fence, owner)
            renewed = replace(lease, expires_at=self._clock() + lease.ttl_s)
            self._leases = {**self._leases, policy: renewed}
            return renewed

    def release(self, policy: str, fence: int, *, owner: str) -> None:
        """Give a lease up, so that others need not wait for its end.

        Raises:
            Conflict, Forbidden: as for :meth:`renew`.
        """
        with self._lock:
            self._drop_expired()
            self._held(policy, fence, owner)
            self._keep(self._last_fence, _without(self._leases, policy))

    def revoke(self, policy: str) -> None:
        """Free a policy whoever holds it: for an operator, when a trainer hangs but still beats."""
        with self._lock:
            self._keep(self._last_fence, _without(self._leases, policy))

    def current(self, policy: str) -> Lease | None:
        """The lease that is held on a policy now."""
        lease = self._leases.get(policy)
        return lease if lease and self._is_alive(lease) else None

    def seconds_left(self, lease: Lease) -> float:
        """How long a lease lives if it is not renewed."""
        return max(0.0, lease.expires_at - self._clock())

    def check(self, policy: str, fence: int | None, *, owner: str) -> None:
        """Go on only if this publish may be made.

        Raises:
            Conflict: the number is old, or there is none although one is needed; ``details`` has
                the current ``fence``, its ``holder`` and ``seconds_left``.
            Forbidden: the number is another caller's.
        """
        with self._lock:
            self._check(policy, fence, owner)

    @contextlib.contextmanager
    def commit(self, policy: str, fence: int | None, *, owner: str) -> Iterator[None]:
        """Load weights inside; no lease runs out or changes hands until that has ended.

        Otherwise a new holder could read the live version and see an older publish replace it.

        Raises:
            Conflict, Forbidden: as for :meth:`check`; nothing may be loaded.
        """
        with self._lock:
            self._check(policy, fence, owner)
            self._committing.update([policy])
        try:
            yield
        finally:
            with self._lock:
                self._committing -= Counter([policy])  # forgets the name at zero

    def _check(self, policy: str, fence: int | None, owner: str) -> None:
        self._drop_expired()
        if fence is not None:
            self._held(policy, fence, owner)
        elif policy in self._leases:
            holder = self._leases[policy].holder
            reason = f"policy {policy!r} is leased to {holder!r}; publish under a lease of your own"
            raise Conflict(reason, details=self._details(policy))
        elif self._require:
            reason = f"this server takes weights for {policy!r} under a lease only"
            raise Conflict(reason, details=self._details(policy))

    def _is_alive(self, lease: Lease) -> bool:
        return lease.expires_at > self._clock() or lease.policy in self._committing

    def _drop_expired(self) -> None:
        alive = {name: lease for name, lease in self._leases.items() if self._is_alive(lease)}
        if len(alive) < len(self._leases):
            try:
                self._keep(self._last_fence, alive)  # else a restart would bring them back
            except InsufficientStorage:
                self._leases = alive  # which does no harm: nobody has followed these

    def _held(self, policy: str, fence: int, owner: str) -> Lease:
        lease = self._leases.get(policy)
        if lease is None or lease.fence != fence:
            now = f"{lease.holder!r} holds a newer one" if lease else "nobody holds one now"
            reason = f"lease {fence} of policy {policy!r} has ended; {now}"
            raise Conflict(reason, details=self._details(policy))
        if lease.owner != owner:
            raise Forbidden(f"lease {fence} of policy {policy!r} belongs to another caller")
        return lease

    def _details(self, policy: str) -> dict[str, Any]:
        lease = self._leases.get(policy)
        if lease is None:
            return {"fence": None, "holder": None, "seconds_left": 0.0}
        left = self.seconds_left(lease)
        return {"fence": lease.fence, "holder": lease.holder, "seconds_left": left}

    def _keep(self, last_fence: int, leases: dict[str, Lease]) -> None:
        """Write first, believe it afterwards: a number that is not on the disk is not given."""
        if self._file is not None:
            with storage_errors():
                write_leases(self._file, last_fence, leases)
        self._last_fence, self._leases = last_fence, leases


def _without(leases: dict[str, Lease], policy: str) -> dict[str, Lease]:
    return {name: lease for name, lease in leases.items() if name != policy}

"""One rollout server, as far as a run knows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shared.client import RolloutClient
from shared.errors import ServerUnreachable, TitoError
from shared.lease import Lease
from shared.protocol import ReloadResult, ServerInfo

LEASE_TTL_S = 60.0
_MAX_PAUSE_S = 10.0


class Server:
    """What a run holds of one server, and what it knows of it. :class:`ServerPool` locks it.

    Args:
        url: where it is.
        client: for everything that may take long.
        probe: for asking whether it is ready; its timeout should be short.

    Attributes:
        live: what it serves, while it is current; None while it is set aside.
        was_current: whether it ever was, so that what it knows of the run may be lost.
        trouble: why it was set aside, or that it was not asked yet.
        ready: whether it has been seen ready since.
        lease: the right to publish to it.
        sleeps: it was put to sleep, and not woken since.
        samples, last_asked: how many it works on for this run; when the last were asked for.
    """

    def __init__(self, url: str, client: RolloutClient, probe: RolloutClient) -> None:
        self.url = url
        self.client = client
        self.live: ReloadResult | None = None
        self.was_current = False
        self.trouble: TitoError = ServerUnreachable(f"no answer from {url} yet")
        self.ready = False
        self.lease: Lease | None = None
        self.sleeps = False
        self.samples = 0
        self.last_asked = 0.0
        self._probe = probe
        self._failures = 0
        self._look_after = 0.0
        self._idle_s = 0.0
        self._idle_since = time.monotonic()

    def take_lease(self, holder: str) -> ServerInfo:
        """Get the right to publish; what kind of server it is.

        Raises:
            Conflict: somebody else has it.
        """
        self.ready = False
        info = self.client.info()
        self.release()
        lease = self.client.lease(holder=holder, ttl=LEASE_TTL_S)
        lease.__enter__()
        self.lease = lease
        return info

    def release(self) -> None:
        """Give the right to publish back, if it has it."""
        if self.lease is not None:
            self.lease.__exit__()
            self.lease = None

    def sleep(self, level: int) -> None:
        """Let it hand memory back until :meth:`woken`, or until its lease ends."""
        assert self.lease is not None
        with self._awake_if_it_fails():
            self.client.sleep(level, fence=self.lease.fence)
        self.sleeps = True

    @contextmanager
    def woken(self) -> Iterator[None]:
        """Inside, it can take weights; afterwards it generates, whatever became of them."""
        if not self.sleeps:
            yield
            return
        # However this ends: one that fails to wake up has its engine replaced.
        self.sleeps = False
        with self._awake_if_it_fails():
            self.client.wake_up("weights")
        try:
            yield
        finally:
            with self._awake_if_it_fails():
                self.client.wake_up()

    @contextmanager
    def _awake_if_it_fails(self) -> Iterator[None]:
        """A call whose answer was lost may have left it asleep: that ends with the lease."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def close(self) -> None:
        """Close the connections; requests under way fail."""
        self.client.close()
        self._probe.close()

    def became_current(self, live: ReloadResult) -> None:
        """It took what was published."""
        self.live, self.was_current, self._failures = live, True, 0

    def set_aside(self, error: TitoError) -> None:
        """It is not current any more."""
        self.live, self.ready, self.trouble = None, False, error

    def leave_alone_for_a_while(self) -> None:
        """It may be ready and refuse every publish, each of which costs the sending."""
        self._look_after = time.monotonic() + min(2.0**self._failures, _MAX_PAUSE_S)
        self._failures += 1

    def look(self) -> None:
        """Ask whether it is ready, if that is of interest."""
        if self.live is not None or self.ready or time.monotonic() < self._look_after:
            return
        try:
            self._probe.wait_ready(0.0)
            self.ready = True
        except TitoError as error:
            self.trouble = error
        except RuntimeError:  # the probe was closed meanwhile
            pass

    def begin(self, samples: int) -> None:
        """It is asked for some samples."""
        self.last_asked = time.monotonic()
        if self.samples == 0:
            self._idle_s += self.last_asked - self._idle_since
        self.samples += samples

    def end(self, samples: int) -> None:
        """It has answered, or never will."""
        self.samples -= samples
        if self.samples == 0:
            self._idle_since = time.monotonic()

    def idle_seconds(self) -> float:
        """How long it had nothing to do for this run since the last call."""
        if self.samples == 0:
            now = time.monotonic()
            self._idle_s += now - self._idle_since
            self._idle_since = now
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

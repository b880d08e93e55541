"""The rollout servers of a run: work for the least loaded, weights for all, the dead brought back.

A server is *current* while it serves what was published last, under a lease of this run; only
current ones are asked. One that fails is set aside and the rest goes on. A thread watches for it,
and once it is ready again it gets a lease and the weights, and is asked as before.

Everything that publishes is called by the thread that trains, for only there the model holds still;
``rollout`` may be called by any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from shared.calls import PromptLike
from shared.client import RolloutClient
from shared.errors import (
    Conflict,
    EngineFailure,
    EngineUnavailable,
    InsufficientStorage,
    Overloaded,
    PreconditionFailed,
    ServerUnreachable,
    TitoError,
)
from shared.lease import Lease
from shared.protocol import ReloadResult, Rollout
from trainer.agreement import refuse_other_tokenizer
from trainer.background import in_background
from trainer.published import Published

LEASE_TTL_S = 60.0
_LOOK_S = 0.25
_MAX_PAUSE_S = 10.0
_ENGINE_FAILURES = 3

_LOST = (ServerUnreachable, EngineUnavailable, PreconditionFailed)
"""What a rollout fails with when its server is no longer what it was."""
_UNFIT = (*_LOST, EngineFailure, InsufficientStorage, Overloaded)
"""What a publish fails with for a reason of that server alone."""

Publish = Callable[[RolloutClient, int], ReloadResult]
"""Sends the model as it is now, under a fencing number."""


class Server:
    """One rollout server, as far as this run knows it.

    Args:
        url: where it is.
        client: for everything that may take long.
        probe: for asking whether it is ready; its timeout should be short.

    Attributes:
        live: what it serves, while it is current; None while it is set aside.
        trouble: why it was set aside, or that it was not asked yet.
        ready: whether it has been seen ready since.
        samples, last_asked: how many it works on for this run; when the last were asked for.
        failures, look_after: publishes that failed one after the other, and until when it is left
            alone for that.
    """

    def __init__(self, url: str, client: RolloutClient, probe: RolloutClient) -> None:
        self.url = url
        self.client = client
        self.probe = probe
        self.live: ReloadResult | None = None
        self.trouble: TitoError = ServerUnreachable(f"no answer from {url} yet")
        self.ready = False
        self.lease: Lease | None = None
        self.was_current = False
        self.failures = 0
        self.look_after = 0.0
        self.samples = 0
        self.last_asked = 0.0
        self.idle_s = 0.0
        self.idle_since = time.monotonic()


class ServerPool:
    """All servers of a run; a context manager that holds their leases.

    Attributes:
        latest: what a server answered to the latest publish; all versions are its own.

    Args:
        servers: at least one.
        publish: sends the model.
        published: learns what was published; tells which step weights are of.
        holder: name on the leases. The run's, so that resuming takes those of a dead process over.
        fingerprint: of the trainer's tokenizer, which every server must share.
        patience: seconds to wait while there is no current server at all.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        publish: Publish,
        published: Published,
        *,
        holder: str,
        fingerprint: str,
        patience: float,
    ) -> None:
        self.published = published
        self.latest = ReloadResult(0, "")
        self.vocab_size = 0
        self._servers = servers
        self._publish = publish
        self._holder = holder
        self._fingerprint = fingerprint
        self._patience = patience
        self._step = 0
        self._closed = threading.Event()
        self._changed = threading.Condition()

    @property
    def current(self) -> list[Server]:
        """Those that serve what was published last."""
        return [server for server in self._servers if server.live is not None]

    @property
    def size(self) -> int:
        """How many there are, current or not."""
        return len(self._servers)

    @property
    def client(self) -> RolloutClient:
        """A client of a current server; waits for one as ``ensure`` does."""
        while not (current := self.current):
            self.ensure()
        return current[0].client

    def troubles(self) -> str | None:
        """Which servers do not serve the current policy, and why; None when all do."""
        aside = [server for server in self._servers if server.live is None]
        if not aside:
            return None
        reasons = "; ".join(f"{server.url}: {server.trouble.message}" for server in aside)
        return f"{len(aside)} of {len(self._servers)} not current: {reasons}"

    # Publishing.

    def publish(self, step: int) -> None:
        """Make the servers sample from the model as it is after ``step``, all at the same time.

        Those that cannot take it are set aside; ``troubles`` says which.

        Raises:
            WeightsRejected: the weights are unfit for any server.
            Conflict: somebody else holds a server's lease.
            MismatchError: a server has another tokenizer.
            ServerUnreachable, EngineUnavailable, ...: no server took it, for all of the patience.
        """
        self._step = step
        self._bring([server for server in self._servers if server.live or server.ready])
        self.ensure()

    def keep(self, step: int) -> None:
        """The model was not changed by ``step``: what the servers have is the policy after it."""
        self._step = step
        for server in self.current:
            if server.live is not None:
                self.published.note(server.live.digest, step)

    def ensure(self) -> None:
        """Publish to servers that have come back, and wait for one if none is current.

        Raises:
            As ``publish``.
        """
        deadline = time.monotonic() + self._patience
        while True:
            self._bring([s for s in self._servers if s.live is None and s.ready])
            if self.current:
                return
            if time.monotonic() > deadline:
                raise self._servers[0].trouble
            time.sleep(_LOOK_S)

    def _bring(self, servers: Sequence[Server]) -> None:
        """Publish to some servers, side by side."""
        brought = [in_background(partial(self._bring_one, s), "tito-publish") for s in servers]
        wait(brought)
        results = [future.result() for future in brought]
        self.latest = next((result for result in results if result), self.latest)

    def _bring_one(self, server: Server) -> ReloadResult | None:
        try:
            if server.live is None:
                self._join(server)
            assert server.lease is not None
            result = self._publish(server.client, server.lease.fence)
        except _UNFIT as error:
            self._set_aside(server, error, pause=True)
        except Conflict as error:
            # One that was ours may have been restarted, and know no lease. Any other has an owner.
            if not server.was_current:
                raise
            self._set_aside(server, error, pause=True)
        else:
            self.published.note(result.digest, self._step)
            with self._changed:
                server.live, server.was_current, server.failures = result, True, 0
                self._changed.notify_all()
            return result
        return None

    def _join(self, server: Server) -> None:
        server.ready = False
        info = server.client.info()
        refuse_other_tokenizer(info.tokenizer, self._fingerprint)
        self.vocab_size = info.vocab_size
        self._release(server)
        lease = server.client.lease(holder=self._holder, ttl=LEASE_TTL_S)
        lease.__enter__()
        server.lease = lease

    def _release(self, server: Server) -> None:
        if server.lease is not None:
            server.lease.__exit__()
            server.lease = None

    def _set_aside(self, server: Server, error: TitoError, *, pause: bool = False) -> None:
        with self._changed:
            server.live, server.ready, server.trouble = None, False, error
            if pause:
                # It may be ready all the time and refuse every time; sending is not for nothing.
                server.look_after = time.monotonic() + min(2.0**server.failures, _MAX_PAUSE_S)
                server.failures += 1

    # Asking.

    def rollout(
        self, prompts: Sequence[PromptLike], *, group_size: int, **settings: Any
    ) -> Rollout:
        """Sample from the current server with the least to do; another one if it fails.

        A server is never asked for samples of older weights than it was last known to serve.

        Raises:
            TitoError: the request cannot succeed anywhere, or the pool was closed.
        """
        count, failures = len(prompts) * group_size, 0
        while True:
            server, live = self._take(count)
            try:
                return server.client.rollout(
                    prompts, group_size=group_size, min_version=live.version, **settings
                )
            except _LOST as error:
                # Unless it was set aside and brought back while this request hung.
                if server.live is live:
                    self._set_aside(server, error)
            except Overloaded as error:
                self._closed.wait(min(error.retry_after or 1.0, _MAX_PAUSE_S))
            except EngineFailure:
                # A prompt on which every engine fails must not go round for ever.
                failures += 1
                if failures == _ENGINE_FAILURES:
                    raise
            finally:
                self._give_back(server, count)

    def _take(self, samples: int) -> tuple[Server, ReloadResult]:
        with self._changed:
            while not self._closed.is_set():
                if current := self.current:
                    server = min(current, key=lambda s: (s.samples, s.last_asked))
                    assert server.live is not None
                    server.last_asked = time.monotonic()
                    if server.samples == 0:
                        server.idle_s += time.monotonic() - server.idle_since
                    server.samples += samples
                    return server, server.live
                self._changed.wait(_LOOK_S)
        raise ServerUnreachable("the run is over")

    def _give_back(self, server: Server, samples: int) -> None:
        with self._changed:
            server.samples -= samples
            if server.samples == 0:
                server.idle_since = time.monotonic()

    def idle_seconds(self) -> float:
        """How long a server had nothing to do for this run, on average, since the last call."""
        with self._changed:
            now, total = time.monotonic(), 0.0
            for server in self._servers:
                if server.samples == 0:
                    server.idle_s += now - server.idle_since
                    server.idle_since = now
                total += server.idle_s
                server.idle_s = 0.0
        return total / len(self._servers)

    # Life.

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="tito-servers", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with ExitStack() as stack:
            for server in self._servers:
                stack.callback(server.client.close)
                stack.callback(server.probe.close)
                stack.callback(self._release, server)

    def _watch(self) -> None:
        """Look for servers that are set aside, until they are ready."""
        while not self._closed.wait(_LOOK_S):
            for server in self._servers:
                waits = server.live is None and not server.ready
                if waits and time.monotonic() >= server.look_after:
                    server.ready = self._is_ready(server)

    def _is_ready(self, server: Server) -> bool:
        try:
            server.probe.wait_ready(0.0)
        except TitoError as error:
            server.trouble = error
            return False
        except RuntimeError:  # the probe was closed meanwhile
            return False
        return True

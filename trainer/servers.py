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
from shared.protocol import ReloadResult, Rollout
from trainer.agreement import refuse_other_tokenizer, refuse_sleepless
from trainer.background import in_background
from trainer.published import Published
from trainer.server import Server

_LOOK_S = 0.25
_MAX_PAUSE_S = 10.0
_ENGINE_FAILURES = 3
_STRANGE_ANSWERS = 3

_LOST = (ServerUnreachable, EngineUnavailable, PreconditionFailed)
"""What a rollout fails with when its server is no longer what it was."""
_UNFIT = (*_LOST, EngineFailure, InsufficientStorage, Overloaded)
"""What a publish fails with for a reason of that server alone."""

Publish = Callable[[RolloutClient, int], ReloadResult]
"""Sends the model as it is now, under a fencing number."""


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
        sleep_level: how deep they sleep in :meth:`sleep`.
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
        sleep_level: int = 0,
    ) -> None:
        self.published = published
        self.latest = ReloadResult(0, "")
        self.vocab_size = 0
        self._servers = servers
        self._publish = publish
        self._holder = holder
        self._fingerprint = fingerprint
        self._patience = patience
        self._sleep_level = sleep_level
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

    def troubles(self) -> str | None:
        """Which servers do not serve the current policy, and why; None when all do."""
        aside = [server for server in self._servers if server.live is None]
        if not aside:
            return None
        reasons = "; ".join(f"{server.url}: {server.trouble.message}" for server in aside)
        return f"{len(aside)} of {len(self._servers)} not current: {reasons}"

    def awaited(self) -> str | None:
        """Why no server can take a publish yet; None when one can."""
        if any(server.live or server.ready for server in self._servers):
            return None
        return "; ".join(server.trouble.message for server in self._servers)

    def publish(self, step: int) -> None:
        """Make the servers sample from the model as it is after ``step``, all at the same time.

        Those that cannot take it are set aside; ``troubles`` says which.

        Raises:
            WeightsRejected: the weights are unfit for any server.
            Conflict: somebody else holds a server's lease.
            MismatchError: a server has another tokenizer.
            ConfigError: a server cannot sleep as it is to.
            ServerUnreachable, EngineUnavailable, ...: no server took it, for all of the patience.
        """
        self._step = step
        self._bring([server for server in self._servers if server.live or server.ready])
        self.ensure()

    def sleep(self) -> None:
        """Let the servers hand memory back until the next ``publish`` or ``keep``, if they are to.

        One that does not is set aside.
        """
        for server in self.current if self._sleep_level else ():
            try:
                server.sleep(self._sleep_level)
            except (*_UNFIT, Conflict) as error:
                self._refused(server, error)

    def keep(self, step: int) -> None:
        """The model was not changed by ``step``: what the servers have is the policy after it."""
        self._step = step
        for server in self.current:
            try:
                with server.woken():
                    pass
            except (*_UNFIT, Conflict) as error:
                self._refused(server, error)
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
                info = server.take_lease(self._holder)
                refuse_other_tokenizer(info.tokenizer, self._fingerprint)
                refuse_sleepless(info, self._sleep_level)
                self.vocab_size = info.vocab_size
            assert server.lease is not None
            with server.woken():
                result = self._publish(server.client, server.lease.fence)
        except _UNFIT as error:
            self._refused(server, error)
        except Conflict as error:
            # One that was ours may have been restarted, and know no lease. Any other has an owner.
            if not server.was_current:
                raise
            self._refused(server, error)
        else:
            self.published.note(result.digest, self._step)
            with self._changed:
                server.became_current(result)
                self._changed.notify_all()
            return result
        return None

    def _refused(self, server: Server, error: TitoError) -> None:
        self._set_aside(server, error)
        server.leave_alone_for_a_while()

    def _set_aside(self, server: Server, error: TitoError) -> None:
        with self._changed:
            server.set_aside(error)

    def rollout(
        self, prompts: Sequence[PromptLike], *, group_size: int, **settings: Any
    ) -> Rollout:
        """Sample from the current server with the least to do; another one if it fails.

        A server is never asked for samples of older weights than it was last known to serve.

        Raises:
            TitoError: the request cannot succeed anywhere, or the pool was closed.
        """
        count, failures, strange = len(prompts) * group_size, 0, 0
        while True:
            server, live = self._take(count)
            try:
                rollout = server.client.rollout(
                    prompts, group_size=group_size, min_version=live.version, **settings
                )
                strange += 1
                if not self._went_back(rollout, live) or strange == _STRANGE_ANSWERS:
                    return rollout
                raise EngineUnavailable(
                    "its engine died before there was a copy of the weights, and went back to "
                    "some that this run did not publish"
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
                with self._changed:
                    server.end(count)

    def _went_back(self, rollout: Rollout, live: ReloadResult) -> bool:
        """Whether some token is of weights from before what was asked for, and from before the run.

        A publish that is not noted yet has a higher version.
        """
        return any(
            span.version < live.version and not self.published.knows(span.digest)
            for sample in rollout.samples
            for span in sample.spans
        )

    def _take(self, samples: int) -> tuple[Server, ReloadResult]:
        with self._changed:
            while not self._closed.is_set():
                if current := self.current:
                    server = min(current, key=lambda s: (s.samples, s.last_asked))
                    assert server.live is not None
                    server.begin(samples)
                    return server, server.live
                self._changed.wait(_LOOK_S)
        raise ServerUnreachable("the run is over")

    def idle_seconds(self) -> float:
        """How long a server had nothing to do for this run, on average, since the last call."""
        with self._changed:
            return sum(server.idle_seconds() for server in self._servers) / len(self._servers)

    def __enter__(self) -> Self:
        # All that are up already get the first publish.
        wait([in_background(server.look, "tito-servers") for server in self._servers])
        threading.Thread(target=self._watch, name="tito-servers", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for server in self._servers:
            server.release()
            server.close()

    def _watch(self) -> None:
        """Look for servers that are set aside, until they are ready."""
        while not self._closed.wait(_LOOK_S):
            for server in self._servers:
                server.look()

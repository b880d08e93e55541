"""A channel that is open, and what is going on in it: when it may be written, and when closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from rollout_server.worker_links import WorkerLinks
from shared.channel import Layout
from shared.errors import Conflict

_POLL_S = 0.02


@dataclass(slots=True, eq=False)
class OpenChannel:
    """A channel, and what is going on in it.

    Attributes:
        id: names it.
        owner: name of the caller.
        fence: of the lease that it belongs to, if there is one.
        layout: of the buffer.
        links: to the workers.
        joining: the workers wait for the trainer.
        using: done when the publish that is under way in it is.
        is_loading: what is in the buffer is becoming live.
        has_loaded: the publish that is under way came so far.
        is_given_up: its owner has closed it.
        settling: the buffer is being copied to a file, and must stay as it is.
        used_at: when a publish last ended, by the monotonic clock.
    """

    id: str
    owner: str
    fence: int | None
    layout: Layout
    links: WorkerLinks
    joining: asyncio.Task[None] | None = None
    using: asyncio.Future[None] | None = None
    is_loading: bool = False
    has_loaded: bool = False
    is_given_up: bool = False
    settling: asyncio.Task[None] | None = None
    used_at: float = field(default_factory=time.monotonic)
    _switching: threading.Lock = field(default_factory=threading.Lock)

    @property
    def under_way(self) -> asyncio.Future[None] | None:
        """What has to end before the buffer may be written, and there may be more after it."""
        work = (self.joining, self.using, self.settling)
        return next((one for one in work if one is not None and not one.done()), None)

    @property
    def is_used(self) -> bool:
        """Whether a publish is under way in it."""
        return self.using is not None and not self.using.done()

    @contextlib.contextmanager
    def loading(self, commit: AbstractContextManager[None]) -> Iterator[None]:
        """Make what is in the buffer live inside, and within another context; in any thread.

        Raises:
            Conflict: the channel has ended; nothing has changed.
        """
        with self._switching:
            if self.links.is_closed:
                raise Conflict("the channel has ended, and what it had received is gone")
            self.is_loading = self.has_loaded = True
        try:
            with commit:
                yield
        finally:
            self.is_loading = False

    def close(self) -> bool:
        """Close the links, unless they are needed for what is becoming live, or has no copy yet."""
        with self._switching:
            is_needed = self.is_loading or not (self.settling is None or self.settling.done())
            if not is_needed:
                self.links.close()
            return not is_needed

    async def closed(self) -> None:
        """Close the links as soon as they are not needed any more."""
        while not self.close():  # noqa: ASYNC110 - other threads decide
            await asyncio.sleep(_POLL_S)

    @property
    def state(self) -> str:
        """``joining``, ``busy``, or ``open`` while its buffer may be written."""
        if (work := self.under_way) is None:
            return "open"
        return "joining" if work is self.joining else "busy"

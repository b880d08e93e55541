"""What one caller has for as long as it is heard of: a pause, or an update of weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollout_server.auth import Caller
from shared.errors import Conflict


class Tenure:
    """What one caller has until it gives it back, or is silent for too long.

    Args:
        silence_s: how long that is.
        expire: called with the reason; takes it back if ``is_over`` still holds by then.

    Attributes:
        owner: name of the caller, if anybody has it.
        is_over: the owner was silent for too long.
    """

    def __init__(self, silence_s: float, expire: Callable[[str], Coroutine[Any, Any, None]]):
        self.owner: str | None = None
        self.is_over = False
        self._silence_s = silence_s
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None

    def require(self, caller: Caller, what: str) -> None:
        """Go on only if nobody else has it.

        Raises:
            Conflict: somebody has.
        """
        if self.owner not in (None, caller.name):
            raise Conflict(f"{what} by {self.owner!r}", details={"owner": self.owner})

    def keep(self, owner: str, *, for_good: bool = False) -> None:
        """The owner was heard of; for good if it need not be again."""
        self._stop()
        self.owner = owner
        if not for_good:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._silence_s, self._over)

    def end(self) -> None:
        """Nobody has it any more."""
        self._stop()
        self.owner = None

    def _stop(self) -> None:
        self.is_over = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        self.is_over = True
        reason = f"nothing was heard of {self.owner!r} for {self._silence_s} s"
        self._expiring = asyncio.get_running_loop().create_task(self._expire(reason))

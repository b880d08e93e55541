"""Which number the next version of a policy gets."""

from __future__ import annotations

import asyncio

from rollout_server.policies import Policy
from rollout_server.spool import Spool
from rollout_server.staging import storage_errors


class Numbering:
    """Numbers of one policy; a number that was given to one set of weights is never given again.

    Args:
        policy: whose versions they are.
        spool: where versions are committed.
    """

    def __init__(self, policy: Policy, spool: Spool) -> None:
        self._policy, self._spool = policy, spool
        self._ahead = 0
        self._reserving = asyncio.Lock()

    def next(self) -> int:
        """Of the version that becomes live next."""
        newest = self._policy.newest_number
        if self._ahead > newest:
            return self._ahead
        return max(newest, self._spool.newest_number(self._policy.name)) + 1

    async def reserve(self) -> None:
        """Have on the disk that the next number is taken, before a token is labelled with it.

        The file that would tell comes later. Who calls this beforehand need not wait for it then.

        Raises:
            InsufficientStorage: the disk is full.
        """
        async with self._reserving:
            if self._ahead <= self._policy.newest_number:
                self._ahead = await asyncio.to_thread(self._reserved)

    def _reserved(self) -> int:
        number = self.next()
        with storage_errors():
            self._spool.reserve(self._policy.name, number)
        return number

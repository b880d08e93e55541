"""Publishing what a channel has brought: live first, copied afterwards, while generation goes on.

    transfer -> staged -> verified -> applying -> live -> copied to the spool
                   |          |           |                 |
                   `----------+- rejected `- rolled back    `- not durable, or withdrawn

The copy is what the version could be restored from, so nothing else is loaded until it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rollout_server.applying import WeightSwitch
from rollout_server.attempts import Ended, PublishOptions, attempt, stage, to_its_end
from rollout_server.checkpoints import reject_if
from rollout_server.policies import Policy, Publish, PublishState
from shared.errors import Problem
from shared.protocol import ReloadResult

if TYPE_CHECKING:
    from rollout_server.open_channel import OpenChannel


class Turns:
    """Who loads weights: one publish at a time, and none while what is live has no copy.

    Args:
        applying: held while weights change.

    Attributes:
        copying: makes the copy of what is live.
    """

    def __init__(self, applying: asyncio.Lock) -> None:
        self.applying = applying
        self.copying: asyncio.Task[None] | None = None

    async def settled(self, seconds: float | None = None) -> None:
        """Wait until there is a copy of what is live, or there will be none."""
        if self.copying is not None:
            await asyncio.wait({self.copying}, timeout=seconds)

    @contextlib.asynccontextmanager
    async def taken(self, options: PublishOptions) -> AsyncIterator[None]:
        """Load weights inside: nobody else does, the publisher may, and a failure can be undone."""
        while True:
            await self.settled()
            async with self.applying:
                if self.copying is None or self.copying.done():
                    async with options.committing():
                        yield
                    return


class ChannelPublisher:
    """Publishes what the workers hold in the buffers of a channel.

    Args:
        policy: whose next version it becomes.
        switch: makes it live.
        turns: shared with all other publishes.
        check: raises unless full weights can be loaded now.
        ended: told of every publish that has come to an end.
    """

    def __init__(
        self,
        policy: Policy,
        switch: WeightSwitch,
        turns: Turns,
        check: Callable[[], None],
        ended: Ended,
    ) -> None:
        self._policy, self._switch, self._turns = policy, switch, turns
        self._check, self._ended = check, ended

    async def publish(
        self,
        channel: OpenChannel,
        receive: Callable[[], Awaitable[None]],
        *,
        seconds: float,
        durable: bool,
        options: PublishOptions,
    ) -> ReloadResult:
        """Publish what the workers have received, or still have to.

        Args:
            channel: leads to the workers; nobody else uses it meanwhile.
            receive: returns when everything is there; may be cancelled.
            seconds: how long verifying may take.
            durable: return only when the copy is there.
            options: see there.

        Raises:
            WeightsRejected, Conflict: nothing has changed.
            EngineFailure: the transfer or the load failed; the message says what is live now.
        """
        await options.checked()
        with attempt(self._policy, options, self._ended) as publish:
            await self._turns.settled()  # the buffer may still be the only copy of what is live
            with stage(publish, "transfer"):
                await receive()
            publish.state = PublishState.STAGED
            with stage(publish, "verify"):
                verifying = _verified(channel, seconds)
                digest, _ = await asyncio.gather(verifying, self._switch.numbers.reserve())
            publish.state, publish.digest = PublishState.VERIFIED, digest
            result = await to_its_end(self._make_live(publish, channel, digest, options))
            if durable:
                await self._turns.settled()
            return replace(result, durable=self._policy.durable_version >= result.version)

    async def _make_live(
        self, publish: Publish, channel: OpenChannel, digest: str, options: PublishOptions
    ) -> ReloadResult:
        async with self._turns.taken(options):
            self._check()
            await self._switch.apply_staged(publish, channel.links, digest, options)
            settle = self._switch.settle(publish, channel.links, self._turns.applying)
            channel.settling = self._turns.copying = asyncio.create_task(settle)
        assert publish.version is not None
        return ReloadResult(publish.version, digest, publish.timings)


async def _verified(channel: OpenChannel, seconds: float) -> str:
    """Digest of what the workers hold for a channel, if it may be loaded."""
    digest, broken = await channel.links.verify(seconds)
    problems = [Problem(name, "NaN or infinite values", "finite values") for name in broken]
    reject_if(problems, "the channel holds values that are not finite")
    return digest

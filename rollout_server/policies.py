"""Which policies exist, which version of each is live, and what became of every publish.

A version is a number that only the server hands out, one higher for each publish of the policy. It
is bound to the digest of the weights that were verified, so a sample's version always leads to its
weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollout_server.engine import Adapter
from shared.errors import NotFound
from shared.protocol import DEFAULT_POLICY

_HISTORY = 64


class PublishState(StrEnum):
    """Where a publish stands."""

    STAGING = "staging"
    """Its bytes are arriving."""
    STAGED = "staged"
    """All bytes are here; generation goes on."""
    VERIFIED = "verified"
    """It may be loaded."""
    APPLYING = "applying"
    """Generation is paused while it is loaded and checked."""
    LIVE = "live"
    SUPERSEDED = "superseded"
    """It was live; a later version is."""
    REJECTED = "rejected"
    """It failed before the load; nothing has changed."""
    ROLLED_BACK = "rolled_back"
    """It failed in the load; the last good weights were restored."""


_UNDER_WAY = {
    PublishState.STAGING,
    PublishState.STAGED,
    PublishState.VERIFIED,
    PublishState.APPLYING,
}


@dataclass(slots=True)
class Publish:
    """One attempt to publish.

    Attributes:
        publisher: who published.
        state: where it stands.
        started_at: seconds since the epoch.
        version: its number, once it was live.
        digest: of its weights, once they were verified.
        reason: why it was rejected or rolled back.
        timings: seconds for each stage so far.
    """

    publisher: str
    state: PublishState = PublishState.STAGING
    started_at: float = field(default_factory=time.time)
    version: int | None = None
    digest: str | None = None
    reason: str | None = None
    timings: dict[str, float] = field(default_factory=dict)


class Policy:
    """A named, versioned set of weights: the whole model, or a LoRA adapter on it.

    Attributes:
        name: ``default`` is the model that the engine was started with, and its successors.
        version: number of the live weights. For ``default``, 0 is the engine's own checkpoint.
        durable_version: the newest version that can be restored; the live one, or for a moment the
            one before.
        files: canonical checkpoint of that version.
        adapter: what requests run on, for a LoRA policy.
        digests: digest of each version so far, also of one that is just being loaded.
        announced: that one; tokens of it may be there already.
        changed: notified whenever another version is live.
    """

    def __init__(
        self,
        name: str,
        version: int,
        digest: str,
        files: tuple[Path, ...] = (),
        adapter: Adapter | None = None,
    ) -> None:
        self.name = name
        self.version = self.durable_version = version
        self.files = files
        self.adapter = adapter
        self.digests = {version: digest}
        self.announced: int | None = None
        self.changed = asyncio.Condition()
        self.history: deque[Publish] = deque()

    @property
    def digest(self) -> str:
        """Digest of the live version."""
        return self.digests[self.version]

    @property
    def kind(self) -> str:
        """``full`` or ``lora``."""
        return "full" if self.name == DEFAULT_POLICY else "lora"

    @property
    def state(self) -> PublishState:
        """Where the newest publish that is still under way stands, or ``live``."""
        under_way = self._under_way
        return under_way[-1] if under_way else PublishState.LIVE

    @property
    def is_being_published(self) -> bool:
        """Whether a publish is under way."""
        return bool(self._under_way)

    @property
    def is_durable(self) -> bool:
        """Whether the live version could be restored."""
        return self.version == self.durable_version

    @property
    def newest_number(self) -> int:
        """The highest version that was announced, or ever live, here."""
        return max(self.digests)

    @property
    def _under_way(self) -> list[PublishState]:
        return [publish.state for publish in self.history if publish.state in _UNDER_WAY]

    def begin(self, publisher: str) -> Publish:
        """Note that a publish has begun."""
        publish = Publish(publisher)
        self.history.append(publish)
        # Not simply the oldest goes: a long upload must not be forgotten before its end.
        ended = [item for item in self.history if item.state not in _UNDER_WAY]
        if len(self.history) > _HISTORY and ended:
            self.history.remove(ended[0])
        return publish

    def announce(self, version: int, digest: str) -> None:
        """A version may be live before :meth:`advance` says so; its number is taken."""
        self.digests[version] = digest
        self.announced = version

    async def advance(
        self,
        publish: Publish,
        version: int,
        digest: str,
        *,
        files: tuple[Path, ...] = (),
        adapter: Adapter | None = None,
        durable: bool = True,
    ) -> None:
        """Make a publish the live version, and wake whoever waits for it.

        Args:
            publish, version, digest: of it.
            files, adapter: see the class.
            durable: ``files`` are its own; else those there are stay, until :meth:`made_durable`.
        """
        for earlier in self.history:
            if earlier.state is PublishState.LIVE:
                earlier.state = PublishState.SUPERSEDED
        publish.state, publish.version, publish.digest = PublishState.LIVE, version, digest
        self.version, self.adapter, self.announced = version, adapter, None
        self.digests[version] = digest
        if durable:
            self.durable_version, self.files = version, files
        async with self.changed:
            self.changed.notify_all()

    def made_durable(self, version: int, files: tuple[Path, ...]) -> None:
        """A version can be restored from these files from now on."""
        self.durable_version, self.files = version, files

    async def go_back(self) -> int:
        """Make the newest version that can be restored the live one again; its number."""
        self.announced = None
        if not self.is_durable:
            for publish in self.history:
                if publish.version == self.version:
                    publish.state = PublishState.ROLLED_BACK
                    publish.reason = "it was lost before there was a copy of it"
                elif publish.version == self.durable_version:
                    publish.state = PublishState.LIVE
            self.version = self.durable_version
            async with self.changed:
                self.changed.notify_all()
        return self.version

    def describe(self) -> dict[str, Any]:
        """Plain data for ``GET /policies/{name}``, the newest publish first."""
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state.value,
            "version": self.version,
            "digest": self.digest,
            "durable": self.is_durable,
            "durable_version": self.durable_version,
            "history": [asdict(publish) for publish in reversed(self.history)],
        }


class Policies:
    """The policies by name; ``default`` is always there."""

    def __init__(self, default: Policy) -> None:
        self.default = default
        self._by_name = {default.name: default}

    def __iter__(self) -> Iterator[Policy]:
        return iter(list(self._by_name.values()))

    def __getitem__(self, name: str) -> Policy:
        """The policy of that name.

        Raises:
            NotFound: there is none; the message lists those there are.
        """
        if (policy := self._by_name.get(name)) is None:
            raise NotFound(f"no policy {name!r}; there are: {', '.join(self._by_name)}")
        return policy

    def get(self, name: str) -> Policy | None:
        """The policy of that name, if there is one."""
        return self._by_name.get(name)

    def add(self, policy: Policy) -> None:
        """Make a new policy known."""
        self._by_name[policy.name] = policy

    def remove(self, name: str) -> None:
        """Forget a policy."""
        del self._by_name[name]

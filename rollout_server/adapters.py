"""LoRA policies: each publish is an immutable adapter beside the base weights.

A PEFT adapter needs no pause: it is loaded under a name and a number that were never used before
(cached keys and values are filed under the name), new requests run on it, and requests in flight
keep the one they began with. An adapter that no request uses any more is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rollout_server import staging
from rollout_server.adapter_files import (
    WEIGHTS_FILE,
    copy_adapter,
    unpack_config,
    verify_adapter,
)
from rollout_server.arrivals import FileSink
from rollout_server.attempts import Ended, PublishOptions, attempt, stage, to_its_end
from rollout_server.checkpoints import Manifest
from rollout_server.engine import Adapter, EngineDied
from rollout_server.policies import Policies, Policy, Publish, PublishState
from rollout_server.sinks import Pour
from rollout_server.spool import Spool, record_now
from rollout_server.supervisor import Supervisor
from shared.errors import Conflict, EngineUnavailable, NotFound, TitoError
from shared.protocol import DEFAULT_POLICY, ReloadResult

log = logging.getLogger("tito.adapters")


class AdapterPublisher:
    """Publishes LoRA adapters, and keeps count of which of them are in use.

    Args:
        supervisor: runs the engine.
        policies: where LoRA policies are added.
        manifest: of the base model, which adapters must fit.
        spool: where they are staged and committed.
        max_rank: highest rank that the engine was started for; 0 if it takes no adapters.
        limits: what may be uploaded, and from where.
        slots: uploads under way, shared with full weights.
        applying: held while weights change, shared with the publisher of full weights.
        ended: told of every publish that has come to an end.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        policies: Policies,
        manifest: Manifest,
        spool: Spool,
        *,
        max_rank: int,
        limits: staging.UploadLimits,
        slots: staging.UploadSlots,
        applying: asyncio.Lock,
        ended: Ended = lambda _, __: None,
    ) -> None:
        self._supervisor = supervisor
        self._policies = policies
        self._manifest = manifest
        self._spool = spool
        self._max_rank = max_rank
        self._limits = limits
        self._ended = ended
        self._slots = slots
        self._applying = applying
        self._first: dict[str, Policy] = {}
        self._serial = itertools.count(1)
        self._users: Counter[Adapter] = Counter()
        self._releases: set[asyncio.Task[None]] = set()

    async def publish_stream(
        self,
        name: str,
        pour: Pour,
        *,
        announced: str | None,
        trailer: bool,
        options: PublishOptions,
    ) -> ReloadResult:
        """Publish an adapter that arrives as a safetensors file with its config in the metadata.

        Raises:
            MalformedBody, WeightsRejected, BodyTooLarge, Conflict: nothing has changed.
        """

        async def fill(folder: Path) -> str | None:
            file = folder / WEIGHTS_FILE
            with contextlib.closing(FileSink(file, self._limits)) as sink:
                await pour(sink)
            digest = await asyncio.to_thread(staging.cut_trailer, file) if trailer else announced
            await asyncio.to_thread(unpack_config, folder)
            return digest

        return await self._publish(name, fill, options)

    async def publish_path(
        self, name: str, path: Path, *, announced: str | None, options: PublishOptions
    ) -> ReloadResult:
        """Publish a PEFT adapter directory that the operator allowed."""

        async def fill(folder: Path) -> str | None:
            await asyncio.to_thread(copy_adapter, path, self._limits, folder)
            return announced

        return await self._publish(name, fill, options)

    def restore(self, base: str) -> None:
        """Make the adapters known that were committed on this base before a restart.

        Of each policy that is the newest intact version. Older ones, which requests still used when
        the server went down, are removed.
        """
        names = self._spool.policies() if self._max_rank else []
        for name in names:
            if name == DEFAULT_POLICY:
                continue
            versions = iter(self._spool.versions(name, base))
            for record, folder in versions:
                if not self._is_intact(folder, base, record.digest):
                    continue
                adapter = self._adapter(name, record.version, folder)
                self._policies.add(Policy(name, record.version, record.digest, adapter=adapter))
                break
            for _, older in versions:
                self._spool.discard(older)

    def _is_intact(self, folder: Path, base: str, digest: str) -> bool:
        try:
            found = verify_adapter(folder, self._manifest, None, base, self._max_rank)
        except (TitoError, OSError, ValueError) as error:
            found = str(error)
        if found != digest:
            log.error("%s is damaged and passed over: %s", folder, found)
        return found == digest

    async def delete(self, name: str) -> None:
        """Forget a LoRA policy and its adapters; requests in flight finish first.

        Raises:
            Conflict: it is the full policy, or in use.
        """
        async with self._applying:  # else a version that is being loaded would lose its files
            policy = self._policies[name]
            if policy.adapter is None:
                raise Conflict(f"{name} is the model itself; only LoRA policies can be deleted")
            if users := self._users_of(name):
                raise Conflict(f"{name} is in use by {users} groups")
            self._policies.remove(name)
            self._users.pop(policy.adapter, None)
            await asyncio.to_thread(self._spool.forget, name)
            await self._release(policy.adapter)

    def _users_of(self, name: str) -> int:
        """Groups that are sampled from any version of a policy."""
        return sum(n for adapter, n in self._users.items() if adapter.name.startswith(f"{name}@"))

    @contextlib.contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Keep an adapter for as long as a group is sampled from it.

        Raises:
            NotFound: its policy was deleted while the group waited.
        """
        if adapter is None:
            yield
            return
        if adapter not in self._live():
            raise NotFound(f"the policy of adapter {adapter.name} was deleted meanwhile")
        self._users[adapter] += 1
        try:
            yield
        finally:
            self._users[adapter] -= 1
            self._release_if_unused(adapter)

    async def _publish(
        self,
        name: str,
        fill: Callable[[Path], Awaitable[str | None]],
        options: PublishOptions,
    ) -> ReloadResult:
        await options.checked()
        if not self._max_rank:
            raise Conflict("this server takes no LoRA adapters; start it with --max-loras 4")
        with (
            self._policy(name) as policy,
            attempt(policy, options, self._ended) as publish,
            self._slots.taken(),
        ):
            with staging.storage_errors():
                folder = self._spool.stage()
            try:
                with stage(publish, "upload"), staging.storage_errors():
                    announced = await fill(folder)
            except BaseException:
                await asyncio.to_thread(self._spool.discard, folder)
                raise
            return await to_its_end(self._apply(policy, publish, folder, announced, options))

    @contextlib.contextmanager
    def _policy(self, name: str) -> Iterator[Policy]:
        """The policy of that name, or a new one that its first publishes share."""
        policy = self._policies.get(name) or self._first.setdefault(name, Policy(name, 0, ""))
        try:
            yield policy
        finally:
            if not policy.is_being_published:
                self._first.pop(name, None)

    async def _apply(
        self,
        policy: Policy,
        publish: Publish,
        folder: Path,
        announced: str | None,
        options: PublishOptions,
    ) -> ReloadResult:
        try:
            publish.state = PublishState.STAGED
            base = self._policies.default.digest
            with stage(publish, "verify"), staging.storage_errors():
                digest = await asyncio.to_thread(
                    verify_adapter, folder, self._manifest, announced, base, self._max_rank
                )
                await asyncio.to_thread(self._spool.prepare, folder)
            publish.state, publish.digest = PublishState.VERIFIED, digest
            async with self._applying, options.committing():
                if base != self._policies.default.digest:
                    raise Conflict("the base weights changed during the upload")
                return await self._go_live(policy, publish, folder, digest)
        finally:
            await asyncio.to_thread(self._spool.discard, folder)

    async def _go_live(
        self, policy: Policy, publish: Publish, folder: Path, digest: str
    ) -> ReloadResult:
        publish.state, previous = PublishState.APPLYING, policy.adapter
        version = max(policy.version, self._spool.newest_number(policy.name)) + 1
        staged = self._adapter(policy.name, version, folder)
        with stage(publish, "load"):
            try:
                await self._supervisor.current().add_adapter(staged)
            except EngineDied as error:
                reason = f"the engine died; nothing has changed: {error}"
                raise EngineUnavailable(reason) from error
        base = self._policies.default.digest
        record = record_now(version, digest, base, publish.publisher)
        try:
            with staging.storage_errors():
                committed = await asyncio.to_thread(self._spool.commit, folder, policy.name, record)
        except Exception:
            await self._release(staged)
            raise
        # The engine holds the adapter by now; the folder is where it looks if it drops it.
        adapter = replace(staged, folder=committed)
        await policy.advance(publish, version, digest, adapter=adapter)
        self._policies.add(policy)
        if previous is not None:
            self._release_if_unused(previous)
        return ReloadResult(version, digest, publish.timings)

    def _adapter(self, name: str, version: int, folder: Path) -> Adapter:
        # A restart makes an adapter of the same version anew; its number must be new all the same.
        serial = next(self._serial)
        return Adapter(f"{name}@{version}.{serial}", serial, folder)

    def _release_if_unused(self, adapter: Adapter) -> None:
        if not self._users[adapter] and adapter not in self._live():
            del self._users[adapter]
            task = asyncio.create_task(self._release(adapter))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    def _live(self) -> set[Adapter | None]:
        return {policy.adapter for policy in self._policies}

    async def _release(self, adapter: Adapter) -> None:
        with contextlib.suppress(Exception):  # an engine that has died holds no adapters
            await self._supervisor.current().remove_adapter(adapter)
        await asyncio.to_thread(self._spool.discard, adapter.folder)
        log.info("adapter %s was released", adapter.name)

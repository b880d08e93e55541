"""What a rollout may ask of the live policy before it starts: version, digest, age.

The conditions hold when sampling starts. Weights that come later may still finish a sample; its
spans say so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol

from shared.errors import PreconditionFailed
from shared.requests import RolloutRequest


class Watched(Protocol):
    """What there is to know of a policy here.

    ``changed`` is notified after every change of ``version`` and ``digest``.
    """

    changed: asyncio.Condition

    @property
    def name(self) -> str:
        """Of the policy."""
        ...

    @property
    def version(self) -> int:
        """That is live."""
        ...

    @property
    def digest(self) -> str:
        """Of the live weights."""
        ...


async def hold(policy: Watched, request: RolloutRequest) -> None:
    """Return once the request's conditions hold, waiting ``wait_seconds`` at most.

    Raises:
        PreconditionFailed: they do not; ``details`` has the live ``version`` and ``digest``.
    """

    def settled() -> bool:
        return not any(_unmet(policy, request)) or _is_past(policy, request)

    if request.wait_seconds and not settled():
        with contextlib.suppress(TimeoutError):  # what is live by then decides
            async with asyncio.timeout(request.wait_seconds), policy.changed:
                await policy.changed.wait_for(settled)
    if unmet := list(_unmet(policy, request)):
        raise PreconditionFailed(
            f"policy {policy.name!r} is at version {policy.version}, digest {policy.digest}; "
            f"asked for: {', '.join(unmet)}",
            details={"version": policy.version, "digest": policy.digest},
        )


def _unmet(policy: Watched, request: RolloutRequest) -> Iterator[str]:
    """Each condition that does not hold, in words."""
    if request.version not in (None, policy.version):
        yield f"version {request.version}"
    if request.digest not in (None, policy.digest):
        yield f"digest {request.digest}"
    oldest = request.min_version
    if oldest is not None and policy.version < oldest:
        yield f"version {oldest} or later"
    if request.trainer_version is not None and request.max_staleness is not None:
        oldest = request.trainer_version - request.max_staleness
        if policy.version < oldest:
            yield (
                f"version {oldest} or later (trainer_version {request.trainer_version}, "
                f"max_staleness {request.max_staleness})"
            )


def _is_past(policy: Watched, request: RolloutRequest) -> bool:
    """Whether waiting is in vain: versions only grow."""
    return request.version is not None and policy.version > request.version

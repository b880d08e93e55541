"""Rewards sent back to the servers, whose pages show them beside the samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.errors import NotFound, TitoError
from shared.feedback import MAX_COMPONENTS
from shared.protocol import Rollout
from trainer.rewards import Outcome, Reward, Score
from trainer.servers import ServerPool


def report(
    servers: ServerPool, rollout: Rollout, outcomes: Sequence[Sequence[Outcome]], reward: Reward
) -> str | None:
    """Tell every server what the rollout's samples were worth; each knows its own groups.

    Returns:
        Why a server did not take it. Training goes on: nothing depends on it.
    """
    names = [part.name for part in reward.parts]
    groups = rewards_of(rollout, outcomes, names)
    problem = None
    for server in servers.current if groups else []:
        try:
            server.client.report_rewards(groups)
        except NotFound:
            continue  # a server without a page
        except TitoError as error:
            problem = f"{server.url}: {error.message}"
    return problem


def rewards_of(
    rollout: Rollout, outcomes: Sequence[Sequence[Outcome]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The rewards of each group that its server gave a name, as ``POST /rewards`` takes them.

    Args:
        outcomes: by group and sample, in the rollout's order.
        names: of the parts of a reward. A single part says nothing that the reward does not.
    """
    return [
        {
            "id": group.id,
            "rewards": [o.value if isinstance(o, Score) else None for o in scored],
            "components": [_components(o, names) for o in scored] if len(names) > 1 else None,
        }
        for group, scored in zip(rollout.groups, outcomes, strict=True)
        if group.id
    ]


def _components(outcome: Outcome, names: Sequence[str]) -> dict[str, float]:
    if not isinstance(outcome, Score):
        return {}
    parts = zip(names[:MAX_COMPONENTS], outcome.parts, strict=False)
    return {name[:64]: value for name, value in parts}

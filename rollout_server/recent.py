"""The newest groups, for people to look at: bounded in number and bytes.

A group is kept as it was made, so keeping one costs a few sums over its samples and no decoding;
whatever else there is to know about it is worked out when somebody looks. The oldest go first.

Not thread-safe: use it from one event loop. What it hands out does not change under a reader, but
for rewards, which are replaced whole.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from rollout_server.viewer.history import History
from shared.errors import Forbidden, InvalidRequest, Problem
from shared.feedback import GroupRewards, RewardReport
from shared.protocol import Group
from shared.requests import RolloutRequest

_OBJECT_BYTES = 512
"""About what a sample takes besides its arrays and text."""
_REWARD_BYTES = 32


@dataclass(slots=True, eq=False, weakref_slot=True)
class RecentGroup:
    """A finished group.

    Attributes:
        seq: position among all groups since the server began, from 1.
        rollout: of which it is a part.
        group: as it was answered.
        finished_at: seconds since the epoch.
        seconds: from the beginning of its rollout.
        staleness: versions that were published while it was sampled.
        size: bytes that it takes, about.
        rewards: what a trainer made of it.
    """

    seq: int
    rollout: RecentRollout
    group: Group
    finished_at: float
    seconds: float
    staleness: int
    size: int
    rewards: GroupRewards | None = None


class RecentRollout:
    """One rollout while it runs: a context manager that is told of each group.

    Attributes:
        caller: who asked.
        prompts: ids of each prompt; empty once the rollout has ended.
        done, total: groups finished, and to be sampled.
    """

    def __init__(
        self,
        recent: RecentGroups,
        caller: str,
        request: RolloutRequest,
        prompts: Sequence[Sequence[int]],
        version: Callable[[], int],
    ) -> None:
        self._recent = recent
        self._version = version
        self._over: set[int] = set(request.have)
        self.caller = caller
        self.policy = request.policy
        self.purpose = request.purpose
        self.group_size = request.group_size
        self.max_tokens = request.max_tokens
        self.temperature = request.temperature
        self.prompts = prompts
        self.done = 0
        self.total = len(prompts) - len(self._over)
        self.began_at = time.time()

    @property
    def next_prompt(self) -> Sequence[int]:
        """Ids of the first prompt whose group is not finished; empty if there is none."""
        return next((ids for i, ids in enumerate(self.prompts) if i not in self._over), ())

    def finished(self, group: Group) -> None:
        """A group is finished."""
        self._over.add(group.group_id)
        self.done += 1
        oldest = min((sample.version for sample in group.samples), default=0)
        self._recent.add(self, group, staleness=max(0, self._version() - oldest))

    def __enter__(self) -> Self:
        self._recent.running[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        del self._recent.running[self]
        # Its groups, which may be kept long after, have their own.
        self.prompts, self._over = (), set()


class RecentGroups:
    """Keeps groups until there are too many of them.

    Args:
        max_groups, max_bytes: how much is kept.
        queued: samples that wait for the engine just now.

    Attributes:
        seq: of the newest group; 0 before the first.
        revision: grows with everything that there is to see.
        running: rollouts under way, oldest first.
        size: bytes of all groups kept.
        history: figures over time, of all groups there ever were.
    """

    def __init__(
        self, max_groups: int, max_bytes: int, queued: Callable[[], int] = lambda: 0
    ) -> None:
        self.max_groups = max_groups
        self.max_bytes = max_bytes
        self.queued = queued
        self.seq = self.revision = self.size = 0
        self.running: dict[RecentRollout, None] = {}
        self.history = History(time.time())
        self._groups: OrderedDict[str, RecentGroup] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def rollout(
        self,
        caller: str,
        request: RolloutRequest,
        prompts: Sequence[Sequence[int]],
        version: Callable[[], int],
    ) -> RecentRollout:
        """A rollout that begins.

        Args:
            version: of its policy, whenever it is called.
        """
        return RecentRollout(self, caller, request, prompts, version)

    def add(self, rollout: RecentRollout, group: Group, *, staleness: int) -> None:
        """Keep a finished group, and let go of the oldest ones beyond the bounds."""
        now, size = time.time(), _size(group)
        self.seq += 1
        self.revision += 1
        seconds = now - rollout.began_at
        kept = RecentGroup(self.seq, rollout, group, now, seconds, staleness, size)
        self._groups[group.id] = kept
        self._grow(size)
        self.history.add_group(
            now, group.samples, rollout.purpose, staleness=staleness, queued=self.queued()
        )

    def newest_first(self) -> list[RecentGroup]:
        """Every group that is kept."""
        return list(reversed(self._groups.values()))

    def get(self, group: str) -> RecentGroup | None:
        """The group of that id, unless it has been let go of."""
        return self._groups.get(group)

    def note_rewards(self, report: RewardReport, caller: str | None) -> int:
        """Keep what a trainer made of samples, beside them.

        Args:
            caller: whose rollout it must be; None for anybody's.

        Returns:
            How many of the report's groups are still here.

        Raises:
            InvalidRequest: a group has another number of samples; nothing was kept.
            Forbidden: somebody else asked for the rollout.
        """
        found = [(self.get(told.id), told) for told in report.groups]
        known = [(group, told) for group, told in found if group is not None]
        for index, (group, told) in enumerate(found):
            if group is None:
                continue
            if caller not in (None, group.rollout.caller):
                raise Forbidden("rewards are taken from the caller whose rollout it was")
            if len(told.rewards) != (samples := len(group.group.samples)):
                where = f"groups[{index}].rewards"
                problem = Problem(where, f"{len(told.rewards)} rewards", f"{samples}, as sampled")
                raise InvalidRequest("there must be a reward for each sample", problems=[problem])
        for group, told in known:
            self._replace_rewards(group, told)
        return len(known)

    def _replace_rewards(self, group: RecentGroup, told: GroupRewards) -> None:
        self.revision += 1
        if group.rewards is None:  # a second verdict would count twice
            self.history.add_rewards(time.time(), told.rewards)
        grown = _rewards_size(told) - _rewards_size(group.rewards)
        group.rewards = told
        group.size += grown
        self._grow(grown)

    def _grow(self, added: int) -> None:
        self.size += added
        while self._groups and (self.size > self.max_bytes or len(self._groups) > self.max_groups):
            _, oldest = self._groups.popitem(last=False)
            self.size -= oldest.size


def _size(group: Group) -> int:
    return group.prompt_ids.nbytes + sum(
        _OBJECT_BYTES + s.completion_ids.nbytes + s.logprobs.nbytes + sys.getsizeof(s.text)
        for s in group.samples
    )


def _rewards_size(told: GroupRewards | None) -> int:
    if told is None:
        return 0
    components = sum(len(made_of) for made_of in told.components or ())
    return _REWARD_BYTES * (len(told.rewards) + 4 * components)

"""The accounts of a step: what became of every prompt, group, sample and token.

The ledger is filled from two ends. What the server sent is counted when it arrives; what became of
it is counted from the fates that the loop decided, and the tokens that bear loss from the batch's
own mask. :meth:`StepLedger.check` raises unless the ends meet, so nothing can fall out in between.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from shared.protocol import Rollout, Sample
from trainer.errors import LedgerError
from trainer.rewards import Failed, Outcome, TimedOut


class Fate(StrEnum):
    """What became of a sample. A group has the fate of the samples in it that were scored."""

    TRAINED = "trained"
    ZERO_VARIANCE = "zero_variance"
    """All scored samples of the group have one reward, so no advantage tells them apart."""
    SINGLETON = "singleton"
    """The only scored sample of its group: there is nothing to compare it with."""
    REWARD_ERROR = "reward_error"
    """The reward gave no verdict. As a group's fate: on none of its samples."""
    REWARD_TIMEOUT = "reward_timeout"
    """The reward gave no verdict in time."""
    TRUNCATED = "truncated"
    """Cut off at max_tokens: a peer of its group, kept out of the loss by the objective."""
    ABORTED = "aborted"
    """The server cut it off for a reason of its own."""
    EMPTY = "empty"
    """A completion without a token, which leaves nothing to train on."""
    OVERFLOWED = "overflowed"
    """Would have been trained, but no gradient of the step fitted into float16."""
    STALE = "stale"
    """Some token of it is from older weights than train.max_staleness allows."""


NEVER_SCORED = frozenset(
    {Fate.REWARD_ERROR, Fate.REWARD_TIMEOUT, Fate.ABORTED, Fate.EMPTY, Fate.STALE}
)
"""Fates of samples that are no peers of the others in their group."""


@dataclass(frozen=True)
class StepLedger:
    """One line of ``ledger.jsonl``. Tokens are completion tokens.

    Attributes:
        prompts: prompts sent to the server, those that replace useless groups included.
        group_size: completions asked for each.
        received_samples, received_tokens: what came back.
        groups, samples, tokens: the same by fate.
        loss_tokens: tokens that bore loss in one update, counted from the batch's mask.
        masked_tokens: of those, how many the mismatch correction left without a gradient.
        updates: optimizer updates made from this rollout.
        reward_errors: reasons for failed rewards, each with its count, most frequent first.
    """

    step: int
    prompts: int
    group_size: int
    received_samples: int
    received_tokens: int
    groups: dict[str, int]
    samples: dict[str, int]
    tokens: dict[str, int]
    loss_tokens: int
    updates: int
    masked_tokens: int = 0
    reward_errors: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Raise unless everything adds up.

        Raises:
            LedgerError: it names every pair of numbers that differ.
        """
        pairs = {
            "prompts and groups": (self.prompts, sum(self.groups.values())),
            "samples asked for and received": (
                self.prompts * self.group_size,
                self.received_samples,
            ),
            "samples received and accounted for": (
                self.received_samples,
                sum(self.samples.values()),
            ),
            "tokens received and accounted for": (self.received_tokens, sum(self.tokens.values())),
            "tokens trained and tokens that bore loss": (
                self.tokens.get(Fate.TRAINED, 0),
                self.loss_tokens,
            ),
        }
        wrong = [f"{name} differ: {a} and {b}" for name, (a, b) in pairs.items() if a != b]
        if wrong:
            raise LedgerError(f"step {self.step} does not add up: " + "; ".join(wrong))


def fates_of_group(
    samples: Sequence[Sample],
    outcomes: Sequence[Outcome],
    *,
    is_stale: Callable[[Sample], bool] = lambda _: False,
    mask_truncated: bool = False,
    by_part: bool = False,
) -> list[Fate]:
    """Decide for each sample of one group whether it is trained, and if not why.

    A group is useful when two of its scored samples have different rewards; then all its scored
    samples are trained, since those at the group's mean still count in the loss's denominator.

    Args:
        mask_truncated: keep samples that were cut off at max_tokens out of the loss.
        by_part: whether rewards differ as soon as one part does, whatever their sums are.
    """
    unusable = [
        Fate.STALE if is_stale(sample) else _unusable(sample, outcome)
        for sample, outcome in zip(samples, outcomes, strict=True)
    ]
    rewards = [
        outcome.parts if by_part else outcome.value
        for outcome, why in zip(outcomes, unusable, strict=True)
        if why is None and not isinstance(outcome, Failed)
    ]
    if len(rewards) == 1:
        verdict = Fate.SINGLETON
    else:
        verdict = Fate.TRAINED if len(set(rewards)) > 1 else Fate.ZERO_VARIANCE
    fates = [verdict if why is None else why for why in unusable]
    if mask_truncated:
        cut = [sample.finish_reason == "length" for sample in samples]
        pairs = zip(fates, cut, strict=True)
        fates = [Fate.TRUNCATED if c and f is Fate.TRAINED else f for f, c in pairs]
    return fates


def _unusable(sample: Sample, outcome: Outcome) -> Fate | None:
    if sample.finish_reason == "abort":
        return Fate.ABORTED
    if len(sample.completion_ids) == 0:
        return Fate.EMPTY
    if isinstance(outcome, TimedOut):
        return Fate.REWARD_TIMEOUT
    return Fate.REWARD_ERROR if isinstance(outcome, Failed) else None


def fate_of(group: Sequence[Fate]) -> Fate:
    """The fate of a group, given those of its samples."""
    scored = [fate for fate in group if fate not in NEVER_SCORED]
    for decisive in (Fate.TRAINED, Fate.OVERFLOWED):
        if decisive in scored:
            return decisive
    return scored[0] if scored else group[0]


def without_update(fates: Sequence[Sequence[Fate]]) -> list[list[Fate]]:
    """Fates of a step of which no update was made, because all its gradients overflowed."""
    return [[Fate.OVERFLOWED if f is Fate.TRAINED else f for f in group] for group in fates]


def account(
    *,
    step: int,
    prompts: int,
    group_size: int,
    rollout: Rollout,
    fates: Sequence[Sequence[Fate]],
    outcomes: Sequence[Sequence[Outcome]],
    loss_tokens: int,
    updates: int,
    masked_tokens: int = 0,
) -> StepLedger:
    """Draw up a step's accounts and check them.

    Args:
        prompts, group_size: as they were asked for, not as they came back.
        fates, outcomes: by group and sample, in the rollout's order.

    Raises:
        LedgerError: they do not add up.
    """
    samples = rollout.samples
    flat_fates = [fate for group in fates for fate in group]
    tokens: Counter[str] = Counter()
    for sample, fate in zip(samples, flat_fates, strict=False):
        tokens[fate] += len(sample.completion_ids)
    ledger = StepLedger(
        step=step,
        prompts=prompts,
        group_size=group_size,
        received_samples=len(samples),
        received_tokens=sum(len(sample.completion_ids) for sample in samples),
        groups=_count(fate_of(group) for group in fates),
        samples=_count(flat_fates),
        tokens={str(fate): count for fate, count in tokens.items()},
        loss_tokens=loss_tokens,
        updates=updates,
        masked_tokens=masked_tokens,
        reward_errors=_count(
            outcome.reason for group in outcomes for outcome in group if isinstance(outcome, Failed)
        ),
    )
    ledger.check()
    return ledger


def _count(items: Iterable[str]) -> dict[str, int]:
    return {str(item): count for item, count in Counter(items).most_common()}


def append(path: Path, ledger: StepLedger) -> None:
    """Add one line to ``ledger.jsonl``."""
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(ledger)) + "\n")

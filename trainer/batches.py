"""The samples of each step on disk, so that a step can be computed again without a server.

    batches/step-000007.msgpack    the rollout as it came over the wire, outcomes and fates

What a step did to the model follows from this file, the model before it and the configuration:
see :mod:`trainer.replay`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.codec import decode, encode, rollout_from_wire, rollout_to_wire
from shared.errors import TitoError
from shared.protocol import MSGPACK, Rollout
from trainer.errors import DataError
from trainer.files import step_path, step_paths
from trainer.ledger import Fate
from trainer.rewards import Failed, Outcome, Score, TimedOut

_ENDING = ".msgpack"


@dataclass(frozen=True)
class SavedBatch:
    """What a step was made of.

    Attributes:
        outcomes, fates: by group and sample, in the rollout's order.
    """

    step: int
    rollout: Rollout
    outcomes: list[list[Outcome]]
    fates: list[list[Fate]]


def batch_path(directory: Path, step: int) -> Path:
    """Where the batch of ``step`` is kept."""
    return step_path(directory, step, _ENDING)


def save_batch(
    directory: Path,
    *,
    step: int,
    rollout: Rollout,
    outcomes: Sequence[Sequence[Outcome]],
    fates: Sequence[Sequence[Fate]],
    keep: int,
) -> None:
    """Write the batch of a step, and delete all but the newest ``keep``; 0 keeps none."""
    if keep == 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "step": step,
        "rollout": rollout_to_wire(rollout, packed=True),
        "outcomes": [[_outcome_to_wire(outcome) for outcome in group] for group in outcomes],
        "fates": [[str(fate) for fate in group] for group in fates],
    }
    target = batch_path(directory, step)
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_bytes(encode(document, MSGPACK))
    os.replace(unfinished, target)
    for old in list(step_paths(directory, _ENDING).values())[:-keep]:
        old.unlink()


def forget_later_batches(directory: Path, last_step: int) -> None:
    """Delete the batches after ``last_step``: of steps that were lost and will be made again."""
    for step, path in step_paths(directory, _ENDING).items():
        if step > last_step:
            path.unlink()


def kept_steps(directory: Path) -> list[int]:
    """The steps whose batches are kept, in order."""
    return list(step_paths(directory, _ENDING))


def load_batch(directory: Path, step: int) -> SavedBatch:
    """Read a batch back.

    Raises:
        DataError: it was not kept, or is damaged.
    """
    path = batch_path(directory, step)
    if not path.exists():
        kept = kept_steps(directory)
        have = f"steps {kept[0]} to {kept[-1]} are" if kept else "none is"
        raise DataError(f"the batch of step {step} is not kept under {directory}: {have}; "
                        f"train.keep_batches says how many")  # fmt: skip
    try:
        document: dict[str, Any] = decode(path.read_bytes(), MSGPACK)
        return SavedBatch(
            step=document["step"],
            rollout=rollout_from_wire(document["rollout"]),
            outcomes=[[_outcome_from_wire(x) for x in group] for group in document["outcomes"]],
            fates=[[Fate(fate) for fate in group] for group in document["fates"]],
        )
    except (TitoError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _outcome_to_wire(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Failed):
        return {"failed": outcome.reason, "timed_out": isinstance(outcome, TimedOut)}
    return {"score": outcome.value, "parts": list(outcome.parts)}


def _outcome_from_wire(document: dict[str, Any]) -> Outcome:
    if "failed" in document:
        return (TimedOut if document["timed_out"] else Failed)(document["failed"])
    return Score(document["score"], tuple(document["parts"]))

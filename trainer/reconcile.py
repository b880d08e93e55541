"""From prompts to tokens that pulled on the model: one table in which every row follows.

    python -m trainer ledger runs/train [--step N]

Starts from what was asked for and takes away, stage by stage, what was not trained, until the
tokens are left that bore loss, and of those the ones that had a gradient. Each stage is counted by
itself, so that the last row says something: it must be what the optimizer saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainer.curve import read_records
from trainer.errors import DataError, LedgerError
from trainer.ledger import Fate, StepLedger

LOST = {
    Fate.ABORTED: "cut off by the server",
    Fate.EMPTY: "without a token",
    Fate.REWARD_ERROR: "reward failed",
    Fate.REWARD_TIMEOUT: "reward too slow",
    Fate.STALE: "stale",
    Fate.ZERO_VARIANCE: "zero variance",
    Fate.SINGLETON: "alone in their group",
    Fate.TRUNCATED: "truncated, kept out",
    Fate.OVERFLOWED: "gradient overflowed",
}
"""Every fate but ``trained``, in the order in which a sample may meet it."""


@dataclass(frozen=True)
class Row:
    """What a stage took, and what was left after it; tokens are completion tokens."""

    name: str
    samples: int
    tokens: int
    samples_left: int
    tokens_left: int


def total(ledgers: Iterable[StepLedger]) -> StepLedger:
    """Several steps as one, with the last one's number.

    Raises:
        DataError: there is none.
    """
    steps = list(ledgers)
    if not steps:
        raise DataError("there is no step in the ledger")

    def added(name: str) -> int:
        return sum(getattr(step, name) for step in steps)

    def joined(name: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for step in steps:
            counts.update(getattr(step, name))
        return dict(counts)

    return StepLedger(
        step=steps[-1].step,
        prompts=added("prompts"),
        group_size=steps[-1].group_size,
        received_samples=added("received_samples"),
        received_tokens=added("received_tokens"),
        groups=joined("groups"),
        samples=joined("samples"),
        tokens=joined("tokens"),
        loss_tokens=added("loss_tokens"),
        updates=added("updates"),
        masked_tokens=added("masked_tokens"),
        reward_errors=joined("reward_errors"),
    )


def reconcile(ledger: StepLedger) -> list[Row]:
    """The stages of a step, or of the :func:`total` of some.

    Raises:
        LedgerError: what is left in the end is not what bore loss, or a fate is unknown.
    """
    unknown = {*ledger.samples, *ledger.tokens} - {*LOST, Fate.TRAINED}
    if unknown:
        raise LedgerError(f"fates that no stage knows: {', '.join(sorted(unknown))}")
    samples, tokens = ledger.received_samples, ledger.received_tokens
    rows = []
    for fate, name in LOST.items():
        gone = ledger.samples.get(fate, 0), ledger.tokens.get(fate, 0)
        samples, tokens = samples - gone[0], tokens - gone[1]
        rows.append(Row(name, *gone, samples, tokens))
    left, bore = (samples, tokens), (ledger.samples.get(Fate.TRAINED, 0), ledger.loss_tokens)
    if left != bore:
        raise LedgerError(f"step {ledger.step}: {left[0]} samples with {left[1]} tokens are left, "
                          f"and {bore[0]} with {bore[1]} bore loss")  # fmt: skip
    if not 0 <= ledger.masked_tokens <= tokens:
        raise LedgerError(f"step {ledger.step}: {ledger.masked_tokens} tokens masked of {tokens}")
    masked = ledger.masked_tokens
    return [*rows, Row("masked for mismatch", 0, masked, samples, tokens - masked)]


def read_ledgers(path: Path) -> list[StepLedger]:
    """The lines of ``ledger.jsonl``, each checked.

    Raises:
        DataError: the file is missing, or of another version.
        LedgerError: a line does not add up.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist: is {path.parent} a run's directory?")
    known = {field.name for field in fields(StepLedger)}
    ledgers = [StepLedger(**_only(record, known, path)) for record in read_records(path)]
    for ledger in ledgers:
        ledger.check()
        reconcile(ledger)
    return ledgers


def _only(record: dict[str, Any], known: set[str], path: Path) -> dict[str, Any]:
    if set(record) - known:
        raise DataError(f"{path} has fields of another version: {sorted(set(record) - known)}")
    return record


def table(run: Path, step: int | None) -> str:
    """The table of one step, or of all.

    Raises:
        TitoError: as :func:`read_ledgers`, or there is no such step.
    """
    ledgers = read_ledgers(run / "ledger.jsonl")
    chosen = [ledger for ledger in ledgers if step in (None, ledger.step)]
    if not chosen:
        raise DataError(f"step {step} is not in {run / 'ledger.jsonl'}")
    whole = total(chosen)
    rows = reconcile(whole)
    title = f"{len(chosen)} steps" if step is None else f"step {step}"
    groups = ", ".join(f"{count} {name}" for name, count in sorted(whole.groups.items()))
    lines = [
        f"{title}: {whole.prompts} prompts -> {sum(whole.groups.values())} groups ({groups})",
        f"{'':<22}{'samples':>10}{'tokens':>12}{'left':>10}{'tokens':>12}",
        f"{'received':<22}{'':>22}{whole.received_samples:>10}{whole.received_tokens:>12}",
    ]
    for row in rows:
        if row.samples or row.tokens:
            lines.append(f"- {row.name:<20}{row.samples:>10}{row.tokens:>12}"
                         f"{row.samples_left:>10}{row.tokens_left:>12}")  # fmt: skip
    last = rows[-1]
    lines.append(f"{'= trained':<22}{'':>22}{last.samples_left:>10}{last.tokens_left:>12}")
    return "\n".join(lines)

"""The table from prompts to trained tokens, and that it refuses what does not add up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import DataError, LedgerError
from trainer.ledger import Fate, StepLedger, append
from trainer.reconcile import LOST, read_ledgers, reconcile, table, total

SAMPLES = {"trained": 4, "zero_variance": 4, "stale": 1, "truncated": 2, "reward_error": 1}
TOKENS = {"trained": 40, "zero_variance": 20, "stale": 9, "truncated": 30, "reward_error": 1}


def ledger(**changes: Any) -> StepLedger:
    whole = StepLedger(
        step=3,
        prompts=3,
        group_size=4,
        received_samples=12,
        received_tokens=100,
        groups={"trained": 2, "zero_variance": 1},
        samples=SAMPLES,
        tokens=TOKENS,
        loss_tokens=40,
        updates=1,
        masked_tokens=5,
    )
    return replace(whole, **changes)


def test_every_fate_is_a_stage() -> None:
    assert {*LOST, Fate.TRAINED} == set(Fate)


def test_stages_take_what_they_say() -> None:
    rows = {row.name: row for row in reconcile(ledger())}
    assert (rows["zero variance"].samples, rows["zero variance"].tokens) == (4, 20)
    assert (rows["stale"].samples, rows["stale"].tokens) == (1, 9)
    last = rows["masked for mismatch"]
    assert (last.tokens, last.samples_left, last.tokens_left) == (5, 4, 35)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_tokens": 41}, "4 samples with 40 tokens are left, and 4 with 41 bore loss"),
        ({"received_tokens": 101}, "with 41 tokens are left"),
        ({"samples": SAMPLES | {"stale": 2}}, "3 samples with 40 tokens"),
        ({"tokens": TOKENS | {"truncated": 29}}, "with 41 tokens are left"),
        ({"masked_tokens": 41}, "41 tokens masked of 40"),
        ({"samples": SAMPLES | {"lost": 0}}, "no stage knows: lost"),
    ],
)
def test_what_does_not_add_up_raises(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LedgerError, match=says):
        reconcile(ledger(**changes))


def test_steps_add_up() -> None:
    whole = total([ledger(), ledger(step=4)])
    assert (whole.step, whole.prompts, whole.loss_tokens) == (4, 6, 80)
    assert whole.samples == {name: 2 * count for name, count in SAMPLES.items()}
    assert reconcile(whole)[-1].tokens_left == 70
    with pytest.raises(DataError, match="no step"):
        total([])


def test_table(tmp_path: Path) -> None:
    for step in (3, 4):
        append(tmp_path / "ledger.jsonl", ledger(step=step))
    assert table(tmp_path, 3).splitlines() == [
        "step 3: 3 prompts -> 3 groups (2 trained, 1 zero_variance)",
        "                         samples      tokens      left      tokens",
        "received                                            12         100",
        "- reward failed                1           1        11          99",
        "- stale                        1           9        10          90",
        "- zero variance                4          20         6          70",
        "- truncated, kept out          2          30         4          40",
        "- masked for mismatch          0           5         4          35",
        "= trained                                            4          35",
    ]
    assert table(tmp_path, None).startswith("2 steps: 6 prompts -> 6 groups")
    with pytest.raises(DataError, match="step 9 is not in"):
        table(tmp_path, 9)


def test_a_file_that_was_tampered_with_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(DataError, match="a run's directory"):
        read_ledgers(path)
    path.write_text(json.dumps(asdict(ledger()) | {"received_samples": 13}) + "\n")
    with pytest.raises(LedgerError, match="samples asked for and received differ: 12 and 13"):
        read_ledgers(path)
    path.write_text(json.dumps(asdict(ledger()) | {"surprise": 1}) + "\n")
    with pytest.raises(DataError, match="another version"):
        read_ledgers(path)

"""What a run's directory tells, as far as it goes."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.batches import SavedBatch, kept_steps, load_batch
from trainer.checkpoint import latest_checkpoint
from trainer.curve import read_records
from trainer.errors import CheckpointError, DataError

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class RunRecord:
    """A run.

    Attributes:
        path: its directory.
        metrics, ledger, evaluations: lines of its files, one for each step or measurement.
        config: the resolved configuration, as TOML; empty if it was not kept.
        objective: the resolved loss, as text; empty if it was not kept.
        saved_steps: those whose samples were kept.
    """

    path: Path
    metrics: list[dict[str, Any]]
    ledger: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    config: str
    objective: str
    saved_steps: list[int]

    def batches(self) -> Iterator[SavedBatch]:
        """Kept samples, step by step; one step is in memory at a time.

        Raises:
            DataError: one of them is damaged.
        """
        for step in self.saved_steps:
            yield load_batch(self.path / "batches", step)

    def setting(self, section: str, key: str) -> str:
        """A value of the configuration as text; empty if there is none."""
        return str(tomllib.loads(self.config).get(section, {}).get(key, ""))


def read_run(path: Path) -> RunRecord:
    """Read a run's directory.

    Raises:
        DataError: it holds no run, or a file in it is damaged.
    """
    if not (path / "metrics.jsonl").is_file():
        raise DataError(
            f"{path} holds no run: there is no metrics.jsonl; give a run's train.output"
        )
    record = RunRecord(
        path=path,
        metrics=_lines(path / "metrics.jsonl"),
        ledger=_lines(path / "ledger.jsonl"),
        evaluations=_lines(path / "evaluation.jsonl"),
        config=_text(path / "config.toml"),
        objective=_text(path / "objective.txt"),
        saved_steps=kept_steps(path / "batches"),
    )
    if not record.metrics:
        raise DataError(f"{path} holds a run without a finished step")
    return record


def decoder(record: RunRecord) -> Decode | None:
    """Text of token ids, special tokens included, by the run's own tokenizer if it is here."""
    from transformers import AutoTokenizer

    for folder in _tokenizer_folders(record):
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception:  # of a file that is not there or not whole, in any of many formats
            continue
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    return None


def _tokenizer_folders(record: RunRecord) -> Iterator[str]:
    with contextlib.suppress(CheckpointError):
        yield str(latest_checkpoint(record.path / "checkpoints") / "model")
    if model := record.setting("model", "path"):
        yield model


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_records(path) if path.exists() else []
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""

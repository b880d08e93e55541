"""Where prompts and reference answers come from: JSONL, datasets on disk, or built-in arithmetic.

A source is read by position: ``take(position, count)`` depends on its arguments alone, so one
integer in a checkpoint is all that a resumed run needs. Rows are shuffled anew in every epoch, by a
permutation that is a pure function of seed and epoch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from trainer.arithmetic import ArithmeticStream, Problem, Split
from trainer.config import ArithmeticConfig, Config, DataConfig
from trainer.errors import DataError

Row = dict[str, Any]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """One thing to ask the policy.

    Attributes:
        prompt: plain text, or chat messages for the model's template.
        reference: what a reward compares with; None when the data has no answers.
    """

    prompt: str | Messages
    reference: str | None


class PromptSource(Protocol):
    """Tasks by position. Positions never run out: a finite source starts its next epoch."""

    def take(self, position: int, count: int) -> list[Task]:
        """Tasks ``position .. position + count - 1``."""
        ...


@dataclass(frozen=True)
class ArithmeticSource:
    """The built-in generator as a source."""

    stream: ArithmeticStream

    def take(self, position: int, count: int) -> list[Task]:
        """See :meth:`PromptSource.take`."""
        return [_arithmetic_task(problem) for problem in self.stream.batch(position, count)]


@dataclass(frozen=True)
class TableSource:
    """Rows of a file, reshuffled every epoch (or in file order without ``shuffle``).

    Attributes:
        rows: anything with a length whose items are dicts; checked for the fields beforehand.
    """

    rows: Sequence[Row]
    data: DataConfig
    seed: int

    def take(self, position: int, count: int) -> list[Task]:
        """See :meth:`PromptSource.take`."""
        return [self._task(place) for place in range(position, position + count)]

    def _task(self, place: int) -> Task:
        epoch, offset = divmod(place, len(self.rows))
        order = epoch_order(len(self.rows), self.seed, epoch) if self.data.shuffle else None
        index = order[offset] if order else offset
        return _row_task(self.rows[index], self.data, f"{self.data.path} row {index}")


# A batch may span two epochs; more are never needed at once.
@lru_cache(maxsize=2)
def epoch_order(length: int, seed: int, epoch: int) -> list[int]:
    """The permutation of ``range(length)`` that epoch ``epoch`` goes through."""
    order = list(range(length))
    random.Random(f"epoch:{seed}:{epoch}").shuffle(order)
    return order


def training_prompts(config: Config) -> PromptSource:
    """The source that ``config.data`` describes.

    Raises:
        DataError: the file is missing, empty, malformed, or lacks a field.
    """
    if config.data.source == "arithmetic":
        return ArithmeticSource(_stream(config.data.arithmetic, "train", config.train.seed))
    return TableSource(_load_rows(config.data), config.data, config.train.seed)


def held_out_tasks(config: Config) -> list[Task]:
    """The ``evaluation.prompts`` fixed tasks on which accuracy is measured.

    Arithmetic uses its own held-out split; a file must be named in ``evaluation.path``.

    Raises:
        DataError: as for :func:`training_prompts`.
    """
    evaluation = config.evaluation
    if not evaluation.prompts:
        return []
    if config.data.source == "arithmetic":
        # A fixed seed: accuracies of runs that differ in train.seed stay comparable.
        stream = _stream(config.data.arithmetic, "held_out", seed=0)
        return [_arithmetic_task(problem) for problem in _distinct(stream, evaluation.prompts)]
    if evaluation.path is None:
        raise DataError("no held-out problems: set evaluation.path")
    # Problems are compared across runs, so their order is the file's.
    held_out = {"path": evaluation.path, "split": evaluation.split, "shuffle": False}
    source = config.data.model_copy(update=held_out)
    rows = _load_rows(source)
    return TableSource(rows, source, seed=0).take(0, min(evaluation.prompts, len(rows)))


def _stream(options: ArithmeticConfig, split: Split, seed: int) -> ArithmeticStream:
    return ArithmeticStream(
        split=split,
        seed=seed,
        max_operand=options.max_operand,
        operations=options.operations,
        question=options.question,
    )


def _distinct(stream: ArithmeticStream, count: int) -> list[Problem]:
    try:
        return stream.distinct(count)
    except ValueError as error:
        raise DataError(f"evaluation.prompts: {error}") from None


def _arithmetic_task(problem: Problem) -> Task:
    return Task(problem.messages, problem.answer)


def _load_rows(data: DataConfig) -> Sequence[Row]:
    path = Path(data.path or "")
    if not path.exists():
        raise DataError(
            f"{path} does not exist",
            advice="set data.path or evaluation.path, as seen from where the trainer starts",
        )
    rows, columns = _read_dataset(path, data.split) if data.source == "dataset" else _read(path)
    if not len(rows):
        raise DataError(f"{path} has no rows")
    _require_columns(path, data, columns)
    return rows


def _read(path: Path) -> tuple[list[Row], list[str]]:
    """Rows and the columns that every row has."""
    rows: list[Row] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_parse_line(line, f"{path}:{number}"))
    columns = list(rows[0]) if rows else []
    return rows, [name for name in columns if all(name in row for row in rows)]


def _parse_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object")
    return row


def _read_dataset(path: Path, split: str | None) -> tuple[Sequence[Row], list[str]]:
    """A saved Hugging Face dataset, or one split of a saved dataset dictionary."""
    # Imported here: JSONL and arithmetic need no such large dependency.
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError:
        raise DataError("reading a saved dataset needs `pip install datasets`") from None
    try:
        dataset: Any = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(f"{path} is not a saved dataset: {error}") from None
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise DataError(f"{path} has no split {split!r}; it has: {', '.join(dataset)}")
        dataset = dataset[split]
    return dataset, dataset.column_names


def _require_columns(path: Path, data: DataConfig, columns: list[str]) -> None:
    wanted = [data.prompt_field, *([data.answer_field] if data.answer_field else [])]
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(map(repr, missing))} in some or all rows; columns in every "
            f"row: {', '.join(columns) or '(none)'}",
            advice="set data.prompt_field and data.answer_field to columns that are there",
        )


def _row_task(row: Row, data: DataConfig, where: str) -> Task:
    answer = row[data.answer_field] if data.answer_field else None
    reference = None if answer is None else str(answer)
    return Task(_prompt(row[data.prompt_field], data, where), reference)


def _prompt(value: Any, data: DataConfig, where: str) -> str | Messages:
    if isinstance(value, str) and value:
        text = data.template.replace("{prompt}", value)
        return [*_system(data), {"role": "user", "content": text}] if data.chat else text
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return [*_system(data), *value]
    raise DataError(
        f"{where}: {data.prompt_field!r} is {value!r:.80}; allowed: a non-empty string or a "
        f"non-empty list of chat messages"
    )


def _system(data: DataConfig) -> Messages:
    return [{"role": "system", "content": data.system}] if data.system else []

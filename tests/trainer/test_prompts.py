from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.arithmetic import split_of
from trainer.config import Config
from trainer.errors import DataError
from trainer.prompts import epoch_order, held_out_tasks, training_prompts

MakeConfig = Callable[..., Config]


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: Any) -> str:
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def jsonl_config(make_config: MakeConfig, jsonl: Callable[..., str]) -> MakeConfig:
    def build(*rows: Any, seed: int = 0, **data: Any) -> Config:
        path = jsonl(*rows)
        return make_config(
            data={"source": "jsonl", "path": path, **data},
            evaluation={"path": path},
            train={"seed": seed},
        )

    return build


ROWS = [{"prompt": f"q{i}", "answer": i} for i in range(7)]


def test_strings_become_chats_and_answers_become_text(jsonl_config: MakeConfig) -> None:
    config = jsonl_config(
        {"prompt": "2+2", "answer": 4}, template="Q: {prompt}", system="Be brief."
    )
    (task,) = training_prompts(config).take(0, 1)
    assert task.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: 2+2"},
    ]
    assert task.reference == "4"


def test_plain_text_and_messages_pass_through(jsonl_config: MakeConfig) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert (
        training_prompts(jsonl_config({"prompt": "x{y}", "answer": ""}, chat=False))
        .take(0, 1)[0]
        .prompt
        == "x{y}"
    )
    config = jsonl_config({"prompt": messages, "answer": None})
    (task,) = training_prompts(config).take(0, 1)
    assert (task.prompt, task.reference) == (messages, None)


def test_position_alone_decides_what_is_read(jsonl_config: MakeConfig) -> None:
    config = jsonl_config(*ROWS)
    whole = training_prompts(config).take(0, 30)
    # Read by another object, in other pieces, out of order, across the ends of epochs.
    other = training_prompts(config)
    assert other.take(20, 10) == whole[20:]
    assert other.take(3, 9) == whole[3:12]


def test_every_epoch_has_each_row_once_in_another_order(jsonl_config: MakeConfig) -> None:
    source = training_prompts(jsonl_config(*ROWS))
    epochs = [[task.reference for task in source.take(7 * i, 7)] for i in range(5)]
    assert all(sorted(epoch) == [str(i) for i in range(7)] for epoch in map(_known, epochs))
    assert len({tuple(epoch) for epoch in epochs}) > 1


def _known(values: list[str | None]) -> list[str]:
    assert None not in values
    return [str(value) for value in values]


def test_seed_changes_the_order_and_shuffle_can_be_off(jsonl_config: MakeConfig) -> None:
    assert epoch_order(50, 0, 0) != epoch_order(50, 1, 0)
    assert epoch_order(50, 0, 0) != epoch_order(50, 0, 1)
    in_order = training_prompts(jsonl_config(*ROWS, shuffle=False)).take(0, 7)
    assert [task.reference for task in in_order] == [str(i) for i in range(7)]


def test_missing_column_names_those_there_are(jsonl_config: MakeConfig) -> None:
    config = jsonl_config({"question": "a", "answer": "b", "level": 1})
    with pytest.raises(DataError, match=r"lacks 'prompt'.*question, answer, level"):
        training_prompts(config)
    training_prompts(jsonl_config({"prompt": "a"}, answer_field="")).take(0, 1)


def test_column_missing_in_a_late_row_is_found_at_the_start(jsonl_config: MakeConfig) -> None:
    with pytest.raises(DataError, match="lacks 'answer'"):
        training_prompts(jsonl_config(*ROWS, {"prompt": "no answer"}))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no rows"),
        ([ROWS[0], "{oops"], "rows.jsonl:2 is not JSON"),
        (["[1]"], "not a JSON object"),
    ],
)
def test_malformed_files(jsonl_config: MakeConfig, rows: list[Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        training_prompts(jsonl_config(*rows))


@pytest.mark.parametrize("prompt", ["", [], 3, None, ["text"]])
def test_unusable_prompts_name_the_row(jsonl_config: MakeConfig, prompt: Any) -> None:
    source = training_prompts(jsonl_config({"prompt": prompt, "answer": "1"}))
    with pytest.raises(DataError, match="row 0"):
        source.take(0, 1)


def test_missing_file(make_config: MakeConfig) -> None:
    config = make_config(
        data={"source": "jsonl", "path": "no/such.jsonl"}, evaluation={"prompts": 0}
    )
    with pytest.raises(DataError, match=r"no/such\.jsonl does not exist"):
        training_prompts(config)


def test_held_out_rows_stay_in_file_order(jsonl_config: MakeConfig) -> None:
    tasks = held_out_tasks(jsonl_config(*ROWS))
    assert [task.reference for task in tasks] == [str(i) for i in range(7)]


def test_arithmetic_trains_and_evaluates_on_disjoint_problems(make_config: MakeConfig) -> None:
    config = make_config(
        data={"arithmetic": {"max_operand": 12, "question": "{a} {op} {b}"}},
        evaluation={"prompts": 15},
    )
    held_out = held_out_tasks(config)
    assert len({str(task.prompt) for task in held_out}) == 15
    trained = training_prompts(config).take(0, 3000)
    for tasks, split in ((held_out, "held_out"), (trained, "train")):
        for task in tasks:
            a, op, b = str(task.prompt[0]["content"]).split()  # type: ignore[index]
            assert split_of(int(a), op, int(b)) == split


def test_no_held_out_problems_and_more_than_there_are(
    make_config: MakeConfig, jsonl: Callable[..., str]
) -> None:
    data = {"source": "jsonl", "path": jsonl(*ROWS)}
    assert held_out_tasks(make_config(data=data, evaluation={"prompts": 0})) == []
    config = make_config(data={"arithmetic": {"max_operand": 9}}, evaluation={"prompts": 64})
    with pytest.raises(DataError, match=r"evaluation\.prompts: 64 distinct problems"):
        held_out_tasks(config)


def test_held_out_arithmetic_does_not_depend_on_the_seed(make_config: MakeConfig) -> None:
    one, two = (make_config(train={"seed": seed}) for seed in (1, 2))
    assert held_out_tasks(one) == held_out_tasks(two)
    assert training_prompts(one).take(0, 20) != training_prompts(two).take(0, 20)


def test_saved_dataset(tmp_path: Path, make_config: MakeConfig) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {
        "question": [[{"role": "user", "content": f"q{i}"}] for i in range(4)],
        "answer": [f"#### {i}" for i in range(4)],
    }
    one = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict({"train": one, "test": one.select([2])}).save_to_disk(str(tmp_path / "d"))

    def config(**data: Any) -> Config:
        common = {"source": "dataset", "path": str(tmp_path / "d"), "prompt_field": "question"}
        return make_config(
            data={**common, **data},
            evaluation={"path": str(tmp_path / "d"), "split": "test"},
        )

    tasks = training_prompts(config(split="train", shuffle=False)).take(0, 5)
    assert [task.reference for task in tasks] == [f"#### {i}" for i in (0, 1, 2, 3, 0)]
    assert tasks[1].prompt == [{"role": "user", "content": "q1"}]
    assert [task.reference for task in held_out_tasks(config(split="train"))] == ["#### 2"]
    with pytest.raises(DataError, match="no split None; it has: train, test"):
        training_prompts(config())
    with pytest.raises(DataError, match=r"lacks 'text'.*question, answer"):
        training_prompts(config(split="train", prompt_field="text"))


def test_a_directory_that_is_no_dataset(tmp_path: Path, make_config: MakeConfig) -> None:
    pytest.importorskip("datasets")
    config = make_config(
        data={"source": "dataset", "path": str(tmp_path)}, evaluation={"prompts": 0}
    )
    with pytest.raises(DataError, match="not a saved dataset"):
        training_prompts(config)

"""``trainer init``: what it writes is explained, complete, and runs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.protocol import Sample
from tests.trainer.fake_servers import fake_servers
from trainer import cli
from trainer.config import Config
from trainer.config_file import load_config
from trainer.curve import read_records
from trainer.init import USED_MOST, write_project

FILES = ["held_out.jsonl", "prompts.jsonl", "reward.py", "train.toml"]


@pytest.fixture(scope="module")
def fake_url(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as (server,):
        yield server.url


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine"]) == 0
    return tmp_path / "mine"


def reward_of(project: Path) -> Any:
    spec = importlib.util.spec_from_file_location("written_reward", project / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward


def test_a_dry_run_works_at_once_and_the_next_commands_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "my task", "--model", "some/model"]) == 0
    told = capsys.readouterr().out
    assert "python -m trainer train 'my task/train.toml'" in told
    assert cli.main(["train", "my task/train.toml", "--dry-run"]) == 0
    copy = tmp_path / "copy.toml"
    copy.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config(copy) == load_config(Path("my task/train.toml"))
    assert load_config(copy).model.path == "some/model"
    assert sorted(path.name for path in (tmp_path / "my task").iterdir()) == FILES


def test_the_working_directory_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert load_config(Path("train.toml")).reward.function == "reward.py:reward"


@pytest.mark.parametrize("present", FILES)
def test_nothing_is_overwritten(
    present: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / present).write_text("mine", encoding="utf-8")
    assert cli.main(["init", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == [present]
    assert (tmp_path / present).read_text(encoding="utf-8") == "mine"
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2
    assert str(tmp_path / present) in error[0]


def test_every_section_is_there_and_every_key_has_its_meaning_above_it(project: Path) -> None:
    lines = (project / "train.toml").read_text(encoding="utf-8").splitlines()
    assert {name.partition(".")[0] for name in USED_MOST} == set(Config.model_fields)
    keys = [number for number, line in enumerate(lines) if " = " in line and line[0] != "#"]
    assert len(keys) == sum(map(len, USED_MOST.values()))
    assert all(lines[number - 1].startswith("# ") for number in keys)
    assert "None" not in "\n".join(lines)
    assert max(map(len, lines)) <= 100


def test_a_step_is_made_with_what_was_written(
    project: Path, untrained_model: Path, fake_url: str
) -> None:
    # The fake server babbles, so the answers become such that some of it is half right.
    rows = [{"prompt": f"{number}?", "answer": letter} for number, letter in enumerate("etaoinsh")]
    text = "\n".join(map(json.dumps, rows))
    (project / "prompts.jsonl").write_text(text, encoding="utf-8")
    settings = [
        f"model.path={untrained_model}",
        "model.device=cpu",
        f"server.url={fake_url}",
        "rollout.max_tokens=32",
        "train.steps=1",
    ]
    assert cli.main(["train", "mine/train.toml", *settings]) == 0
    (entry,) = read_records(project / "run" / "ledger.jsonl")
    assert entry["received_samples"] == 8 * 8
    assert entry["reward_errors"] == {}
    assert entry["samples"]["trained"] > 0
    assert entry["updates"] == 1
    evaluations = read_records(project / "run" / "evaluation.jsonl")
    assert [e["step"] for e in evaluations] == [0, 1]


def test_the_reward_tells_right_from_wrong(project: Path, make_sample: Any) -> None:
    reward, sample = reward_of(project), make_sample()
    assert isinstance(sample, Sample)

    def score(text: str) -> float:
        return float(reward(prompt="q", text=text, reference="Paris", sample=sample))

    assert [score(text) for text in (" paris. ", "It is Paris", "London")] == [1.0, 0.5, 0.0]


def test_sample_rows_are_apart_from_the_held_out(tmp_path: Path) -> None:
    _, _, train, held_out = write_project(tmp_path / "new" / "one")
    rows = [train.read_text(encoding="utf-8"), held_out.read_text(encoding="utf-8")]
    first, second = ({json.loads(line)["prompt"] for line in text.splitlines()} for text in rows)
    assert first
    assert second
    assert not first & second

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ServerUnreachable
from trainer import cli
from trainer.config import Config
from trainer.config_file import load_config

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "m"\n[server]\nurl = "{NOWHERE}"\n', encoding="utf-8")
    return path


def test_dry_run_prints_the_resolved_configuration_and_stops(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Overrides may stand on both sides of an option.
    command = ["train", str(file), "optimizer.lr=2e-5", "--dry-run", "train.steps=3"]
    assert cli.main(command) == 0
    copy = tmp_path / "copy.toml"
    copy.write_text(capsys.readouterr().out, encoding="utf-8")
    config = load_config(copy)
    assert (config.optimizer.lr, config.train.steps) == (2e-5, 3)
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_told_without_a_traceback(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(file), "optimizer.lrr=1", "--dry-run"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("error: ")
    assert error[1] == "  optimizer.lrr: got an unknown key; allowed: lr?"
    assert error[-1] == "(--traceback shows where this was raised)"


@pytest.mark.parametrize(
    "command",
    [["check", NOWHERE, "--max-tokens", "8"], ["peek", NOWHERE, "hi"], ["check", NOWHERE]],
)
def test_no_server_is_two_lines_and_a_failure(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.client.time.sleep", lambda _: None)
    assert cli.main(command) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2
    assert error[0].startswith(f"error: no answer from {NOWHERE}")


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.client.time.sleep", lambda _: None)
    with pytest.raises(ServerUnreachable):
        cli.main(["peek", NOWHERE, "hi", "--traceback"])


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["fly"],
        ["train"],
        ["peek"],
        ["check", NOWHERE, "a=b"],
        ["train", "x", "--what"],
    ],
)
def test_wrong_usage_is_code_2(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_interruption_is_code_130(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.config_file.load_config", interrupt)
    assert cli.main(["train", str(file)]) == 130


def test_evaluating_nothing_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(file), "evaluation.prompts=0"]) == 1
    assert "nothing to evaluate" in capsys.readouterr().err


def test_check_and_peek_need_no_torch() -> None:
    code = "import sys, trainer.cli, trainer.checks, trainer.peek; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_trainer_never_imports_the_server() -> None:
    code = (
        "import sys, trainer.train, trainer.demo, trainer.cli; "
        "sys.exit(any(name.split('.')[0] in ('rollout_server', 'vllm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_check_of_a_real_server(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    # A barely trained policy rambles, so the last check fails; the first two pass.
    code = cli.main(["check", server_url, "--prompts", "2", "--group-size", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 ok     records: 8 records of 8")
    assert lines[1].startswith("2 ok     variety")
    assert code == (1 if "FAILED" in "".join(lines) else 0)


def test_peek_at_a_real_server(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["peek", server_url, "1+1=?", "--group-size", "3", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.count("mean logprob") == 3


def test_eval_of_a_real_server(
    file: Path, server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"server.url={server_url}", "evaluation.prompts=8", "evaluation.max_tokens=4"]
    assert cli.main(["eval", str(file), *settings]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("served (v")
    assert [line.split()[0] for line in printed[1:]] == ["greedy", "lenient", "strict", "form"]


@pytest.mark.parametrize(("begun", "resumed"), [(False, False), (True, True)])
def test_what_restarts_by_itself_goes_on_if_it_has_begun(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, resumed: bool
) -> None:
    asked: list[bool] = []

    def train(_: Config, *, resume: bool, **__: Any) -> bool:
        asked.append(resume)
        return True

    monkeypatch.setattr("trainer.train.train", train)
    output = tmp_path / "run"
    if begun:
        (output / "checkpoints" / "step-000003").mkdir(parents=True)
    command = ["train", str(file), f'train.output="{output}"', "--resume-if-begun"]
    assert cli.main(command) == 0
    assert asked == [resumed]

"""Settings from flags, environment and file: who wins, and what a bad value says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout_server.__main__ import main
from rollout_server.settings import ServerSettings, settings_from_args
from rollout_server.vllm_engine import VLLMEngine, _engine_args


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TITO_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text('model = "from-file"\nport = 1001\nmax_model_len = 64\neager = true\n')
    return path


def test_defaults_are_those_of_the_issue() -> None:
    settings = settings_from_args(["--model", "x"])
    assert settings.dtype == "bfloat16"
    assert settings.max_model_len == 1024
    assert settings.memory_share == 0.3
    assert settings.sleep_mode
    assert settings.host == "127.0.0.1"


def test_flags_beat_environment_beats_file_beats_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITO_MODEL", "from-env")
    monkeypatch.setenv("TITO_PORT", "1002")
    settings = settings_from_args(["--config", str(file), "--port", "1003"])
    assert settings.port == 1003
    assert settings.model == "from-env"
    assert settings.max_model_len == 64
    assert settings.dtype == "bfloat16"


def test_the_file_alone_suffices(file: Path) -> None:
    settings = settings_from_args(["--config", str(file)])
    assert (settings.model, settings.port, settings.eager) == ("from-file", 1001, True)


def test_two_files_do_not_mix(file: Path) -> None:
    assert settings_from_args(["--config", str(file)]).port == 1001
    assert settings_from_args(["--model", "x"]).port == ServerSettings.model_fields["port"].default


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--no-sleep-mode"], "sleep_mode", False),
        (["--sleep-mode"], "sleep_mode", True),
        (["--eager"], "eager", True),
        (["--attention", "TRITON_ATTN"], "attention", "TRITON_ATTN"),
        (["--no-eager"], "eager", False),
        ([], "eager", None),
        (["--kv-cache-gib", "0.5"], "kv_cache_gib", 0.5),
        (["--memory-share", "1"], "memory_share", 1.0),
        (["--seed", "-3"], "seed", -3),
    ],
)
def test_flags_become_typed_values(flags: list[str], name: str, value: object) -> None:
    assert getattr(settings_from_args(["--model", "x", *flags]), name) == value


@pytest.mark.parametrize(
    ("chosen", "told"),
    [("auto", None), ("FLASH_ATTN", "FLASH_ATTN"), ("TRITON_ATTN", "TRITON_ATTN")],
)
def test_the_engine_is_told_of_attention_kernels(
    tiny_model: Path, chosen: str, told: str | None
) -> None:
    settings = ServerSettings.model_validate({"model": tiny_model.as_posix(), "attention": chosen})
    assert _engine_args(settings, VLLMEngine.worker_extension).attention_backend == told


def test_directories_may_be_repeated_and_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    flags = ["--reload-dirs", "link", "--reload-dirs", "a/../b"]
    settings = settings_from_args(["--model", "x", *flags])
    assert settings.reload_dirs == [tmp_path / "real", tmp_path / "b"]


def test_directories_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITO_RELOAD_DIRS", '["/a", "/b"]')
    assert settings_from_args(["--model", "x"]).reload_dirs == [Path("/a"), Path("/b")]


def test_settings_do_not_change() -> None:
    settings = settings_from_args(["--model", "x"])
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--model"),
        (["--model", "x", "--port", "0"], "--port"),
        (["--model", "x", "--port", "http"], "--port"),
        (["--model", "x", "--dtype", "int8"], "--dtype"),
        (["--model", "x", "--attention", "fast"], "--attention"),
        (["--model", "x", "--memory-share", "1.5"], "--memory-share"),
        (["--model", "x", "--memory-share", "nan"], "--memory-share"),
        (["--model", "x", "--max-model-len", "1"], "--max-model-len"),
        (["--model", "x", "--max-upload-gib", "inf"], "--max-upload-gib"),
        (["--model", "x", "--max-upload-gib", "-1"], "--max-upload-gib"),
        (["--model", "x", "--kv-cache-gib", "inf"], "--kv-cache-gib"),
        (["--model", "x", "--max-samples", "0"], "--max-samples"),
        (["--model", "x", "--log-level", "loud"], "--log-level"),
        (["--model", "x", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
    ],
)
def test_a_bad_value_is_one_clear_error(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = exit_of(flags, monkeypatch)
    assert said in message
    assert len(message.splitlines()) == 2
    assert "--help" in message


def exit_of(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command prints when it refuses to start."""
    monkeypatch.setattr(sys, "argv", ["rollout-server", *flags])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, str)  # printed on standard error, with exit status 1
    return caught.value.code


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TITO_PORT", "high", "port"),
        ("TITO_RELOAD_DIRS", "/not/json", "reload_dirs"),
        ("TITO_SLEEP_MODE", "maybe", "sleep-mode"),
    ],
)
def test_a_bad_variable_is_one_clear_error(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    message = exit_of(["--model", "x"], monkeypatch)
    assert said in message
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot = 8300", "prot"),
        ("port = 'high'", "--port"),
        ("port = ", "server.toml"),
        ("port = 1\nport = 2", "server.toml"),
    ],
)
def test_a_bad_file_is_one_clear_error(
    file: Path, content: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(content)
    message = exit_of(["--model", "x", "--config", str(file)], monkeypatch)
    assert said in message
    assert len(message.splitlines()) == 2


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings_from_args(["--model", "x", "--prot", "5"])
    assert caught.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_an_abbreviated_flag_is_refused() -> None:
    # It would become ambiguous, or another setting, with the next flag that is added.
    with pytest.raises(SystemExit):
        settings_from_args(["--model", "x", "--max-model", "64"])


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings_from_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    shown = " ".join(text.split())
    for name, field in ServerSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description
        assert field.description.split(".")[0] in shown
        assert isinstance(field.json_schema_extra, dict)
        assert f"\n{field.json_schema_extra['group']}:" in text

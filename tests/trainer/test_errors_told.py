"""Errors as a user meets them: what happened, what to do, two lines, no traceback unless asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared import errors
from shared.client import RolloutClient
from shared.errors import TitoError
from tests.trainer.fake_servers import FakeServer, fake_servers
from trainer import cli
from trainer.advice import advice_for
from trainer.checkpoint import restore_trainer
from trainer.errors import OutOfMemory
from trainer.packing import use_packing
from trainer.tiny_policy import build_model, build_tokenizer

NOWHERE = "http://127.0.0.1:9"
REWARDS = """
def broken(**_):
    raise KeyError("no such thing")

def fine(*, sample, **_):
    return float(sample.completion_ids[0])
"""
GPU_SAYS = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 3.19 GiB is free. Process 7 has 1.00 GiB memory in use. If reserved but unallocated "
    "memory is large try something else."
)


@pytest.fixture(scope="module")
def server(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as (server,):
        yield server


Tell = Callable[..., list[str]]
printed: list[str] = []
"""What the last command said besides its error."""


@pytest.fixture
def tell(untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tell:
    """Train with some settings changed; what was printed as an error, by line."""
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    known: dict[str, dict[str, Any]] = {
        "model": {"path": str(untrained_model), "device": "cpu"},
        "server": {"url": NOWHERE, "ready_timeout": 0},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 4},
        "reward": {"function": f"{tmp_path}/rewards.py:fine"},
        "train": {"output": str(tmp_path / "run"), "steps": 1},
        "evaluation": {"prompts": 0},
    }
    lines = [
        line
        for section, table in known.items()
        for line in [f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    ]
    (tmp_path / "run.toml").write_text("\n".join(lines), encoding="utf-8")

    def run(*settings: str, command: Sequence[str] = ("train",)) -> list[str]:
        assert cli.main([*command, str(tmp_path / "run.toml"), *settings]) == 1
        said = capsys.readouterr()
        assert "Traceback" not in said.err + said.out
        printed[:] = said.out.splitlines()
        return said.err.splitlines()

    return run


def assert_told(lines: list[str], what: str, to_do: str) -> None:
    assert len(lines) == 2, lines
    assert lines[0].startswith("error: ")
    assert what in lines[0]
    assert to_do in lines[1]
    assert lines[1].endswith("(--traceback shows where this was raised)")


def test_no_server(tell: Tell) -> None:
    assert_told(tell(), f"no answer from {NOWHERE}: ", "python -m rollout_server --model PATH")
    # Nobody should wonder what a run is waiting for.
    assert printed[-1].startswith(f"waiting up to 0 s for a server: no answer from {NOWHERE}: ")


def test_a_server_that_is_not_ready(tell: Tell, server: FakeServer) -> None:
    server.engine.failure = "gone"
    try:
        lines = tell(f"server.url={server.url}")
    finally:
        server.engine.failure = None
    assert_told(lines, "the engine is restarting", "its log says why")


def test_somebody_else_has_the_lease(tell: Tell, server: FakeServer) -> None:
    with RolloutClient(server.url) as client, client.lease(holder="host:run-a", ttl=60):
        lines = tell(f"server.url={server.url}")
    assert_told(lines, "is leased to 'host:run-a'", "end host:run-a, or wait: its lease ends ")


def test_another_tokenizer(tell: Tell, server: FakeServer, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    other = tmp_path / "other"
    build_model(tokenizer).save_pretrained(other)
    tokenizer.save_pretrained(other)
    lines = tell(f"server.url={server.url}", f"model.path={other}")
    assert_told(
        lines, "the server's tokenizer (", "start the server with the model that is trained"
    )


@pytest.mark.parametrize(
    ("path", "what"), [("/no/such/model", "is not a directory"), (".", "has no config.json")]
)
def test_a_wrong_model_path(tell: Tell, path: str, what: str) -> None:
    lines = tell(f"model.path={path}")
    assert_told(lines, f"cannot load the model {path}: it {what}", "set model.path to")


def test_a_model_that_no_hub_has(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = tell("model.path=nobody/nothing")
    assert_told(lines, "cannot load the model nobody/nothing: ", "set model.path to")


def test_a_missing_column(tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n', encoding="utf-8")
    lines = tell("data.source=jsonl", f"data.path={tmp_path}/rows.jsonl")
    assert_told(
        lines,
        "rows.jsonl lacks 'prompt' in some or all rows; columns in every row: question, answer",
        "set data.prompt_field and data.answer_field",
    )


def test_a_reward_that_raises(tell: Tell, server: FakeServer, tmp_path: Path) -> None:
    broken = f"{tmp_path}/rewards.py:broken"
    lines = tell(f"server.url={server.url}", f"reward.function={broken}")
    what = "none of 4 samples could be scored, most often: KeyError: 'no such thing'"
    assert_told(lines, what, f"fix the reward ({broken})")
    # Nothing is left that would have to be continued.
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("rewards.py:gone", "has no function 'gone'"),
        ("none.py:reward", "does not exist"),
        ("unknown", "reward 'unknown' is unknown; allowed: numeric, "),
    ],
)
def test_a_reward_that_is_not_there(tell: Tell, tmp_path: Path, function: str, what: str) -> None:
    lines = tell(f"reward.function={tmp_path / function if ':' in function else function}")
    assert_told(lines, what, "fix reward.function, its options or its file")


def test_no_memory_on_the_gpu(
    tell: Tell, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.train.learn", no_memory)
    lines = tell(f"server.url={server.url}")
    assert_told(lines, "3.19 GiB is free", "lower train.micro_batch_tokens (now 16384), or set")
    assert "Process 7" not in lines[0]


def test_no_memory_on_a_cpu(tell: Tell) -> None:
    # What torch itself says of it, asked for more than there can be.
    def build(*_: Any) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.run.build_learner", build)
        lines = tell()
    assert_told(lines, "the trainer is out of memory: ", "train.micro_batch_tokens")


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(GPU_SAYS)


def test_no_memory_is_not_taken_for_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    states: dict[str, Any] = {
        "optimizer": {"state": {}, "param_groups": []},
        "scheduler": {},
        "random": {},
    }
    torch.save(states, tmp_path / "trainer.pt")
    full: Any = SimpleNamespace(load_state_dict=no_memory, param_groups=[])
    with pytest.raises(torch.OutOfMemoryError):
        restore_trainer(tmp_path, optimizer=full, scheduler=full, scaler=full)


def test_no_memory_is_not_taken_for_a_model_that_cannot_be_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.packing._hidden", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        use_packing(build_model(build_tokenizer()))


def test_an_error_of_torch_that_is_no_lack_of_memory_stays(tell: Tell) -> None:
    def build(*_: Any) -> None:
        torch.zeros(2) @ torch.zeros(3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.run.build_learner", build)
        with pytest.raises(RuntimeError, match="size"):
            tell()


def test_a_run_that_is_there_already(tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    assert_told(tell(), "holds those of another run", "--resume continues it")


def test_a_disk_that_refuses(tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file", encoding="utf-8")
    lines = tell()
    assert lines[0].startswith("error: ")
    assert str(tmp_path / "run") in lines[0]


@pytest.mark.parametrize("package", ["rich", "torch"])
def test_a_package_that_is_not_installed(package: str, tmp_path: Path) -> None:
    # A client that was installed alone has the commands too.
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n', encoding="utf-8")
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        f"sys.argv = ['trainer', 'train', {str(tmp_path / 'run.toml')!r}]; "
        "from trainer.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    first, second = done.stderr.splitlines()
    assert done.returncode == 1
    assert first == f"error: {package} is not installed"
    assert second.startswith("  install what the trainer needs: pip install '.[trainer]'")


def test_the_traceback_is_shown_when_asked_for(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.run.build_learner", no_memory)
    with pytest.raises(OutOfMemory) as caught:
        tell(command=["train", "--traceback"])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TitoError) and kind is not TitoError
]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_server_refuses_there_is_something_to_do(kind: type[TitoError]) -> None:
    # An InvalidRequest or a missing policy says itself what would be accepted.
    silent = kind in (errors.InvalidRequest, errors.NotFound, errors.UnsupportedMediaType)
    advice = advice_for(kind("what happened"))
    assert bool(advice) != silent
    assert "\n" not in advice
    assert not advice.endswith(".")

"""The README's examples, run as they stand but for addresses and names of files."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_server.auth import Authenticator
from rollout_server.settings import settings_from_args
from shared.client import RolloutClient
from tests.rollout_server.support import Weights, base_weights, lazy
from trainer.arguments import parse_arguments

README = (Path(__file__).parents[1] / "README.md").read_text()
ADDRESS = "http://localhost:8300"


def blocks(language: str) -> list[str]:
    """Code blocks of a language, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [code for name, code in fenced if name == language]


def block(language: str, part: str) -> str:
    """The one block that has this in it."""
    (found,) = [code for code in blocks(language) if part in code]
    return found


def commands(program: str) -> list[list[str]]:
    """Every command line of a program, without comments."""
    text = "\n".join(blocks("")).replace("\\\n", " ")
    return [shlex.split(x, comments=True) for x in text.splitlines() if x.startswith(program)]


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> Weights:
    return base_weights(tiny_model)


@pytest.mark.parametrize(
    "part",
    ["import httpx, msgpack", "client.rollout([", "rollout_stream", "chat_turn", "client.lease"],
)
def test_python(part: str, server_url: str, tiny_model: Path, weights: Weights) -> None:
    code = block("python", part).replace(ADDRESS, server_url)
    # Short, since the tiny policy hardly ever stops by itself.
    code = code.replace("deadline_seconds=3600", "deadline_seconds=3600, max_tokens=8")
    with RolloutClient(server_url, timeout=120) as client:
        names: dict[str, Any] = {
            "client": client,
            "prompts": ["12+7=", "3+4="],
            "score": print,
            "tokenizer": AutoTokenizer.from_pretrained(tiny_model),
            "url": server_url,
            "tensors": lazy(weights.tensors),
            "RolloutClient": RolloutClient,
        }
        exec(compile(code, f"README, {part}", "exec"), names)
        if part == "chat_turn":
            mask, batch = names["batch"].completion_mask, names["batch"]
            assert mask.any()
            assert not (mask & ~batch.attention_mask).any()


def test_curl(server_url: str) -> None:
    (command,) = [line for line in commands("curl ") if "/rollout" in " ".join(line)]
    command = [word.replace("localhost:8300", server_url) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert '"groups"' in done.stdout


@pytest.mark.parametrize("name", ["peek", "check"])
def test_looking_at_samples(name: str, server_url: str) -> None:
    found = [line for line in commands(".venv/bin/python -m trainer") if line[3] == name]
    assert found
    for line in found:
        words = [word.replace(ADDRESS, server_url) for word in line[3:]]
        short = ["--max-tokens", "8"] if len(words) > 2 or name == "check" else []
        command = [sys.executable, "-m", "trainer", *words, *short]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        # A check may fail on this policy; it must not break.
        assert done.returncode in ((0, 1) if name == "check" else (0,)), done.stderr
        assert "Traceback" not in done.stderr


def test_commands_of_the_trainer_exist() -> None:
    found = commands(".venv/bin/python -m trainer")
    assert len(found) > 8
    for line in found:
        parse_arguments(line[3:])


def test_flags_of_the_server_exist(tmp_path: Path) -> None:
    found = commands(".venv/bin/rollout-server")
    assert len(found) == 2
    for line in found:
        settings_from_args([str(tmp_path) if word == "spool" else word for word in line[1:]])


def test_the_tokens_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(block("toml", "[[token]]").replace("best from: openssl rand -hex 32", "0" * 64))
    file.chmod(0o600)
    assert Authenticator.from_file(file)


def test_the_reward() -> None:
    from trainer.config import RewardConfig

    code: dict[str, Any] = {}
    exec(block("python", "async def reward"), code)
    assert code["reward"].__name__ == "reward"
    tables = tomllib.loads(block("toml", "[[reward.functions]]"))["reward"]
    assert len(RewardConfig(**tables).functions) == 2

"""What CONTRIBUTING.md and CHANGELOG.md name is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUFFIXES = ("/", ".py", ".md", ".toml", ".json")


def words_in_code(name: str) -> set[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```\n.*?^```", "", text, flags=re.DOTALL | re.M))
    return {word for part in [*blocks, *inline] for word in part.split()}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_are_named_exist(name: str) -> None:
    paths = {
        word for word in words_in_code(name) if word.endswith(SUFFIXES) and not word.startswith("/")
    }
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_modules_that_may_import_vllm_are_those_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        contract
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract.get("forbidden_modules") == ["vllm"]
    )
    allowed = {
        line.partition(" ")[0].replace(".", "/") + ".py" for line in contract["ignore_imports"]
    }
    assert allowed <= words_in_code("CONTRIBUTING.md")


def test_the_release_is_in_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"\n## {project['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()

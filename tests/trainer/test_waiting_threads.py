"""How long OpenMP's threads spin in a trainer's process while they wait for each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# vLLM on CPU preloads OpenMP in its own process, and with it in all that tests start from there.
UNSET = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "LD_PRELOAD"}


def spins(absent: Path, **environment: str) -> set[int]:
    """What OpenMP has read when a command of the trainer has loaded torch and failed."""
    inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
    result = subprocess.run(
        [sys.executable, "-m", "trainer", "replay", str(absent), "--step", "1"],
        env=inherited | {"OMP_DISPLAY_ENV": "VERBOSE"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "does not exist" in result.stderr
    found = {int(count) for count in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr)}
    if not found:
        pytest.skip("this torch was not built with GNU's OpenMP")
    return found


def test_threads_do_not_spin(tmp_path: Path) -> None:
    assert spins(tmp_path / "absent") == {0}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"GOMP_SPINCOUNT": "77"}, 77), ({"OMP_WAIT_POLICY": "ACTIVE"}, 30_000_000_000)],
)
def test_a_choice_of_the_user_stands(
    tmp_path: Path, environment: dict[str, str], expected: int
) -> None:
    assert spins(tmp_path / "absent", **environment) == {expected}

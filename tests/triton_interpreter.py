"""Triton's kernels without a GPU, in its interpreter: what tests of kernels share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(*arguments: str) -> None:
    """Run Python with these arguments and kernels interpreted; the test fails as that does.

    In a process of its own: the variable is read when triton is imported.
    """
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""What vLLM's loaders do with the checkpoints of several families is seen whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_every_parameter_of_every_family_is_known() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.rollout_server.model_families"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 4
    for found in lines:
        assert found["same"] == found["after"] == [], found
        assert found["unlike"] == found["tensors"], found
        for check in (found["by names"], found["by record"]):
            assert check["unknown"] == check["different"] == [], found
            assert check["checked"] > 10, found

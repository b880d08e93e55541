"""Training runs as processes, to be stopped and killed like those of a person."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.rollout_server.support import eventually
from trainer.config import Config
from trainer.config_file import to_toml

REWARD = """
def even(*, sample, **_):
    return float(sample.completion_ids[0] % 2)
"""
PATIENCE_S = 240.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Training:
    """``python -m trainer train`` in a session of its own, like a job of a shell.

    Args:
        config: of the run.
        file: where the configuration is written; the process's output goes beside it.
        launcher: what starts the module.
    """

    def __init__(
        self,
        config: Config,
        file: Path,
        *,
        resume: bool = False,
        launcher: Sequence[str] = (sys.executable,),
    ) -> None:
        self.output = Path(config.train.output)
        self._log = file.with_suffix(".log")
        file.write_text(to_toml(config), encoding="utf-8")
        command = [*launcher, "-m", "trainer", "train", str(file)]
        with self._log.open("wb") as log:
            self.process = self._start([*command, "--resume"] if resume else command, log)

    @staticmethod
    def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def printed(self) -> str:
        """What it has said so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def steps(self) -> int:
        """Steps whose metrics are written."""
        file = self.output / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_for_steps(self, count: int) -> None:
        """Wait until that many steps are made, or the process has ended."""
        eventually(lambda: self.process.poll() is not None or self.steps() >= count, PATIENCE_S)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """What a terminal does on Ctrl-C: the whole group of processes gets the signal."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End the trainer alone, on the spot."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.interrupt(signal.SIGKILL)

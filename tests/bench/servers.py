"""Servers in processes of their own, and what is asked of them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx

from shared.client import RolloutClient

CONTEXT = 512
"""Tokens that an engine has room for in a sequence."""
PROMPT = list(range(5, 37))
READY_S = 1800.0
_END_S = 60.0


def set_environment() -> None:
    """What every engine that is started from here needs, where it is not set already."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """Where a server listens, and its process that answers."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self, path: str) -> None:
        """Wait until that path answers with success.

        Raises:
            RuntimeError: it has ended, or is late; the message has the end of its log.
        """
        deadline = time.monotonic() + READY_S
        while not self._answers(path):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a server did not come up:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.5)

    def _answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, timeout=5).is_success
        except httpx.HTTPError:
            return False

    def cpu(self) -> float:
        """Seconds of processor time so far, without its children's."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def started(command: Sequence[str], log: Path, **environment: str) -> Iterator[Server]:
    """A server in a process of its own, not yet ready.

    Args:
        command: that takes ``--port``.
        log: file for what it prints.
        environment: besides this process's.
    """
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=out, env=os.environ | environment
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        # After an error requests are still under way, for which a server would wait.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()


def rollout_server(
    model: Path, log: Path, *flags: str, **environment: str
) -> AbstractContextManager[Server]:
    """This project's, for sequences of ``CONTEXT`` tokens; not yet ready."""
    command = [sys.executable, "-m", "rollout_server", "--model", str(model)]
    return started([*command, "--max-model-len", str(CONTEXT), *flags], log, **environment)


def roll(client: RolloutClient, tokens: int) -> str:
    """Sample one completion of so many tokens; the digest of the weights that made it."""
    rollout = client.rollout([PROMPT], group_size=1, max_tokens=tokens, ignore_eos=True, text=False)
    return rollout.samples[0].digest

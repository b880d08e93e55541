"""docker compose for real: the demo, a trainer that dies, a server that dies.

    make test-compose

It needs a Docker engine with compose, builds both images and takes about ten minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.client import RolloutClient
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

# The server is the parent of the engine's processes, and the child of the container's init.
KILL_THE_SERVER = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    words = path.read_bytes().split(b"\\0")
    if any(word.endswith(b"/rollout-server") for word in words) and path.parent.name != "1":
        os.kill(int(path.parent.name), signal.SIGKILL)
"""


class Compose:
    """One project, apart from whatever else runs on this machine."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._environment = {**os.environ, "TITO_PORT": str(port)}
        self._command = ["docker", "compose", "--project-name", f"tito-test-{os.getpid()}"]

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def state(self, service: str) -> dict[str, Any]:
        """Of a container that runs or has run."""
        state: dict[str, Any] = json.loads(self("ps", "--all", "--format", "json", service))
        return state

    def info(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/info", timeout=30).json()
        return answer


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except (httpx.HTTPError, KeyError, ValueError):
            pass  # the server is on its way down or up
        time.sleep(1)
    pytest.fail(f"in vain: {what}")


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    if subprocess.run(
        ["docker", "compose", "version"], check=False, capture_output=True
    ).returncode:
        pytest.skip("docker compose is not installed")
    compose = Compose(free_port())
    try:
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "60")


def test_the_whole_story(compose: Compose) -> None:
    compose("up", "--detach", "--build", "--wait")
    with RolloutClient(compose.url, timeout=120) as client:
        rollout = client.rollout(["12+7="], group_size=2, max_tokens=8)
        assert len(rollout.samples) == 2

    wait_until(lambda: compose.info()["version"] >= 3, "the trainer publishes")
    compose("kill", "trainer")
    live = compose.info()

    compose("exec", "-T", "server", "python3", "-c", KILL_THE_SERVER)
    wait_until(lambda: compose.state("server")["Health"] != "healthy", "the server is gone")
    wait_until(lambda: compose.state("server")["Health"] == "healthy", "the server is back")
    back = compose.info()
    assert (back["version"], back["digest"]) == (live["version"], live["digest"])

    compose("up", "--detach", "--no-deps", "trainer")
    wait_until(lambda: compose.info()["version"] > live["version"], "another trainer publishes")
    wait_until(lambda: compose.state("trainer")["State"] == "exited", "the demo ends")
    assert compose.state("trainer")["ExitCode"] == 0, compose("logs", "trainer")
    assert "held-out accuracy" in compose("logs", "trainer")

    compose("stop", "server")
    assert compose.state("server")["ExitCode"] == 0, compose("logs", "server")
    assert "tito.server: stopped" in compose("logs", "server")

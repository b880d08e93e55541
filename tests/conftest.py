"""One real server, with vLLM on CPU and a tiny policy, for the whole session."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from shared.client import RolloutClient

SERVER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # An engine with a thread per core starves whatever else the tests run.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.update(SERVER_ENV)

# A busy machine is no property of the code under test.
hypothesis.settings.register_profile("tito", deadline=None)
hypothesis.settings.load_profile("tito")

StartServer = Callable[..., contextlib.AbstractContextManager[str]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely trained policy: its samples are long and differ, which most tests want."""
    from trainer.tiny_policy import make_tiny_policy

    return make_tiny_policy(tmp_path_factory.mktemp("models") / "tiny", warm_up_steps=5)


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Starts ``python -m rollout_server`` with given flags; yields its URL once it is ready."""

    @contextlib.contextmanager
    def start(*flags: str, env: dict[str, str] | None = None) -> Iterator[str]:
        port = free_port()
        log = tmp_path_factory.mktemp("server") / "server.log"
        command = [sys.executable, "-m", "rollout_server", "--port", str(port), *flags]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **(env or {})}
            )
        url = f"http://127.0.0.1:{port}"
        try:
            with RolloutClient(url) as client:
                wait_ready(client, process, log)
            yield url
        finally:
            if process.poll() is None:
                process.terminate()
                assert process.wait(60) == 0, "a server that is told to stop has not failed"

    return start


def wait_ready(client: RolloutClient, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a server, but not for one that has exited."""
    for _ in range(180):
        with contextlib.suppress(Exception):
            client.wait_ready(2.0)
            return
        if process.poll() is not None:
            break
    pytest.fail(f"the server did not come up:\n{log.read_text()[-4000:]}")


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def reload_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory from which the session's server may read checkpoints."""
    return tmp_path_factory.mktemp("reload")


@pytest.fixture(scope="session")
def staging_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's server keeps the checkpoints that it was sent."""
    return tmp_path_factory.mktemp("staging")


@pytest.fixture(scope="session")
def server_url(
    start_server: StartServer, tiny_model: Path, reload_dir: Path, staging_dir: Path
) -> Iterator[str]:
    """URL of the session's server. Its policy's version only ever grows."""
    flags = ["--model", str(tiny_model), "--reload-dirs", str(reload_dir)]
    limits = ["--max-body-mib", "1", "--max-samples", "4096"]
    with start_server(*flags, *limits, "--staging-dir", str(staging_dir)) as url:
        yield url


@pytest.fixture(scope="session")
def deterministic_url(start_server: StartServer, tiny_model: Path) -> Iterator[str]:
    """URL of a server whose seeded rollouts have the same bits again."""
    with start_server("--model", str(tiny_model), "--deterministic") as url:
        yield url


@pytest.fixture
def client(server_url: str) -> Iterator[RolloutClient]:
    """A client of the session's server."""
    with RolloutClient(server_url, timeout=120) as client:
        yield client

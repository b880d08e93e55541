"""Coming up and going down: what answers while the engine starts, and when it cannot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from rollout_server.app import create_app
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.errors import EngineUnavailable
from tests.conftest import free_port
from tests.rollout_server.support import FakeEngine, eventually, post, serving, upload_of


def settings_for(model: Path, staging: Path) -> ServerSettings:
    return ServerSettings(model=str(model), staging_dir=staging)


def test_while_the_engine_starts(tiny_model: Path, tmp_path: Path) -> None:
    gate = threading.Event()

    def slow_engine(_: ServerSettings) -> FakeEngine:
        assert gate.wait(30)
        return FakeEngine()

    app = create_app(settings_for(tiny_model, tmp_path), build_engine=slow_engine)
    with serving(app) as url:
        try:
            assert httpx.get(f"{url}/healthz").json() == {"status": "alive"}
            assert "tito_ready 0.0" in httpx.get(f"{url}/metrics").text
            for method, path in [
                ("GET", "/readyz"),
                ("GET", "/info"),
                ("POST", "/rollout"),
                ("POST", "/reload"),
            ]:
                response = httpx.request(method, f"{url}{path}")
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) >= 1
                error = response.json()["error"]
                assert error["code"] == "engine_unavailable"
                assert "starting" in error["message"]
        finally:
            gate.set()
        with RolloutClient(url) as client:
            assert client.wait_ready(30).version == 0
            assert "tito_ready 1.0" in httpx.get(f"{url}/metrics").text
            assert client.rollout([[5]], group_size=1, max_tokens=1).samples[0].version == 0


def test_a_client_that_gives_up_waiting_says_why(tiny_model: Path, tmp_path: Path) -> None:
    gate = threading.Event()

    def slow_engine(_: ServerSettings) -> FakeEngine:
        assert gate.wait(30)
        return FakeEngine()

    app = create_app(settings_for(tiny_model, tmp_path), build_engine=slow_engine)
    with serving(app) as url:
        try:
            with RolloutClient(url) as client, pytest.raises(EngineUnavailable, match="starting"):
                client.wait_ready(0.3)
        finally:
            gate.set()


def test_an_engine_that_does_not_start_is_told_of(tiny_model: Path, tmp_path: Path) -> None:
    told: list[Exception] = []

    def broken(_: ServerSettings) -> FakeEngine:
        raise RuntimeError("no such device")

    app = create_app(
        settings_for(tiny_model, tmp_path), build_engine=broken, on_startup_failure=told.append
    )
    with serving(app) as url:
        eventually(lambda: told)
        assert str(told[0]) == "no such device"
        assert httpx.get(f"{url}/readyz").status_code == 503


def test_a_service_that_fails_after_its_engine_started_stops_the_engine(tmp_path: Path) -> None:
    # The engine's processes hold the accelerator's memory; they must not outlive a failure.
    engine, told = FakeEngine(), list[Exception]()
    app = create_app(
        settings_for(tmp_path / "no-model", tmp_path),
        build_engine=lambda _: engine,
        on_startup_failure=told.append,
    )
    with serving(app):
        eventually(lambda: told)
    assert "shutdown" in engine.calls


def test_the_engine_is_stopped_with_the_service(tiny_model: Path, tmp_path: Path) -> None:
    engine = FakeEngine()
    app = create_app(settings_for(tiny_model, tmp_path), build_engine=lambda _: engine)
    with serving(app) as url, RolloutClient(url) as client:
        client.wait_ready(30)
    assert engine.calls[-1] == "shutdown"


def test_a_request_before_the_engine_runs_nothing(tiny_model: Path, tmp_path: Path) -> None:
    gate, engine = threading.Event(), FakeEngine()

    def slow_engine(_: ServerSettings) -> FakeEngine:
        assert gate.wait(30)
        return engine

    app = create_app(settings_for(tiny_model, tmp_path), build_engine=slow_engine)
    with serving(app) as url:
        try:
            assert post(url, {"prompts": ["a"]}).status_code == 503
            assert post(url, raw=upload_of({}), path="/reload").status_code == 503
            assert engine.calls == []
        finally:
            gate.set()


def refusal(*flags: str, seconds: float = 120) -> str:
    """Standard error of a server that refuses to start."""
    command = [sys.executable, "-m", "rollout_server", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, env=os.environ
    )
    assert done.returncode not in (0, -9, -11), done.stderr[-2000:]
    return done.stderr


@pytest.mark.parametrize(
    ("made", "what"), [(False, "is not a directory"), (True, "no config.json")]
)
def test_a_wrong_model_path_ends_the_process_with_two_clear_lines(
    tmp_path: Path, made: bool, what: str
) -> None:
    wrong = tmp_path / "no-such-model"
    if made:
        wrong.mkdir()
    first, second = refusal("--model", str(wrong), "--port", str(free_port())).splitlines()
    assert first.startswith(f"rollout-server: cannot serve the model {wrong}: ")
    assert what in first
    assert second.startswith("  give --model ")


def test_a_client_that_was_installed_alone_says_what_the_server_needs() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; import rollout_server.__main__"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first == "rollout-server: only the client is installed"
    assert "pip install '.[server-cpu]'" in second


def test_a_bad_flag_ends_the_process_at_once() -> None:
    error = refusal("--model", "x", "--port", "99999", seconds=30)
    assert error.splitlines()[0].startswith("rollout-server: --port")
    assert len(error.splitlines()) == 2
    assert "Traceback" not in error


def test_a_port_in_use_ends_the_process(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        # Nobody should wait for an engine to load before being told.
        error = refusal("--model", str(tiny_model), "--port", port, seconds=20)
    first, second = error.splitlines()
    assert "address already in use" in first.lower()
    assert second == "  end what listens there, or choose another --host or --port"

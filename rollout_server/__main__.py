"""``python -m rollout_server --model PATH_OR_NAME``: serve rollouts until told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

try:
    import uvicorn
except ModuleNotFoundError:  # a client that was installed alone has this command too
    sys.exit(
        "rollout-server: only the client is installed\n"
        "  install what the server needs: pip install '.[server-cpu]' or '.[server-gpu]'"
    )

from rollout_server.app import create_app
from rollout_server.connections import KEEP_ALIVE_S, Connection
from rollout_server.logs import configure
from rollout_server.origins import is_loopback
from rollout_server.settings import ServerSettings, settings_from_args
from rollout_server.start_failure import EngineDidNotStart
from shared import tracing

log = logging.getLogger("tito.server")


def main() -> None:
    """Entry point of the console script; exits non-zero with two lines when it cannot serve."""
    settings = _settings()
    configure(settings.log_level, settings.log_format)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    failures: list[Exception] = []

    def give_up(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    try:
        app = create_app(settings, on_startup_failure=give_up)
    except ValueError as error:
        _die(str(error), "see rollout-server --help")
    if settings.tokens_file is None and not is_loopback(settings.host):
        log.warning("whoever reaches %s may do everything; see --tokens-file", settings.host)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level=settings.log_level,
            log_config=None,
            access_log=False,
            http=Connection,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=settings.shutdown_seconds,
        )
    )
    # Before the engine loads, which takes long: what is wrong already should be heard of at once.
    _refuse_no_model(settings.model)
    listening = _listen(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn lets running requests end, and then raises the signal once more: done is done.
        signal.signal(number, lambda *_: None)
    # vLLM's spans go the same way as ours.
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with tracing.exported("tito-server"):
        server.run(sockets=[listening])
    if failures:
        _tell(failures[0])
    if not app.state.startup.is_up:
        # Told to stop while the engine was loading, in a thread that cannot be stopped.
        logging.shutdown()
        os._exit(0)
    log.info("stopped")


def _tell(failure: Exception) -> NoReturn:
    log.debug("startup failed", exc_info=failure)
    if isinstance(failure, EngineDidNotStart):
        _die(f"the engine did not start: {failure}", failure.advice)
    reason = " ".join(str(failure).split()) or type(failure).__name__
    _die(f"cannot serve: {reason}", "--log-level debug shows where this was raised")


def _refuse_no_model(model: str) -> None:
    """A path is told apart from a name before the engine asks the hub for either."""
    path = Path(model)
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or path.exists()
    if looks_like_path and not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is not a directory"
        _die(
            f"cannot serve the model {model}: it {what}",
            "give --model a checkpoint's directory, or the name of one on the hub",
        )


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{settings.host} port {settings.port}"
        _die(
            f"cannot listen on {where}: {error.strerror}",
            "end what listens there, or choose another --host or --port",
        )


def _settings() -> ServerSettings:
    try:
        return settings_from_args(sys.argv[1:])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        flag = "--" + "-".join(map(str, first["loc"])).replace("_", "-")
        got = "" if first["type"] == "missing" else f": got {first['input']!r}"
        _die(f"{flag}{got}: {first['msg']}", "see rollout-server --help")
    except (FileNotFoundError, ValueError) as error:
        _die(str(error), "see rollout-server --help")


def _die(what: str, hint: str) -> NoReturn:
    sys.exit(f"rollout-server: {what}\n  {hint}")


if __name__ == "__main__":
    main()

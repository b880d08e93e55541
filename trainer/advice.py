"""What to do about an error: the second line of what the command prints."""

from __future__ import annotations

from shared import errors
from shared.errors import TitoError
from trainer.errors import TrainerError

INSTALL = "install what the trainer needs: pip install '.[trainer]' in Tito's directory"

_BY_KIND: dict[type[TitoError], str] = {
    errors.ServerUnreachable: "start one with `python -m rollout_server --model PATH`, or say "
    "where it is: server.url=URL in training, else the URL on the command line",
    errors.EngineUnavailable: "the server is there but cannot generate: its log says why; a longer "
    "server.ready_timeout waits for a model that takes long to load",
    errors.EngineFailure: "the server's log says what the engine failed on",
    errors.Conflict: "end the other trainer, wait, or use another server",
    errors.PreconditionFailed: "another program publishes to this server: end it, or use a lease",
    errors.WeightsRejected: "the server must serve the model that is trained: start it with "
    "--model as in model.path. It continues with the weights it had",
    errors.Unauthorized: "put a token that the server knows into the environment: TITO_TOKEN, "
    "or the variable that server.token_env names",
    errors.Forbidden: "use a token with that right, or give this one the right in --tokens-file",
    errors.ProtocolMismatch: "install the same release on both sides",
    errors.MalformedBody: "what answers may not be a rollout server: look at the URL",
    errors.Overloaded: "ask for less at a time, or start the server with a higher "
    "--max-queued-samples",
    errors.BodyTooLarge: "start the server with a larger --max-body-mib or --max-upload-gib",
    errors.InsufficientStorage: "free some space there, or start the server with another "
    "--staging-dir or --spool-dir",
    errors.DeadlineExceeded: "ask for fewer or shorter samples, or give them more time",
}


def missing_package(error: ModuleNotFoundError) -> str:
    """What is said of an import that failed."""
    return f"{(error.name or str(error)).partition('.')[0]} is not installed"


def advice_for(error: TitoError) -> str:
    """One line without a full stop; empty when the message says all there is to say."""
    if isinstance(error, TrainerError):
        return error.advice
    if isinstance(error, errors.Conflict) and error.details.get("holder"):
        return _wait_for(error)
    return next((text for kind, text in _BY_KIND.items() if isinstance(error, kind)), "")


def _wait_for(error: TitoError) -> str:
    left = float(error.details.get("seconds_left") or 0.0)
    return (
        f"end {error.details['holder']}, or wait: its lease ends {left:.0f} s after it has died; "
        f"or use another server"
    )

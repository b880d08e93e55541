"""One exception tree for both sides of the wire.

    TitoError
    |-- InvalidRequest          422  a field is wrong; ``problems`` says which and what is allowed
    |-- MalformedBody           400  the body is not the msgpack, JSON or safetensors it says it is
    |-- Unauthorized            401  no bearer token, or one that nobody was given
    |-- Forbidden               403  the token lacks the scope, or path or web page is not allowed
    |-- NotFound                404  no such policy or route
    |-- Conflict                409  another trainer holds the lease, or another version is live
    |-- PreconditionFailed      412  the live policy is not the one asked for
    |-- BodyTooLarge            413
    |-- UnsupportedMediaType    415
    |-- WeightsRejected         422  a checkpoint failed verification; the live policy is untouched
    |-- Overloaded              429  retry after ``retry_after`` seconds
    |-- EngineFailure           500  the engine failed while it worked on this request
    |-- EngineUnavailable       503  the engine cannot generate now; ``retry_after`` may say when
    |-- DeadlineExceeded        504  the request's own deadline passed before it was finished
    |-- InsufficientStorage     507  the server's disk or shared memory is full
    |-- ServerUnreachable       (client only) no answer came, or one that is not Tito's
    `-- ProtocolMismatch        (client only) the server speaks another version of the protocol

The server raises these and turns them into ``{"error": {...}}`` with the status code; the client
reads that document and raises the same class. ``str(error)`` is what a person should read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a request.

    Attributes:
        where: path of the field, e.g. ``prompts[3].ids[17]`` or a tensor's name.
        got: the offending value, shortened for display.
        allowed: what would have been accepted.
    """

    where: str
    got: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.where}: got {self.got}; allowed: {self.allowed}"


class TitoError(Exception):
    """Base of everything that Tito raises on purpose.

    Attributes:
        message: what happened, without the problems; ``str(error)`` has them too.
        problems: every field that is wrong, where it is fields.
        retry_after: seconds after which the same request may succeed; None when nobody knows.
        details: more facts, by kind of error, as plain data.
        code: names the kind on the wire.
        status: HTTP status that a server answers with.
    """

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        problems: Sequence[Problem] = (),
        retry_after: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.problems = tuple(problems)
        self.retry_after = retry_after
        self.details = details or {}

    def __str__(self) -> str:
        return "\n  ".join([self.message, *map(str, self.problems)])

    def to_wire(self) -> dict[str, Any]:
        """The document sent as the body of an error answer."""
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.problems:
            error["problems"] = [asdict(problem) for problem in self.problems]
        if self.retry_after is not None:
            error["retry_after"] = self.retry_after
        if self.details:
            error["details"] = self.details
        return {"error": error}


class InvalidRequest(TitoError):
    """A field is wrong; ``problems`` says which, and what is allowed. Nothing was run."""

    code, status = "invalid_request", 422


class MalformedBody(TitoError):
    """The body is not what its content type says, or an answer is none of a rollout server."""

    code, status = "malformed_body", 400


class Unauthorized(TitoError):
    """There is no bearer token, or nobody was given this one."""

    code, status = "unauthorized", 401


class Forbidden(TitoError):
    """The token is known and lacks the right, or the path is outside of what may be read."""

    code, status = "forbidden", 403


class NotFound(TitoError):
    """There is no such policy, group or route."""

    code, status = "not_found", 404


class Conflict(TitoError):
    """Another trainer holds the lease, or a delta is against other weights than the live ones.

    ``details`` may have ``holder``, ``fence`` and ``seconds_left`` of the lease.
    """

    code, status = "conflict", 409


class PreconditionFailed(TitoError):
    """The live policy is not the version or digest that was asked for."""

    code, status = "precondition_failed", 412


class BodyTooLarge(TitoError):
    """The body is larger than the server takes; ``/info`` has its limits."""

    code, status = "body_too_large", 413


class UnsupportedMediaType(TitoError):
    """The content type or encoding of the body is one that the server does not read."""

    code, status = "unsupported_media_type", 415


class WeightsRejected(TitoError):
    """A checkpoint failed verification. The live policy is what it was."""

    code, status = "weights_rejected", 422


class Overloaded(TitoError):
    """There is no room in the queue; ``retry_after`` says when to come back, in seconds."""

    code, status = "overloaded", 429


class EngineFailure(TitoError):
    """The engine failed on this request, or its weights could not be restored."""

    code, status = "engine_failure", 500


class EngineUnavailable(TitoError):
    """The engine starts, restarts or sleeps; ``retry_after`` may say for how many seconds."""

    code, status = "engine_unavailable", 503


class DeadlineExceeded(TitoError):
    """The request's own deadline passed before it was finished."""

    code, status = "deadline_exceeded", 504


class InsufficientStorage(TitoError):
    """The server's disk or shared memory is full. The live policy is what it was."""

    code, status = "insufficient_storage", 507


class ServerUnreachable(TitoError):
    """Client only: the connection failed, or what answered does not speak this protocol."""

    code = "server_unreachable"


class ProtocolMismatch(TitoError):
    """Client only: what this client was written for is not what the server speaks."""

    code = "protocol_mismatch"


_BY_CODE: dict[str, type[TitoError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, MalformedBody, Unauthorized, Forbidden, NotFound, Conflict,
        PreconditionFailed, BodyTooLarge, UnsupportedMediaType, WeightsRejected, Overloaded,
        EngineFailure, EngineUnavailable, DeadlineExceeded, InsufficientStorage,
    )
}  # fmt: skip


def from_wire(document: Any, *, status: int) -> TitoError:
    """The exception that an error answer stands for.

    Args:
        document: the decoded body; anything at all, since a proxy may have written it.
        status: the HTTP status, named when the document is not Tito's.
    """
    match document:
        case {"error": {"code": str(code), "message": str(message)} as error}:
            details, retry_after = error.get("details"), error.get("retry_after")
            return _BY_CODE.get(code, TitoError)(
                message,
                problems=_problems_from_wire(error.get("problems")),
                retry_after=retry_after if isinstance(retry_after, int | float) else None,
                details=details if isinstance(details, dict) else None,
            )
    return ServerUnreachable(f"HTTP {status}, and the body is no Tito error: {document!r:.200}")


def _problems_from_wire(listed: Any) -> list[Problem]:
    """The problems that can be understood; a newer server may say more about each."""
    return [
        Problem(str(item["where"]), str(item["got"]), str(item["allowed"]))
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, dict) and item.keys() >= {"where", "got", "allowed"}
    ]

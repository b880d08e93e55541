"""Publishing through GPU memory: where tensors lie, what is asked for, what the server answers.

A channel is a flat buffer in the memory of each of the server's workers, and a way into it: ``ipc``
maps the buffer into the trainer's process, ``nccl`` broadcasts to it. The bytes never pass through
HTTP; ``POST /reload`` names the channel, and everything after that is as for an upload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from shared.calls import Call, Target, read_reload
from shared.codec import encode
from shared.errors import MalformedBody
from shared.protocol import DEFAULT_POLICY, MSGPACK, ReloadResult
from shared.weights import TensorSpec

ALIGNMENT_BYTES = 256
"""Each tensor begins at a multiple of this."""
PIECE_BYTES = 256 << 20
"""What one broadcast moves; the last one moves what is left."""

SHARED_NAME = "tito-channel"
"""Of the memory that stands in for a GPU's, as the kernel shows it."""

Kind = Literal["ipc", "nccl"]
_PATH = f"/policies/{DEFAULT_POLICY}/channel"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors lie in the flat buffer: in their order, each aligned.

    Attributes:
        specs: the tensors.
        offsets: where each begins, in bytes.
        nbytes: size of the buffer.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Layout:
        """The layout of these tensors."""
        specs, offsets, end = tuple(specs), [], 0
        for spec in specs:
            offsets.append(end)
            end += -(-spec.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(specs, tuple(offsets), end)

    def pieces(self) -> list[tuple[int, int]]:
        """``[start, end)`` of each broadcast, in bytes."""
        starts = range(0, self.nbytes, PIECE_BYTES)
        return [(start, min(start + PIECE_BYTES, self.nbytes)) for start in starts]


@dataclass(frozen=True, slots=True)
class Memory:
    """A worker's buffer, for a process of the same host.

    Attributes:
        device: UUID of the GPU; empty for shared memory of the host.
        handle: ``cudaIpcMemHandle_t`` as hex, or the path of a file to be mapped.
    """

    device: str
    handle: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How to reach the workers.

    Attributes:
        unique_id: NCCL's, as hex; empty between processes without GPUs.
        size: of the group. The trainer has rank 0.
        addresses: host and port of each worker, without GPUs.
        secret: opens a connection to them.
    """

    size: int
    unique_id: str = ""
    addresses: tuple[tuple[str, int], ...] = ()
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Channel:
    """Answer of ``POST /policies/default/channel``.

    Attributes:
        id: names the channel.
        kind: as asked for.
        nbytes: size of the buffer.
        seconds: how long joining, a transfer and its verification may take each.
        memory: of each worker, for ``ipc``.
        rendezvous: for ``nccl``.
    """

    id: str
    kind: Kind
    nbytes: int
    seconds: float
    memory: tuple[Memory, ...] = ()
    rendezvous: Rendezvous | None = None


def open_channel(kind: str, specs: Iterable[TensorSpec], *, fence: int | None) -> Call[Channel]:
    """``POST /policies/default/channel``."""
    tensors = [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in specs]
    body = encode({"kind": kind, "tensors": tensors}, MSGPACK)
    headers = Target(fence=fence).headers(MSGPACK)
    return Call("POST", _PATH, _read_channel, headers, body=lambda: body, repeatable=False)


def await_channel(id: str, wait_seconds: float) -> Call[str]:
    """``GET /policies/default/channel/{id}``."""
    params = {"wait_seconds": str(wait_seconds)}
    return Call("GET", f"{_PATH}/{id}", _read_state, params=params)


def close_channel(id: str) -> Call[None]:
    """``DELETE /policies/default/channel/{id}``."""
    return Call("DELETE", f"{_PATH}/{id}", lambda _: None, repeatable=False)


def reload_channel(id: str, target: Target, *, durable: bool) -> Call[ReloadResult]:
    """``POST /reload`` with what a channel brings."""
    body = encode({"channel": id, "durable": durable}, MSGPACK)
    headers, params = target.headers(MSGPACK), target.params()
    return Call("POST", "/reload", read_reload, headers, params, lambda: body, repeatable=False)


def _read_channel(document: Any) -> Channel:
    try:
        memory = tuple(Memory(end["device"], end["handle"]) for end in document["memory"])
        meeting = document["rendezvous"]
        return Channel(
            id=document["id"],
            kind=document["kind"],
            nbytes=document["nbytes"],
            seconds=document["seconds"],
            memory=memory,
            rendezvous=None if meeting is None else _read_rendezvous(meeting),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedBody(f"not an answer about a channel: {error!r}") from None


def _read_state(document: Any) -> str:
    try:
        return str(document["state"])
    except (KeyError, TypeError) as error:
        raise MalformedBody(f"not the state of a channel: {error!r}") from None


def _read_rendezvous(document: Any) -> Rendezvous:
    addresses = tuple((str(host), int(port)) for host, port in document["addresses"])
    return Rendezvous(document["size"], document["unique_id"], addresses, document["secret"])

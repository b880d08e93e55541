"""Streamed rollouts as bytes: frames, what they hold, and how they are taken apart again.

A frame is a map whose field ``frame`` says what it is: ``group``, ``keepalive``, ``error`` or
``end``. In msgpack each follows its length, four bytes little-endian; in JSON each is a line.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

from shared.codec import decode, encode, group_to_wire
from shared.errors import BodyTooLarge, MalformedBody, TitoError
from shared.protocol import FRAMES, JSON, MAX_FRAME_BYTES, MSGPACK, Group, StreamEnd, Totals

FrameKind = Literal["group", "keepalive", "error", "end"]

_LENGTH = struct.Struct("<I")


def encode_frame(document: dict[str, Any], media_type: str) -> bytes:
    """One frame, for a stream of ``FRAMES`` or ``NDJSON``.

    Raises:
        BodyTooLarge: it is longer than a frame may be.
    """
    body = encode(document, MSGPACK if media_type == FRAMES else JSON)
    if len(body) > MAX_FRAME_BYTES:
        raise BodyTooLarge(
            f"a frame would have {len(body)} bytes, and may have {MAX_FRAME_BYTES}; "
            "ask for smaller groups, or without stream"
        )
    return _LENGTH.pack(len(body)) + body if media_type == FRAMES else body + b"\n"


def group_frame(group: Group, *, packed: bool) -> dict[str, Any]:
    """A finished group."""
    return _frame("group", group_to_wire(group, packed=packed))


def keepalive_frame() -> dict[str, Any]:
    """Nothing; it keeps proxies from closing the connection."""
    return _frame("keepalive", {})


def error_frame(error: TitoError) -> dict[str, Any]:
    """Why the stream ends early; the same document as the body of an error answer."""
    return _frame("error", {"status": error.status, **error.to_wire()})


def end_frame(end: StreamEnd) -> dict[str, Any]:
    """The last frame of a stream that is complete."""
    document = asdict(end)
    missing = document.pop("missing")
    return _frame("end", document | ({"missing": list(missing)} if missing else {}))


def _frame(kind: FrameKind, document: dict[str, Any]) -> dict[str, Any]:
    return {"frame": kind, **document}


def end_from_wire(document: dict[str, Any]) -> StreamEnd:
    """Typed form of the closing frame.

    Raises:
        MalformedBody: a field is missing or has the wrong form.
    """
    try:
        counted = document["totals"]
        return StreamEnd(
            model=document["model"],
            tokenizer=document["tokenizer"],
            policy=document["policy"],
            sampling=document["sampling"],
            totals=Totals(**{name: counted[name] for name in Totals.__dataclass_fields__}),
            missing=tuple(document.get("missing", ())),
        )
    except (KeyError, TypeError) as error:
        raise MalformedBody(f"not a closing frame: {error!r}") from None


class FrameReader:
    """Takes a stream of msgpack frames apart, however its bytes come in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The frames that are complete now; consume all of them before feeding more.

        Raises:
            MalformedBody: a frame is too long, or no map with the field ``frame``.
        """
        self._buffer += data
        start = 0
        try:
            while (end := self._end_of_frame(start)) is not None:
                body = bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
                start = end
                yield _checked(decode(body, MSGPACK))
        finally:
            del self._buffer[:start]

    def _end_of_frame(self, start: int) -> int | None:
        """Where the frame at ``start`` ends, if all of it is here."""
        if len(self._buffer) < start + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, start)
        if length > MAX_FRAME_BYTES:
            raise MalformedBody(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
        end = start + _LENGTH.size + length
        return end if end <= len(self._buffer) else None


def _checked(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict) or not isinstance(document.get("frame"), str):
        raise MalformedBody(f"not a frame: {document!r:.80}")
    return document

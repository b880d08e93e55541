"""Conformance vectors of ``/rollout``: bytes that a client in any language must read alike.

    .venv/bin/python -m tests.clients.vectors > tests/clients/vectors.json

The file is compared with what the codec makes today; a difference is a change of the protocol.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from shared.codec import encode_rollout, group_to_wire
from shared.errors import EngineFailure
from shared.frames import encode_frame, end_frame, error_frame, group_frame, keepalive_frame
from shared.protocol import (
    FRAMES,
    JSON,
    MSGPACK,
    NDJSON,
    Group,
    Rollout,
    Sample,
    Span,
    StreamEnd,
    Totals,
)

OLD, NEW = "0123456789abcdef" * 2, "f" * 32


def _sample(group_id: int, prompt: Any, ids: list[int], text: str | None, **more: Any) -> Sample:
    fields: dict[str, Any] = {
        "finish_reason": "stop",
        "version": 7,
        "digest": OLD,
        "spans": (Span(7, OLD, 0, len(ids)),),
    }
    return Sample(
        group_id=group_id,
        prompt_ids=prompt,
        completion_ids=np.array(ids, np.int32),
        # Sixteenths are exact in float32, so that every language prints them alike.
        logprobs=np.array([-token % 32 / -16 for token in ids], np.float32),
        text=text,
        **{**fields, **more},
    )


def groups() -> tuple[Group, ...]:
    """A plain group, one with a publish inside, and one whose sample is empty and has no text."""
    first, second, third = (
        np.array(ids, np.int32) for ids in ([1], [5, 6, 127, 128, 255], [2**31 - 1])
    )
    spans = (Span(7, OLD, 0, 2), Span(300, NEW, 2, 300))
    long = [257 * index for index in range(300)]
    return (
        Group(0, first, (_sample(0, first, [0, 1, 65535, 65536], "naïve \U0001f642\n"),), "a" * 16),
        Group(
            1,
            second,
            (
                _sample(1, second, long, "x" * 300, spans=spans, finish_reason="length"),
                _sample(1, second, [9], "", finish_reason="abort"),
            ),
            "b" * 16,
        ),
        Group(2, third, (_sample(2, third, [], None, spans=()),), "c" * 16),
    )


def _rollout() -> Rollout:
    return Rollout(
        model="m",
        tokenizer=NEW,
        policy="default",
        sampling={"temperature": 1.0, "max_tokens": 512, "seed": None, "ignore_eos": False},
        groups=groups(),
    )


def _stream(media_type: str, *, packed: bool) -> bytes:
    made = _rollout()
    totals = Totals(3, 4, 7, 305, {"stop": 2, "length": 1, "abort": 1})
    end = StreamEnd(made.model, made.tokenizer, made.policy, made.sampling, totals, ())
    frames = [keepalive_frame()]
    frames += [group_frame(group, packed=packed) for group in reversed(made.groups)]
    frames += [{"frame": "of a later protocol", "x": 1}, end_frame(end)]
    return b"".join(encode_frame(frame, media_type) for frame in frames)


def answers() -> dict[str, tuple[str, bytes]]:
    """Content type and body of each answer; all of them hold :func:`groups`."""
    made = _rollout()
    return {
        "packed": (MSGPACK, encode_rollout(made, packed=True, content_type=MSGPACK)),
        "plain": (MSGPACK, encode_rollout(made, packed=False, content_type=MSGPACK)),
        "json": (JSON, encode_rollout(made, packed=False, content_type=JSON)),
        "packed stream": (FRAMES, _stream(FRAMES, packed=True)),
        "plain stream": (FRAMES, _stream(FRAMES, packed=False)),
        "json stream": (NDJSON, _stream(NDJSON, packed=False)),
    }


def broken() -> dict[str, tuple[str, bytes]]:
    """Answers that no client may take for a rollout."""
    whole = _stream(FRAMES, packed=True)
    failed = encode_frame(error_frame(EngineFailure("the engine failed")), FRAMES)
    return {
        "cut off in a frame": (FRAMES, whole[:-3]),
        "cut off between frames": (FRAMES, encode_frame(keepalive_frame(), FRAMES)),
        "ended by an error": (FRAMES, failed),
        "an extension type": (MSGPACK, b"\x81\xa6groups\xd6\xff\x00\x00\x00\x00"),
        "cut off": (MSGPACK, answers()["packed"][1][:-1]),
        "something behind": (MSGPACK, answers()["packed"][1] + b"\xc0"),
    }


def readable() -> list[dict[str, Any]]:
    """What :func:`groups` are to a reader."""
    return [group_to_wire(group, packed=False) for group in groups()]


def document() -> dict[str, Any]:
    """All of it, as the file has it: bytes in hex."""

    def as_hex(bodies: dict[str, tuple[str, bytes]]) -> dict[str, dict[str, str]]:
        return {
            name: {"content_type": content_type, "hex": body.hex()}
            for name, (content_type, body) in bodies.items()
        }

    return {"groups": readable(), "answers": as_hex(answers()), "broken": as_hex(broken())}


if __name__ == "__main__":
    print(json.dumps(document()))

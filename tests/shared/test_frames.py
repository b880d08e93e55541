"""Streams taken apart: any chunking, any cut, and senders that do not keep to the protocol."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import httpx
import msgpack
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import frames as module
from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import BodyTooLarge, EngineUnavailable, MalformedBody, ServerUnreachable
from shared.frames import (
    FrameReader,
    encode_frame,
    end_frame,
    end_from_wire,
    error_frame,
    group_frame,
    keepalive_frame,
)
from shared.protocol import (
    FRAMES,
    IDEMPOTENCY_HEADER,
    MAX_FRAME_BYTES,
    NDJSON,
    Group,
    Sample,
    Span,
    StreamEnd,
    Totals,
)


def group_of(group_id: int) -> Group:
    prompt_ids = np.array([1, group_id], np.int32)
    sample = Sample(
        group_id=group_id,
        prompt_ids=prompt_ids,
        completion_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-0.5, -1.0], np.float32),
        finish_reason="stop",
        version=3,
        digest="d",
        spans=(Span(3, "d", 0, 2),),
    )
    return Group(group_id, prompt_ids, (sample,))


def end_of(groups: Iterable[Group], missing: tuple[int, ...] = ()) -> StreamEnd:
    totals = Totals()
    for group in groups:
        totals = totals.with_group(group)
    return StreamEnd("m", "t", "default", {"top_p": 1.0}, totals, missing)


GROUPS = [group_of(index) for index in (2, 0, 1)]
PIECES = [
    *(encode_frame(group_frame(group, packed=True), FRAMES) for group in GROUPS),
    encode_frame(keepalive_frame(), FRAMES),
    encode_frame(end_frame(end_of(GROUPS)), FRAMES),
]
STREAM = b"".join(PIECES)
HEADERS = {"content-type": FRAMES}
PROMPTS = ["a", "b", "c"]


def kinds(documents: Iterable[dict[str, Any]]) -> list[str]:
    return [document["frame"] for document in documents]


@given(st.lists(st.integers(1, 60), max_size=40))
def test_frames_come_out_whole_however_they_come_in(sizes: list[int]) -> None:
    reader, at = FrameReader(), 0
    documents: list[dict[str, Any]] = []
    for size in [*sizes, len(STREAM)]:
        documents += reader.feed(STREAM[at : at + size])
        at += size
    assert kinds(documents) == ["group"] * 3 + ["keepalive", "end"]
    assert end_from_wire(documents[-1]) == end_of(GROUPS)


def test_a_frame_is_its_length_and_a_map() -> None:
    assert encode_frame({"frame": "keepalive"}, FRAMES) == b"\x11\0\0\0\x81\xa5frame\xa9keepalive"
    assert encode_frame({"frame": "keepalive"}, NDJSON) == b'{"frame":"keepalive"}\n'


def test_a_line_has_no_line_break_inside() -> None:
    line = encode_frame({"frame": "group", "text": "a\nb\r\u2028c"}, NDJSON)
    assert line.count(b"\n") == 1
    assert orjson.loads(line)["text"] == "a\nb\r\u2028c"


def test_an_error_frame_is_an_error_answer_and_its_status() -> None:
    error = EngineUnavailable("restarting", retry_after=2.0)
    assert error_frame(error) == {"frame": "error", "status": 503, **error.to_wire()}


def test_the_end_says_what_is_missing_only_if_something_is() -> None:
    assert "missing" not in end_frame(end_of(GROUPS))
    assert end_frame(end_of(GROUPS, (3, 4)))["missing"] == [3, 4]
    assert end_from_wire(end_frame(end_of(GROUPS, (3, 4)))).missing == (3, 4)


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_that_is_too_long_is_refused_before_it_comes(length: int) -> None:
    with pytest.raises(MalformedBody, match=str(length)):
        list(FrameReader().feed(struct.pack("<I", length)))


def test_a_frame_that_would_be_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 10)
    with pytest.raises(BodyTooLarge, match="smaller groups"):
        encode_frame(group_frame(GROUPS[0], packed=True), FRAMES)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waited_for(garbage: bytes) -> None:
    reader = FrameReader()
    try:
        documents = list(reader.feed(garbage))
    except MalformedBody:
        return
    assert all(isinstance(document["frame"], str) for document in documents)


@pytest.mark.parametrize("document", [None, 5, [], {}, {"frame": 3}, {"no": "frame"}])
def test_what_is_no_frame_is_refused(document: Any) -> None:
    body = msgpack.packb(document)
    with pytest.raises(MalformedBody, match="not a frame"):
        list(FrameReader().feed(struct.pack("<I", len(body)) + body))


@pytest.mark.parametrize("field", ["model", "tokenizer", "policy", "sampling", "totals"])
def test_an_end_that_lacks_something(field: str) -> None:
    document = end_frame(end_of(GROUPS))
    del document[field]
    with pytest.raises(MalformedBody, match="closing frame"):
        end_from_wire(document)


# What the client makes of whole streams.


def streaming(*answers: httpx.Response | bytes) -> tuple[RolloutClient, list[httpx.Request]]:
    """A client whose server gives these answers in order; bytes are streams."""
    left, requests = list(answers), []

    def handle(request: httpx.Request) -> httpx.Response:
        request.read()
        requests.append(request)
        answer = left.pop(0)
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, headers=HEADERS, content=answer)

    return RolloutClient("http://tito", transport=httpx.MockTransport(handle)), requests


def test_a_stream_is_asked_for_packed_and_without_a_key() -> None:
    client, (requests) = streaming(STREAM)
    stream = client.rollout_stream(PROMPTS, group_size=1)
    assert [group.group_id for group in stream] == [2, 0, 1]
    (request,) = requests
    assert msgpack.unpackb(request.content) == {
        "prompts": PROMPTS,
        "packed": True,
        "group_size": 1,
        "stream": True,
    }
    assert request.headers["accept"].split(", ")[0] == FRAMES
    assert IDEMPOTENCY_HEADER not in request.headers
    assert stream.end == end_of(GROUPS)
    assert next(stream, None) is None


@pytest.mark.parametrize("cut", range(0, len(STREAM), 7))
def test_a_stream_without_its_end_is_never_complete(cut: int) -> None:
    client, _ = streaming(STREAM[:cut])
    stream = client.rollout_stream(PROMPTS, group_size=1)
    with pytest.raises(ServerUnreachable, match="broke off"):
        list(stream)
    assert stream.end is None


def test_what_is_lacking_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.exchange.DELAYS_S", (0.0,))
    rest = [PIECES[2], encode_frame(end_frame(end_of(GROUPS[2:])), FRAMES)]
    busy = EngineUnavailable("restarting", retry_after=0.0)
    client, requests = streaming(
        b"".join(PIECES[:2]) + PIECES[2][:9],
        httpx.Response(503, json=busy.to_wire()),
        b"",
        b"".join(rest),
    )
    stream = client.rollout_stream(PROMPTS, retries=2, group_size=1)
    assert [group.group_id for group in stream] == [2, 0, 1]
    assert stream.end == end_of(GROUPS)
    bodies = [msgpack.unpackb(request.content) for request in requests]
    assert [body.get("have") for body in bodies] == [None, [0, 2], [0, 2], [0, 2]]
    assert len({request.headers[IDEMPOTENCY_HEADER] for request in requests}) == 1


def test_retries_are_counted_anew_when_something_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.exchange.DELAYS_S", (0.0,))
    end = encode_frame(end_frame(end_of([])), FRAMES)
    client, _ = streaming(PIECES[0], PIECES[1], PIECES[2], end)
    stream = client.rollout_stream(PROMPTS, retries=1, group_size=1)
    assert [group.group_id for group in stream] == [2, 0, 1]
    client, _ = streaming(PIECES[0], b"", b"")
    stream = client.rollout_stream(PROMPTS, retries=1, group_size=1)
    assert next(stream).group_id == 2
    with pytest.raises(ServerUnreachable):
        next(stream)


def test_an_end_that_is_cut_off_later_is_an_end() -> None:
    class Cut(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            yield STREAM
            raise httpx.ReadError("reset")

    client, requests = streaming(httpx.Response(200, headers=HEADERS, stream=Cut()))
    assert len(list(client.rollout_stream(PROMPTS, retries=1))) == 3
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([PIECES[0], PIECES[0]], "came twice"),
        ([*PIECES, PIECES[0]], "came twice, or after the end"),
        ([PIECES[0], encode_frame(end_frame(end_of(GROUPS)), FRAMES)], "and ends with"),
        ([PIECES[0], encode_frame(end_frame(end_of(GROUPS[:1])), FRAMES)], r"groups \[0, 1\]"),
        ([encode_frame({"frame": "group", "group_id": 0}, FRAMES)], "not a group"),
        ([encode_frame({"frame": "end"}, FRAMES)], "not a closing frame"),
        ([b"\xff\xff\xff\xff"], "at most"),
    ],
)
def test_a_stream_that_contradicts_itself(pieces: list[bytes], match: str) -> None:
    client, requests = streaming(b"".join(pieces))
    with pytest.raises(MalformedBody, match=match):
        list(client.rollout_stream(PROMPTS, retries=3))
    assert len(requests) == 1


def test_frames_of_an_unknown_kind_are_passed_over() -> None:
    client, _ = streaming(encode_frame({"frame": "news", "x": 1}, FRAMES) + STREAM)
    assert len(list(client.rollout_stream(PROMPTS))) == 3


def test_a_document_where_a_stream_was_asked_for() -> None:
    client, _ = streaming(httpx.Response(200, json={"groups": []}))
    with pytest.raises(MalformedBody, match="a stream was asked for"):
        list(client.rollout_stream(PROMPTS))


def test_missing_groups_are_accounted_for() -> None:
    pieces = PIECES[0] + encode_frame(end_frame(end_of(GROUPS[:1], (0, 1))), FRAMES)
    client, _ = streaming(pieces)
    stream = client.rollout_stream(PROMPTS, deadline_seconds=1, partial=True)
    assert [group.group_id for group in stream] == [2]
    assert stream.end is not None
    assert stream.end.missing == (0, 1)


def test_both_clients_have_the_same_arguments() -> None:
    for name in ("rollout", "rollout_stream"):
        blocking, asynchronous = getattr(RolloutClient, name), getattr(AsyncRolloutClient, name)
        assert blocking.__kwdefaults__ == asynchronous.__kwdefaults__

"""Bytes <-> documents: round trips, the exact bytes on the wire, and hostile input."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import struct
from typing import Any

import msgpack
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import (
    decode,
    encode,
    encode_rollout,
    media_type,
    pack_ids,
    pack_logprobs,
    rollout_from_wire,
    rollout_to_wire,
    unpack_ids,
    unpack_logprobs,
)
from shared.errors import MalformedBody, UnsupportedMediaType
from shared.protocol import JSON, MSGPACK, Group, Rollout, Sample, Span

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS | TEXTS,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(TEXTS, children, max_size=4),
    max_leaves=20,
)


@st.composite
def spans_of(draw: st.DrawFn, length: int) -> tuple[Span, ...]:
    """Spans that tile ``[0, length)``."""
    inner = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
    cuts = [0, *sorted(inner), length]
    pairs = list(itertools.pairwise(cuts))
    first = draw(st.integers(0, 1000))
    return tuple(
        Span(first + index, draw(DIGESTS), start, end) for index, (start, end) in enumerate(pairs)
    )


@st.composite
def groups(draw: st.DrawFn, group_id: int) -> Group:
    prompt_ids = np.array(draw(IDS), "<i4")
    samples = []
    for _ in range(draw(st.integers(0, 3))):
        ids = draw(IDS)
        spans = draw(spans_of(len(ids)))
        logprobs = draw(st.lists(FLOATS, min_size=len(ids), max_size=len(ids)))
        sample = Sample(
            group_id=group_id,
            prompt_ids=prompt_ids,
            completion_ids=np.array(ids, "<i4"),
            logprobs=np.array(logprobs, "<f4"),
            finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
            version=spans[0].version,
            digest=spans[0].digest,
            spans=spans,
            text=draw(st.none() | TEXTS),
        )
        samples.append(sample)
    return Group(group_id, prompt_ids, tuple(samples))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    count = draw(st.integers(0, 3))
    return Rollout(
        model=draw(TEXTS),
        tokenizer=draw(DIGESTS),
        policy=draw(TEXTS),
        sampling={"temperature": draw(FLOATS), "stop": draw(st.lists(TEXTS, max_size=2))},
        groups=tuple(draw(groups(index)) for index in range(count)),
        missing=tuple(draw(st.lists(st.integers(count, 9), max_size=3))),
    )


def plain(value: Any) -> Any:
    """Dataclasses and arrays as data that can be compared."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


@given(rollouts())
def test_a_rollout_survives_every_encoding(rollout: Rollout) -> None:
    for packed, content_type in [(False, MSGPACK), (True, MSGPACK), (False, JSON)]:
        body = encode_rollout(rollout, packed=packed, content_type=content_type)
        whole = encode(rollout_to_wire(rollout, packed=packed), content_type)
        assert decode(body, content_type) == decode(whole, content_type)
        back = rollout_from_wire(decode(body, content_type))
        assert plain(back) == plain(rollout)


@given(DOCUMENTS)
def test_a_document_survives_both_encodings(document: Any) -> None:
    for content_type in (MSGPACK, JSON):
        assert decode(encode(document, content_type), content_type) == document


@given(IDS)
def test_ids_are_little_endian_int32(ids: list[int]) -> None:
    assert pack_ids(ids, True) == struct.pack(f"<{len(ids)}i", *ids)
    assert pack_ids(np.array(ids, np.int64), False) == ids
    for packed in (True, False):
        assert unpack_ids(pack_ids(ids, packed)).tolist() == ids


@given(st.lists(FLOATS, max_size=20))
def test_logprobs_are_little_endian_float32(values: list[float]) -> None:
    assert pack_logprobs(values, True) == struct.pack(f"<{len(values)}f", *values)
    for packed in (True, False):
        assert unpack_logprobs(pack_logprobs(values, packed)).tolist() == values


@given(st.binary(max_size=60))
def test_garbage_is_never_anything_but_malformed(body: bytes) -> None:
    for content_type in (MSGPACK, JSON):
        with contextlib.suppress(MalformedBody):
            decode(body, content_type)


@given(DOCUMENTS)
def test_no_document_but_a_rollout_is_one(document: Any) -> None:
    with pytest.raises(MalformedBody):
        rollout_from_wire(document)


def test_the_bytes_of_a_packed_answer() -> None:
    # What a client in another language must be able to read, spelt out.
    span = Span(7, "ab" * 16, 0, 2)
    prompt, completion = np.array([5], "<i4"), np.array([258, 3], "<i4")
    logprobs = np.array([-0.5, -2.0], "<f4")
    sample = Sample(0, prompt, completion, logprobs, "stop", 7, span.digest, (span,), "hi")
    rollout = Rollout("m", "t", "default", {}, (Group(0, prompt, (sample,), "r-0"),))
    expected = (
        b"\x85\xa5model\xa1m\xa9tokenizer\xa1t\xa6policy\xa7default\xa8sampling\x80\xa6groups\x91"
        b"\x84\xa8group_id\x00\xa2id\xa3r-0\xaaprompt_ids\xc4\x04\x05\x00\x00\x00\xa7samples\x91"
        b"\x86\xaecompletion_ids\xc4\x08\x02\x01\x00\x00\x03\x00\x00\x00"
        b"\xa8logprobs\xc4\x08\x00\x00\x00\xbf\x00\x00\x00\xc0"
        b"\xadfinish_reason\xa4stop\xa7version\x07\xa6digest\xd9\x20"
        + b"ab" * 16
        + b"\xa4text\xa2hi"
    )
    assert encode(rollout_to_wire(rollout, packed=True), MSGPACK) == expected
    assert encode_rollout(rollout, packed=True, content_type=MSGPACK) == expected


def test_packed_arrays_are_views_of_what_was_received() -> None:
    body = b"\x01\x00\x00\x00\x02\x00\x00\x00"
    for array in (unpack_ids(body), unpack_logprobs(body)):
        base: Any = array.base
        assert base is body
        assert not array.flags.writeable


def test_one_span_is_implied_and_several_are_written() -> None:
    document: dict[str, Any] = {"model": "m", "tokenizer": "t", "policy": "p", "sampling": {}}
    sample = {
        "completion_ids": [1, 2, 3],
        "logprobs": [-1.0, -1.0, -1.0],
        "finish_reason": "length",
        "version": 4,
        "digest": "d",
    }
    document["groups"] = [{"group_id": 0, "prompt_ids": [9], "samples": [sample]}]
    (found,) = rollout_from_wire(document).samples
    assert found.spans == (Span(4, "d", 0, 3),)
    assert found.text is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_writes_null_for_what_it_cannot_say(value: float) -> None:
    assert orjson.loads(encode({"x": value}, JSON)) == {"x": None}
    back = decode(encode({"x": value}, MSGPACK), MSGPACK)["x"]
    assert math.isnan(back) or back == value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x00\x00",
        b"\xd4\x05\x00",
        b"\xc7\x01\x07x",
        b"\xd6\xff\x00\x00\x00\x01",
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x01",
        b"\xd7\xff" + b"\x00" * 8,
        b"\x81\x01\x02",
        b"\x81\xc4\x01a\x02",
        b"\x81\xc0\x02",
        b"\xa2\xff\xfe",
        b"\xa3\xed\xa0\x80",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 5000,
    ],
)
def test_hostile_msgpack(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        decode(body, MSGPACK)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"NaN", b'"\\ud800"', b'"\xed\xa0\x80"', b"[" * 100_000, b"1 2", b"\xff\xfe1\x00"],
)
def test_hostile_json(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        decode(body, JSON)


@pytest.mark.parametrize("content_type", ["", "text/html", "application/x-safetensors"])
def test_other_types_are_refused_by_name(content_type: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="application/msgpack"):
        decode(b"{}", content_type)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("application/json", "application/json"),
        (" Application/JSON ; charset=utf-8", "application/json"),
        ("", ""),
        (";", ""),
        ("application/msgpack;", "application/msgpack"),
    ],
)
def test_media_types(header: str, expected: str) -> None:
    assert media_type(header) == expected


GOOD_SAMPLE = {
    "completion_ids": [1],
    "logprobs": [-1.0],
    "finish_reason": "stop",
    "version": 0,
    "digest": "d",
}


@pytest.mark.parametrize(
    "change",
    [
        {"completion_ids": "words"},
        {"completion_ids": None},
        {"completion_ids": b"\x01\x02\x03"},
        {"completion_ids": [2**40]},
        {"completion_ids": [1.5]},
        {"completion_ids": [[1], [2]]},
        {"completion_ids": 5},
        {"logprobs": b"\x01"},
        {"logprobs": ["low"]},
        {"logprobs": [-1.0, -1.0]},
        {"logprobs": None},
        {"spans": [{"version": 1}]},
        {"spans": 5},
        {"spans": [5]},
    ],
)
def test_an_answer_that_is_no_rollout_is_malformed(change: dict[str, Any]) -> None:
    group = {"group_id": 0, "prompt_ids": [9], "samples": [GOOD_SAMPLE | change]}
    document = {"model": "m", "tokenizer": "t", "policy": "p", "sampling": {}, "groups": [group]}
    with pytest.raises(MalformedBody):
        rollout_from_wire(document)


def test_unknown_fields_of_an_answer_are_no_harm() -> None:
    # A newer server may say more; an older client must go on.
    sample = GOOD_SAMPLE | {"mood": "fine"}
    group = {"group_id": 0, "prompt_ids": [9], "samples": [sample], "mood": 1}
    names = {"model": "m", "tokenizer": "t", "policy": "p", "sampling": {}, "mood": 2}
    assert len(rollout_from_wire(names | {"groups": [group]}).samples) == 1


def test_msgpack_of_another_library_is_read() -> None:
    body = msgpack.packb({"a": [1, 2.5, None, True, "x", b"y"]}, use_single_float=True)
    assert decode(body, MSGPACK) == {"a": [1, 2.5, None, True, "x", b"y"]}

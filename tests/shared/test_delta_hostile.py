"""A hostile delta changes nothing and costs nothing, and the answer says what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.delta import MAGIC, MAX_JSON_BYTES, Frame, apply_frame, checksum, encode_json
from shared.delta_reader import OPENING_BYTES, Delta, parse_base, parse_delta
from shared.errors import MalformedBody, TitoError, WeightsRejected
from tests.shared.delta_support import NEW, OLD, SPEC, encoded, frames_of

KNOWN = {spec.name: spec for spec in OLD}
(GOOD,) = frames_of(encoded(OLD, NEW), OLD)
DIGEST = "0123456789abcdef" * 2


def sealed(*pieces: bytes, surplus: bytes = b"", end: dict[str, Any] | None = None) -> bytes:
    """A delta with a right checksum, whatever it holds."""
    opening = MAGIC + encode_json({"base": DIGEST})
    body = opening + b"".join(pieces) + encode_json(end or {"digest": DIGEST}) + surplus
    return body + checksum(body)


def parse(delta: bytes) -> Delta:
    return parse_delta(memoryview(delta), KNOWN)


def with_header(**fields: Any) -> bytes:
    """The good frame under another header."""
    header = {
        "name": SPEC.name, "dtype": SPEC.dtype, "shape": list(SPEC.shape), "block": 0,
        "changes": GOOD.changes, "gaps": len(GOOD.gaps), "values": len(GOOD.values),
    }  # fmt: skip
    header |= fields
    present = {name: value for name, value in header.items() if value is not None}
    return encode_json(present) + bytes(GOOD.gaps) + bytes(GOOD.values)


def test_the_frame_under_attack_is_good() -> None:
    assert parse(sealed(with_header())).frames == (GOOD,)


def test_every_cut_and_every_flipped_bit_is_noticed() -> None:
    delta = sealed(GOOD.to_bytes())
    for length in range(len(delta)):
        with pytest.raises(MalformedBody):
            parse(delta[:length])
    for at in range(len(delta)):
        for bit in (1, 128):
            changed = bytearray(delta)
            changed[at] ^= bit
            with pytest.raises(MalformedBody):
                parse(bytes(changed))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_noise_behind_a_right_checksum_is_malformed(noise: bytes) -> None:
    with pytest.raises(TitoError):
        parse(sealed(noise + b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": -1}, "64 elements"),
        ({"block": 1}, "64 elements"),
        ({"block": 1 << 60}, "64 elements"),
        ({"changes": 0}, "0 changes; allowed: 1 to 64"),
        ({"changes": 65}, "65 changes; allowed: 1 to 64"),
        ({"changes": 1 << 62}, "allowed: 1 to 64"),
        ({"values": 1 << 62}, "cut short"),
        ({"values": -1}, "cut short"),
        ({"gaps": -1}, "cut short"),
        ({"gaps": 0}, "allowed: 64 to 64"),
        ({"gaps": None}, "header is"),
        ({"name": 7}, "header is"),
        ({"shape": "64"}, "header is"),
        ({"changes": 1.0}, "header is"),
    ],
)
def test_sizes_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedBody, match=message):
        parse(sealed(with_header(**fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "unknown"},
        {"name": "x" * 60000},
        {"dtype": "F16"},
        {"dtype": "F32"},
        {"shape": [8, 8]},
        {"shape": [65]},
        {"shape": ["64"]},
        {"shape": [0] * 9000},
    ],
)
def test_tensors_that_the_model_does_not_have(fields: dict[str, Any]) -> None:
    with pytest.raises(WeightsRejected, match="does not fit") as caught:
        parse(sealed(with_header(**fields)))
    assert len(str(caught.value)) < 1000


def test_an_empty_tensor_has_no_block_to_change() -> None:
    fields = {"name": "none", "dtype": "F32", "shape": [0, 3]}
    with pytest.raises(MalformedBody, match="0 elements"):
        parse(sealed(with_header(**fields)))


def test_the_same_block_twice() -> None:
    with pytest.raises(MalformedBody, match="comes twice"):
        parse(sealed(GOOD.to_bytes(), GOOD.to_bytes()))


def test_bytes_after_the_end() -> None:
    with pytest.raises(MalformedBody, match="7 bytes follow"):
        parse(sealed(GOOD.to_bytes(), surplus=b"surplus"))


def test_no_end() -> None:
    body = MAGIC + encode_json({"base": DIGEST}) + GOOD.to_bytes()
    with pytest.raises(MalformedBody, match="cut short"):
        parse(body + checksum(body))


@pytest.mark.parametrize("digest", [None, 7, "", DIGEST[:-1], DIGEST.upper(), DIGEST + "\n"])
def test_a_digest_that_is_none(digest: Any) -> None:
    with pytest.raises(MalformedBody, match="not a digest"):
        parse(sealed(end={"digest": digest}))
    with pytest.raises(MalformedBody, match="not a digest"):
        parse_base(memoryview(MAGIC + encode_json({"base": digest})))


@pytest.mark.parametrize(
    ("json_bytes", "message"),
    [(b"{", "at byte"), (b"[]", "no JSON object"), (b"\xff\xff", "at byte"), (b"", "at byte")],
)
def test_a_header_that_is_no_json_object(json_bytes: bytes, message: str) -> None:
    with pytest.raises(MalformedBody, match=message):
        parse(sealed(len(json_bytes).to_bytes(4, "little") + json_bytes))


def test_a_header_that_is_too_long() -> None:
    with pytest.raises(MalformedBody, match=f"allowed: {MAX_JSON_BYTES}"):
        parse(sealed(b"\xff\xff\xff\xff"))
    with pytest.raises(ValueError, match=f"allowed: {MAX_JSON_BYTES}"):
        encode_json({"name": "x" * MAX_JSON_BYTES})


@pytest.mark.parametrize("body", [b"", b"TITODLT", b"TITODLT2" + bytes(99), b"\0" * 99])
def test_what_is_no_delta(body: bytes) -> None:
    with pytest.raises(MalformedBody, match="not a delta"):
        parse_base(memoryview(body))


def test_the_base_is_known_from_the_first_bytes() -> None:
    delta = sealed(GOOD.to_bytes())
    assert parse_base(memoryview(delta[:OPENING_BYTES])) == DIGEST
    assert parse_base(memoryview(delta[: len(MAGIC) + 4 + 43])) == DIGEST
    with pytest.raises(MalformedBody, match="cut short"):
        parse_base(memoryview(delta[: len(MAGIC) + 4 + 42]))


# Payloads


def squeezed(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def planes(values: list[int], width: int) -> bytes:
    rows = np.array([list(v.to_bytes(width, "little")) for v in values], dtype=np.uint8)
    return rows.T.tobytes()


def announcing(size: int) -> bytes:
    """A zstd frame that claims to hold ``size`` bytes, and holds none."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\0",
        b"no zstd frame",
        announcing(1 << 50),
        announcing(2),
        squeezed(bytes(1)),
        squeezed(bytes(3)),
        squeezed(bytes(1 << 28)),
        squeezed(bytes(2), write_content_size=False),
        squeezed(bytes(2)) + b"\0",
        squeezed(bytes(2)) * 2,
        squeezed(bytes(2))[:-1],
    ],
)
def test_payloads_that_are_not_what_was_announced(bad: bytes) -> None:
    # One change of a BF16 tensor has two bytes of values and four of gaps.
    data = bytearray(OLD[SPEC])
    with pytest.raises(MalformedBody, match="block 0 of w"):
        apply_frame(data, replace(GOOD, values=bad))
    with pytest.raises(MalformedBody, match="block 0 of w"):
        apply_frame(data, replace(GOOD, gaps=bad or b"\0"))
    assert data == OLD[SPEC]


@pytest.mark.parametrize(
    "gaps", [[64], [63, 0], [0xFFFFFFFF], [0xFFFFFFFF, 1], [0xFFFFFFFF] * 40, [10, 10, 42]]
)
def test_elements_beyond_the_block(gaps: list[int]) -> None:
    data = bytearray(OLD[SPEC])
    values = squeezed(planes([2] * len(gaps), 2))
    frame = Frame(SPEC, 0, len(gaps), squeezed(planes(gaps, 4)), values)
    with pytest.raises(MalformedBody, match="of 64 is to be changed"):
        apply_frame(data, frame)
    assert data == OLD[SPEC]


def test_the_last_element_can_be_reached() -> None:
    data = bytearray(OLD[SPEC])
    frame = Frame(SPEC, 0, 2, squeezed(planes([62, 0], 4)), squeezed(planes([2, 1], 2)))
    assert apply_frame(data, frame).tolist() == [1, 0xFFFF]
    assert data == bytes(124) + b"\x01\x00\xff\xff"

"""Bytes <-> documents: msgpack with plain or packed arrays, and JSON.

Decoding treats its input as hostile: no extension types, string keys only, bounded sizes and
nesting, and one exception, :class:`~shared.errors.MalformedBody`, whatever was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgpack
import orjson

from shared.errors import MalformedBody, UnsupportedMediaType
from shared.protocol import (
    JSON,
    MSGPACK,
    FinishReason,
    Group,
    Rollout,
    Sample,
    Score,
    Span,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shared.arrays import IdArray, LogprobArray

_SCALARS = frozenset({int, float, str, bytes, bool, type(None)})
_IDS = "<i4"
_LOGPROBS = "<f4"


def media_type(header: str) -> str:
    """The bare media type of a Content-Type or Accept header, lower-cased."""
    return header.partition(";")[0].strip().lower()


def encode(document: Any, content_type: str) -> bytes:
    """Serialise plain data. JSON has no word for NaN and infinity: they become ``null``."""
    if content_type == MSGPACK:
        return bytes(msgpack.packb(document))
    return orjson.dumps(document)


def decode(body: bytes, content_type: str) -> Any:
    """Parse a body that claims to be ``content_type``.

    Raises:
        MalformedBody: the bytes are not one complete document of that type.
        UnsupportedMediaType: neither msgpack nor JSON.
    """
    try:
        if content_type == MSGPACK:
            document = _unpack(body)
            _check_plain(document)
            return document
        if content_type == JSON:
            return orjson.loads(body)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__  # msgpack's have no message
        raise MalformedBody(f"the body is not valid {content_type}: {reason}") from None
    raise UnsupportedMediaType(
        f"Content-Type {content_type or '(none)'!r} is not understood; send {MSGPACK} or {JSON}"
    )


def _unpack(body: bytes) -> Any:
    """One document, with the lists of a map taken item by item.

    A thread that unpacked millions of ids in one call would keep every other thread waiting.
    """
    unpacker = msgpack.Unpacker(
        ext_hook=_refuse_extension, strict_map_key=True, max_buffer_size=max(len(body), 1)
    )
    unpacker.feed(body)
    if _is_map(body[:1]):
        fields = range(unpacker.read_map_header())
        document: Any = {_key(unpacker.unpack()): _unpack_field(unpacker, body) for _ in fields}
    else:
        document = unpacker.unpack()
    if unpacker.tell() != len(body):
        raise ValueError(f"{len(body) - unpacker.tell()} bytes follow the document")
    return document


def _unpack_field(unpacker: msgpack.Unpacker, body: bytes) -> Any:
    if _is_list(body[unpacker.tell() : unpacker.tell() + 1]):
        return [unpacker.unpack() for _ in range(unpacker.read_array_header())]
    return unpacker.unpack()


def _is_map(first: bytes) -> bool:
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")


def _is_list(first: bytes) -> bool:
    return b"\x90" <= first <= b"\x9f" or first in (b"\xdc", b"\xdd")


def _key(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"map key {value!r:.80} is not a string")
    return value


def _check_plain(value: Any) -> None:
    """Refuse what msgpack can say and JSON cannot, but for bytes, which are packed arrays.

    Timestamps do not reach the hook for extensions, and keys may be bytes.
    """
    if isinstance(value, list):
        # Most lists are token ids or logprobs, of which there may be millions.
        if not all(type(item) in _SCALARS for item in value):
            for item in value:
                _check_plain(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"map key {key!r:.80} is not a string")
            _check_plain(item)
    elif isinstance(value, msgpack.Timestamp):
        raise ValueError("timestamps are not allowed")


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def pack_ids(ids: Sequence[int] | IdArray, packed: bool) -> bytes | list[int]:
    """Token ids as little-endian int32 bytes, or as a list."""
    import numpy as np

    array = np.asarray(ids, dtype=_IDS)
    return array.tobytes() if packed else array.tolist()


def pack_logprobs(logprobs: Sequence[float] | LogprobArray, packed: bool) -> bytes | list[float]:
    """Log-probabilities as little-endian float32 bytes, or as a list."""
    import numpy as np

    array = np.asarray(logprobs, dtype=_LOGPROBS)
    return array.tobytes() if packed else array.tolist()


def unpack_ids(value: bytes | list[int]) -> IdArray:
    """int32 array; a read-only view of the received bytes when they were packed."""
    return _array(value, _IDS, "iu").astype(_IDS, copy=False)


def unpack_logprobs(value: bytes | list[float]) -> LogprobArray:
    """float32 array; a read-only view of the received bytes when they were packed."""
    return _array(value, _LOGPROBS, "iuf").astype(_LOGPROBS, copy=False)


def _array(value: Any, packed: str, kinds: str) -> NDArray[Any]:
    """One dimension of numbers of certain kinds; numpy alone would round and nest what it gets."""
    import numpy as np

    if isinstance(value, bytes):
        return np.frombuffer(value, packed)
    array = np.array(value) if value else np.empty(0, packed)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"an array of {np.dtype(packed).name} is expected, not {value!r:.80}")
    if packed == _IDS and array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise ValueError("a token id does not fit into 32 bits")
    return array


def rollout_from_wire(document: dict[str, Any]) -> Rollout:
    """Typed form of a ``/rollout`` answer, plain or packed.

    Raises:
        MalformedBody: a field is missing or has the wrong form.
    """
    try:
        groups = tuple(group_from_wire(group) for group in document["groups"])
        return Rollout(
            model=document["model"],
            tokenizer=document["tokenizer"],
            policy=document["policy"],
            sampling=document["sampling"],
            groups=groups,
            missing=tuple(document.get("missing", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedBody(f"not a rollout answer: {error!r}") from error


def group_from_wire(document: dict[str, Any]) -> Group:
    """Typed form of one group."""
    group_id, prompt_ids = document["group_id"], unpack_ids(document["prompt_ids"])
    samples = tuple(_sample_from_wire(s, group_id, prompt_ids) for s in document["samples"])
    return Group(group_id, prompt_ids, samples, document.get("id", ""))


def _sample_from_wire(document: dict[str, Any], group_id: int, prompt_ids: IdArray) -> Sample:
    completion_ids = unpack_ids(document["completion_ids"])
    logprobs = unpack_logprobs(document["logprobs"])
    if len(logprobs) != len(completion_ids):
        raise ValueError(f"{len(completion_ids)} ids have {len(logprobs)} logprobs")
    finish_reason: FinishReason = document["finish_reason"]
    version, digest = document["version"], document["digest"]
    whole = [{"version": version, "digest": digest, "start": 0, "end": len(completion_ids)}]
    return Sample(
        group_id=group_id,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        version=version,
        digest=digest,
        spans=tuple(Span(**span) for span in document.get("spans", whole)),
        text=document.get("text"),
    )


def scores_to_wire(scores: Sequence[Score], *, packed: bool) -> list[dict[str, Any]]:
    """Plain data of ``POST /score``'s answer."""
    return [
        {
            "logprobs": pack_logprobs(score.logprobs, packed),
            "version": score.version,
            "digest": score.digest,
        }
        for score in scores
    ]


def scores_from_wire(document: dict[str, Any]) -> list[Score]:
    """Typed form of the answer.

    Raises:
        MalformedBody: a field is missing or has the wrong form.
    """
    try:
        return [
            Score(unpack_logprobs(item["logprobs"]), item["version"], item["digest"])
            for item in document["scores"]
        ]
    except (KeyError, TypeError) as error:
        raise MalformedBody(f"not an answer of /score: {error!r}") from None


def group_to_wire(group: Group, *, packed: bool) -> dict[str, Any]:
    """Plain data for one group; the inverse of :func:`group_from_wire`."""
    return {
        "group_id": group.group_id,
        "id": group.id,
        "prompt_ids": pack_ids(group.prompt_ids, packed),
        "samples": [_sample_to_wire(sample, packed) for sample in group.samples],
    }


def _sample_to_wire(sample: Sample, packed: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "completion_ids": pack_ids(sample.completion_ids, packed),
        "logprobs": pack_logprobs(sample.logprobs, packed),
        "finish_reason": sample.finish_reason,
        "version": sample.version,
        "digest": sample.digest,
    }
    # One span says nothing that version and digest do not, so it stays off the wire.
    if len(sample.spans) > 1:
        document["spans"] = [
            {"version": s.version, "digest": s.digest, "start": s.start, "end": s.end}
            for s in sample.spans
        ]
    if sample.text is not None:
        document["text"] = sample.text
    return document


def rollout_to_wire(rollout: Rollout, *, packed: bool) -> dict[str, Any]:
    """Plain data for a ``/rollout`` answer; the inverse of :func:`rollout_from_wire`."""
    document = {
        "model": rollout.model,
        "tokenizer": rollout.tokenizer,
        "policy": rollout.policy,
        "sampling": rollout.sampling,
        "groups": [group_to_wire(group, packed=packed) for group in rollout.groups],
    }
    # Said only by an answer that its deadline cut short.
    return document | ({"missing": list(rollout.missing)} if rollout.missing else {})


def encode_rollout(rollout: Rollout, *, packed: bool, content_type: str) -> bytes:
    """The bytes of a ``/rollout`` answer, which is the document of :func:`rollout_to_wire`.

    Made group by group, since a thread that encodes a large answer in one call keeps every other
    thread of the process waiting.
    """
    document = rollout_to_wire(replace(rollout, groups=()), packed=packed)
    groups = [encode(group_to_wire(group, packed=packed), content_type) for group in rollout.groups]
    if content_type != MSGPACK:
        return orjson.dumps(document | {"groups": [orjson.Fragment(group) for group in groups]})
    packer = msgpack.Packer()
    del document["groups"]
    pieces = [packer.pack_map_header(len(document) + 1)]
    pieces += [packer.pack(part) for field in document.items() for part in field]
    pieces += [packer.pack("groups"), packer.pack_array_header(len(groups)), *groups]
    return b"".join(pieces)

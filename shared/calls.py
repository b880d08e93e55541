"""The server's routes as plain values: what is sent, how the answer is read, what may be repeated.

Both clients send these; a client for another transport could too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

import orjson

from shared.codec import encode, rollout_from_wire, scores_from_wire
from shared.errors import Conflict, InvalidRequest, MalformedBody, Problem, ProtocolMismatch
from shared.protocol import (
    ADAPTER_CONFIG_KEY,
    DEFAULT_POLICY,
    DELTA,
    DIGEST_HEADER,
    DIGEST_TRAILER,
    FENCE_HEADER,
    FRAMES,
    IDEMPOTENCY_HEADER,
    MSGPACK,
    OCTETS,
    PROTOCOL_VERSION,
    SAFETENSORS,
    PauseMode,
    ReloadResult,
    Rollout,
    Score,
    ServerInfo,
)
from shared.weights import LazyTensor, encode_header, stream_checkpoint, stream_length

if TYPE_CHECKING:
    from shared.arrays import IdArray
    from shared.delta_sender import DeltaBase

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
Pieces = Iterator[bytes | memoryview]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request.

    Attributes:
        method, path, headers, params: of HTTP; the path is below the server's URL.
        read: turns the decoded answer into what the caller gets.
        body: makes the body anew for each attempt: bytes, or pieces to be streamed.
        repeatable: whether it does no harm to run it twice.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    headers: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    body: Callable[[], bytes | Pieces] | None = None
    repeatable: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """Where weights are published, and how.

    Attributes:
        policy: which policy; names other than ``default`` are LoRA policies.
        fence: number of the lease under which it is published.
        mode: what becomes of samples in flight.
        drain_seconds: how long ``drain`` may take.
    """

    policy: str = DEFAULT_POLICY
    fence: int | None = None
    mode: PauseMode | str = PauseMode.KEEP
    drain_seconds: float = 60.0

    def params(self) -> dict[str, str]:
        """The query string."""
        mode = PauseMode(self.mode).value
        return {"policy": self.policy, "mode": mode, "drain_seconds": str(self.drain_seconds)}

    def headers(self, content_type: str) -> dict[str, str]:
        """Content type and fencing number."""
        fence = {} if self.fence is None else {FENCE_HEADER: str(self.fence)}
        return {"content-type": content_type, **fence}


def rollout_document(prompts: Sequence[PromptLike], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A request for packed arrays, as plain data."""
    document: dict[str, Any] = _plain({"prompts": prompts, "packed": True, **settings})
    return document


def rollout(
    prompts: Sequence[PromptLike], settings: Mapping[str, Any], key: str | None = None
) -> Call[Rollout]:
    """``POST /rollout``.

    Args:
        prompts, settings: fields of :class:`shared.requests.RolloutRequest`.
        key: under which it may be asked for again, even if it was begun.

    Raises:
        InvalidRequest: the settings ask for a stream.
    """
    if settings.get("stream"):
        problem = Problem("stream", "true", "rollout_stream of the client")
        raise InvalidRequest("a stream is asked for in another way", problems=[problem])
    body = encode(rollout_document(prompts, settings), MSGPACK)
    return Call("POST", "/rollout", rollout_from_wire, _headers(key), body=lambda: body)


def score(
    prompts: Sequence[Sequence[int] | IdArray],
    completions: Sequence[Sequence[int] | IdArray],
    policy: str,
) -> Call[list[Score]]:
    """``POST /score``."""
    pairs = zip(prompts, completions, strict=True)
    sequences = [
        {"token_ids": [*map(int, prompt), *map(int, completion)], "completion_from": len(prompt)}
        for prompt, completion in pairs
    ]
    body = encode({"sequences": sequences, "packed": True, "policy": policy}, MSGPACK)
    return Call("POST", "/score", scores_from_wire, _headers(None), body=lambda: body)


class StreamRequest(TypedDict):
    """One request for a stream, as httpx takes it."""

    method: str
    url: str
    headers: dict[str, str]
    content: bytes


def rollout_stream(
    request: Mapping[str, Any], have: Iterable[int], key: str | None
) -> StreamRequest:
    """``POST /rollout`` for the groups of a request that one does not have yet, in a stream."""
    had = sorted(have)
    body = encode({**request, "stream": True, **({"have": had} if had else {})}, MSGPACK)
    headers = _headers(key) | {"accept": f"{FRAMES}, {MSGPACK}"}
    return StreamRequest(method="POST", url="/rollout", headers=headers, content=body)


def cancel_rollout(key: str) -> Call[bool]:
    """``DELETE /rollout``: stop and forget a rollout that has a key."""
    headers = {IDEMPOTENCY_HEADER: key}
    return Call("DELETE", "/rollout", lambda answer: bool(answer["cancelled"]), headers)


def _headers(key: str | None) -> dict[str, str]:
    return {"content-type": MSGPACK} | ({} if key is None else {IDEMPOTENCY_HEADER: key})


def reload_stream(
    tensors: Sequence[LazyTensor], target: Target, adapter_config: Mapping[str, Any] | None
) -> Call[ReloadResult]:
    """``POST /reload`` with a whole checkpoint, or an adapter, and its digest behind it."""
    metadata = (
        None
        if adapter_config is None
        else {ADAPTER_CONFIG_KEY: orjson.dumps(dict(adapter_config)).decode()}
    )
    headers = {
        **target.headers(SAFETENSORS),
        "content-length": str(stream_length(tensors, metadata)),
        DIGEST_HEADER: DIGEST_TRAILER,
    }
    return _reload(target, headers, lambda: stream_checkpoint(tensors, metadata))


def begin_parts(tensors: Sequence[LazyTensor], target: Target) -> Call[str]:
    """``POST /reload/parts``: publish a checkpoint whose tensors come in parts; the upload's id."""
    head = encode_header(tensor.spec for tensor in tensors)
    params = {k: v for k, v in target.params().items() if k != "policy"}
    headers = target.headers(SAFETENSORS)
    path = "/reload/parts"
    return Call("POST", path, _read_id, headers, params, lambda: head, repeatable=False)


def bring_part(id: str, start: int, nbytes: int, pieces: Callable[[], Pieces]) -> Call[None]:
    """``PUT /reload/parts/{id}``: tensors that begin at ``start`` in the file."""
    headers = {"content-type": OCTETS, "content-length": str(nbytes)}
    path, params = f"/reload/parts/{quote(id, safe='')}", {"start": str(start)}
    return Call("PUT", path, lambda _: None, headers, params, pieces)


def end_parts(id: str, digest: str) -> Call[ReloadResult]:
    """``POST /reload/parts/{id}``: publish what has come."""
    body, headers = encode({"digest": digest}, MSGPACK), {"content-type": MSGPACK}
    path = f"/reload/parts/{quote(id, safe='')}"
    return Call("POST", path, read_reload, headers, body=lambda: body, repeatable=False)


def give_up_parts(id: str) -> Call[None]:
    """``DELETE /reload/parts/{id}``."""
    return Call("DELETE", f"/reload/parts/{quote(id, safe='')}", lambda _: None, repeatable=False)


def _read_id(document: Any) -> str:
    try:
        return str(document["id"])
    except (KeyError, TypeError) as error:
        raise MalformedBody(f"not a /reload/parts answer: {error!r}") from None


def reload_delta(
    tensors: Sequence[LazyTensor], target: Target, base: DeltaBase
) -> Call[ReloadResult]:
    """``POST /reload`` with what has changed since ``base``."""
    return _reload(target, target.headers(DELTA), lambda: base.encode(tensors))


def is_other_base(error: Conflict) -> bool:
    """Whether a delta was refused because another version is live, and not for want of a lease."""
    return "digest" in error.details


def reload_path(path: str | Path, target: Target, digest: str | None) -> Call[ReloadResult]:
    """``POST /reload`` with the name of a checkpoint that the server can read."""
    body = encode({"path": str(path), "digest": digest}, MSGPACK)
    return _reload(target, target.headers(MSGPACK), lambda: body)


def reset(target: Target) -> Call[ReloadResult]:
    """``POST /policies/default/reset``: publish the server's own checkpoint again."""
    path = f"/policies/{quote(target.policy, safe='')}/reset"
    params = {k: v for k, v in target.params().items() if k != "policy"}
    headers = target.headers(MSGPACK)
    return Call("POST", path, read_reload, headers, params, repeatable=False)


def policy(name: str) -> Call[dict[str, Any]]:
    """``GET /policies/{name}``."""
    return Call("GET", f"/policies/{quote(name, safe='')}", dict)


def delete_policy(name: str) -> Call[None]:
    """``DELETE /policies/{name}``: forget a LoRA policy."""
    path = f"/policies/{quote(name, safe='')}"
    return Call("DELETE", path, lambda _: None, repeatable=False)


def report_rewards(groups: Sequence[Mapping[str, Any]]) -> Call[int]:
    """``POST /rewards``: what samples were worth, for people who look at them."""
    body = encode(_plain({"groups": groups}), MSGPACK)
    headers = {"content-type": MSGPACK}
    return Call("POST", "/rewards", _read_noted, headers, body=lambda: body)


def _read_noted(document: Any) -> int:
    try:
        return int(document["noted"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedBody(f"not a /rewards answer: {error!r}") from None


def look(path: str, query: Mapping[str, str]) -> Call[dict[str, Any]]:
    """``GET /viewer/...``: what the server's page is told."""
    return Call("GET", f"/viewer/{path}", dict, params=dict(query))


def info() -> Call[ServerInfo]:
    """``GET /info``."""
    return Call("GET", "/info", _read_info)


def ready() -> Call[None]:
    """``GET /readyz``, asked once; whoever waits asks again."""
    return Call("GET", "/readyz", lambda _: None, repeatable=False)


def sleep(level: int, fence: int | None) -> Call[None]:
    """``POST /sleep``, once samples in flight are finished."""
    headers = {} if fence is None else {FENCE_HEADER: str(fence)}
    params = {"level": str(level), "mode": "wait"}
    return Call("POST", "/sleep", lambda _: None, headers, params)


def wake_up(memory: str | None) -> Call[None]:
    """``POST /wake_up`` of one kind of memory, or of all."""
    params = {} if memory is None else {"tags": memory}
    return Call("POST", "/wake_up", lambda _: None, params=params)


def _reload(
    target: Target, headers: dict[str, str], body: Callable[[], bytes | Pieces]
) -> Call[ReloadResult]:
    # Never repeated by itself: a publish whose answer was lost may have become a version.
    params = target.params()
    return Call("POST", "/reload", read_reload, headers, params, body, repeatable=False)


def read_reload(document: Any) -> ReloadResult:
    """The answer of a publish."""
    try:
        durable = document.get("durable", True)  # older servers know nothing else
        return ReloadResult(document["version"], document["digest"], document["timings"], durable)
    except (KeyError, TypeError, AttributeError) as error:
        raise MalformedBody(f"not a /reload answer: {error!r}") from None


def _read_info(document: Any) -> ServerInfo:
    try:
        found = ServerInfo(**{name: document[name] for name in ServerInfo.__dataclass_fields__})
    except (KeyError, TypeError) as error:
        raise MalformedBody(f"not an /info answer: {error!r}") from None
    if found.protocol != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the server speaks protocol {found.protocol}, this client {PROTOCOL_VERSION}"
        )
    return found


def _plain(value: Any) -> Any:
    """Tuples, mappings and numpy arrays as the lists and dicts that msgpack writes."""
    if isinstance(value, str | int | float | bytes) or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value]

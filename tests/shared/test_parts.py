"""Checkpoints cut into parts: where, what they add up to, and what happens when one fails."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from shared import parts
from shared.async_client import AsyncRolloutClient
from shared.calls import Target
from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import InsufficientStorage, TitoError
from shared.parts import Parts, are_worth_it
from shared.protocol import ServerInfo
from shared.weights import LazyTensor, TensorSpec, stream_checkpoint

INFO: dict[str, Any] = {
    "protocol": 1, "model": "m", "tokenizer": "t", "vocab_size": 5, "dtype": "bfloat16",
    "policy": "default", "version": 3, "digest": "d",
}  # fmt: skip


def tensors_of(*sizes: int) -> list[LazyTensor]:
    """Tensors of so many bytes."""
    return [
        LazyTensor(TensorSpec(f"t{i}", "U8", (size,)), partial(bytes, [i % 256] * size))
        for i, size in enumerate(sizes)
    ]


def info(most: int | None = 8) -> ServerInfo:
    return ServerInfo(**INFO, limits={} if most is None else {"max_upload_parts": most})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of ten bytes are worth it, and there are processors for four."""
    monkeypatch.setattr(parts, "_LEAST_BYTES", 10)
    monkeypatch.setattr("shared.parts.os.cpu_count", lambda: 4)


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ((10, 10, 10, 10), 8, [[0], [1], [2], [3]]),
        ((10, 10, 10, 10), 2, [[0, 1], [2, 3]]),
        ((10, 10, 10, 10), None, [[0, 1, 2, 3]]),
        ((90, 10, 10, 10), 8, [[0], [1, 2, 3]]),
        ((1, 1, 1, 90, 1), 8, [[0, 1, 2, 3], [4]]),
        ((5, 5, 5, 5), 8, [[0, 1], [2, 3]]),
        ((0, 20, 0, 20, 0), 2, [[1], [3]]),
        ((7,), 8, [[0]]),
    ],
)
def test_where_it_is_cut(sizes: tuple[int, ...], most: int | None, expected: Any) -> None:
    tensors = tensors_of(*sizes)
    found = Parts(tensors, info(most)).parts
    assert [[int(t.spec.name[1:]) for t in part.tensors] for part in found] == expected
    file = b"".join(bytes(piece) for piece in stream_checkpoint(tensors))[:-32]
    position = 8 + int.from_bytes(file[:8], "little")
    for part in found:
        assert part.start == position
        content = b"".join(bytes(t.load()) for t in part.tensors)
        assert file[position : position + part.nbytes] == content
        position += part.nbytes
    assert position == len(file)


def test_only_large_checkpoints_of_the_full_policy() -> None:
    assert are_worth_it(tensors_of(6, 6), Target())
    assert not are_worth_it(tensors_of(5, 5), Target())
    assert not are_worth_it(tensors_of(60, 60), Target(policy="mine"))


@dataclass
class Server:
    """Answers as the real one does.

    Attributes:
        most: parts that it takes; None does not know them.
        full: a part that it has no room for, by where it starts.
        bodies: of the parts, by where they start.
        asked: methods and paths.
        head, digest: what came first and last.
    """

    most: int | None = 8
    full: int | None = None
    bodies: dict[int, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    head: bytes = b""
    digest: str | None = None
    given_up: threading.Event = field(default_factory=threading.Event)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        self.asked.append(f"{request.method} {request.url.path}")
        match request.method, request.url.path:
            case "GET", "/info":
                limits = {} if self.most is None else {"max_upload_parts": self.most}
                return httpx.Response(200, json=INFO | {"limits": limits})
            case "POST", "/reload/parts":
                self.head = body
                assert dict(request.url.params) == {"mode": "drain", "drain_seconds": "60.0"}
                assert request.headers["x-tito-fence"] == "7"
                return httpx.Response(201, json={"id": "a/b"})
            case "PUT", "/reload/parts/a/b":
                return self._part(int(request.url.params["start"]), body)
            case "POST", "/reload/parts/a/b":
                self.digest = re.findall(rb"[0-9a-f]{32}", body)[0].decode()
            case "DELETE", "/reload/parts/a/b":
                self.given_up.set()
        return httpx.Response(200, json={"version": 4, "digest": "d", "timings": {}})

    def _part(self, start: int, body: bytes) -> httpx.Response:
        if start == self.full:
            return httpx.Response(507, json=InsufficientStorage("it is full").to_wire())
        if self.full is not None:
            assert self.given_up.wait(30)
        self.bodies[start] = body
        return httpx.Response(200, json={"missing": 0})


Reload = Callable[..., Any]


def blocking(server: Server, tensors: list[LazyTensor], **options: Any) -> Any:
    with RolloutClient("http://server.test", transport=httpx.MockTransport(server)) as client:
        return client.reload(tensors, mode="drain", fence=7, **options)


def asynchronous(server: Server, tensors: list[LazyTensor], **options: Any) -> Any:
    async def answer(request: httpx.Request) -> httpx.Response:
        await request.aread()
        return await asyncio.to_thread(server, request)

    async def run() -> Any:
        transport = httpx.MockTransport(answer)
        async with AsyncRolloutClient("http://server.test", transport=transport) as client:
            return await client.reload(tensors, mode="drain", fence=7, **options)

    return asyncio.run(run())


@pytest.fixture(params=[blocking, asynchronous])
def reload(request: pytest.FixtureRequest) -> Reload:
    asked: Reload = request.param
    return asked


@pytest.mark.parametrize("sizes", [(10, 10, 10, 10), (3, 0, 40, 9, 30, 0)])
def test_what_arrives_is_the_file_and_its_digest(reload: Reload, sizes: tuple[int, ...]) -> None:
    server, tensors = Server(), tensors_of(*sizes)
    assert reload(server, tensors).version == 4
    file = b"".join(bytes(piece) for piece in stream_checkpoint(tensors))
    assert (
        server.head + b"".join(server.bodies[start] for start in sorted(server.bodies))
        == (file[:-32])
    )
    assert server.digest == file[-32:].decode()
    assert len(server.bodies) > 1


def test_one_part_is_sent_as_before(reload: Reload) -> None:
    for server in (Server(most=None), Server(most=1)):
        reload(server, tensors_of(20, 20))
        assert server.asked == ["GET /info", "POST /reload"]


def test_a_base_remembers_what_went_in_parts(reload: Reload) -> None:
    server, base, tensors = Server(), DeltaBase(), tensors_of(20, 20)
    reload(server, tensors, base=base)
    assert len(server.bodies) == 2
    assert base.digest == server.digest
    assert base.covers(tensors)


def test_a_part_that_fails_ends_the_others(reload: Reload) -> None:
    tensors = tensors_of(20, 20, 20)
    server = Server(full=Parts(tensors, info()).parts[1].start)
    with pytest.raises(InsufficientStorage, match="it is full"):
        reload(server, tensors)
    assert server.given_up.is_set()
    assert server.digest is None


def test_a_tensor_that_cannot_be_loaded(reload: Reload) -> None:
    server, (first, second) = Server(), tensors_of(20, 20)
    broken = LazyTensor(second.spec, lambda: b"short")
    with pytest.raises(ValueError, match="produced 5 bytes"):
        reload(server, [first, broken])
    assert server.given_up.is_set()


def test_an_upload_that_cannot_be_given_up_raises_what_went_wrong(reload: Reload) -> None:
    class Gone(Server):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.method == "DELETE":
                raise httpx.ConnectError("gone")
            return super().__call__(request)

    tensors = tensors_of(20, 20)
    server = Gone(full=Parts(tensors, info()).parts[0].start)
    server.given_up.set()
    with pytest.raises(TitoError, match="it is full"):
        reload(server, tensors)


def test_what_is_not_an_answer(reload: Reload) -> None:
    class Odd(Server):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            answer = super().__call__(request)
            begun = request.method == "POST" and request.url.path == "/reload/parts"
            return httpx.Response(201, json=["id"]) if begun else answer

    with pytest.raises(TitoError, match="not a /reload/parts answer"):
        reload(Odd(), tensors_of(20, 20))

"""Uploads of the shipped clients, over real sockets: whole, and no further than is of use."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from shared.async_client import AsyncRolloutClient
from shared.client import RolloutClient
from shared.errors import Conflict, ServerUnreachable
from shared.protocol import FENCE_HEADER, MSGPACK
from shared.weights import LazyTensor, TensorSpec, stream_checkpoint, stream_length

ROWS = 5000
TOTAL = 24
RELOADED = {"version": 3, "digest": "d", "timings": {}}


def content(index: int) -> memoryview:
    numbers = np.random.default_rng(index).integers(0, 1 << 14, ROWS * 100, dtype=np.uint16)
    return memoryview(numbers.tobytes())


TENSORS = [
    LazyTensor(TensorSpec(f"t{index}", "BF16", (ROWS, 100)), partial(content, index))
    for index in range(TOTAL)
]
LENGTH = stream_length(TENSORS)


def document(status: str, body: Any) -> bytes:
    packed: bytes = msgpack.packb(body)
    head = f"HTTP/1.1 {status}\r\ncontent-type: {MSGPACK}\r\ncontent-length: {len(packed)}\r\n\r\n"
    return head.encode() + packed


GOOD = document("200 OK", RELOADED)
REFUSED = document("409 Conflict", Conflict("of no use").to_wire())


@dataclass
class Peer:
    """Takes one connection after the other.

    Attributes:
        behave: is given each, once its head was read, and what came with that.
        heads: request line and headers of each, in lower case.
        bodies: how many bytes came of each body, and their SHA-256.
    """

    behave: Callable[[Peer, socket.socket, bytes], None]
    heads: list[str] = field(default_factory=list)
    bodies: list[tuple[int, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                with line:
                    received = b""
                    while b"\r\n\r\n" not in received:
                        received += line.recv(1 << 16)
                    head, _, rest = received.partition(b"\r\n\r\n")
                    self.heads.append(head.decode().lower())
                    self.behave(self, line, rest)

    def read(self, line: socket.socket, rest: bytes, most: int = LENGTH) -> None:
        """Read the body, to its end at most."""
        whole, count = hashlib.sha256(rest), len(rest)
        while count < most and (piece := line.recv(min(1 << 20, most - count))):
            whole.update(piece)
            count += len(piece)
        self.bodies.append((count, whole.hexdigest()))


def takes_all(peer: Peer, line: socket.socket, rest: bytes) -> None:
    peer.read(line, rest)
    line.sendall(GOOD)


def refuses_and_reads_on(peer: Peer, line: socket.socket, rest: bytes) -> None:
    line.sendall(REFUSED)
    peer.read(line, rest)


def refuses_and_reads_nothing(peer: Peer, line: socket.socket, rest: bytes) -> None:
    line.sendall(REFUSED)
    peer.over.wait(30)
    peer.bodies.append((len(rest), ""))


def hangs_up(peer: Peer, line: socket.socket, rest: bytes) -> None:
    peer.read(line, rest, LENGTH // 2)


def says_something_else(peer: Peer, line: socket.socket, rest: bytes) -> None:
    peer.read(line, rest)
    line.sendall(b"SSH-2.0-OpenSSH\r\n")


def takes_all_and_sleeps(peer: Peer, line: socket.socket, rest: bytes) -> None:
    peer.read(line, rest)
    peer.over.wait(30)


def is_asleep(peer: Peer, line: socket.socket, _: bytes) -> None:
    assert line.fileno() > 0
    peer.over.wait(30)


@contextlib.contextmanager
def serving(behave: Callable[[Peer, socket.socket, bytes], None]) -> Iterator[tuple[Peer, str]]:
    peer = Peer(behave)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=peer.serve, args=(listener,))
        thread.start()
        try:
            yield peer, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            peer.over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(30)
    assert not thread.is_alive()


Reload = Callable[..., Any]


def blocking(url: str, **options: Any) -> Any:
    with RolloutClient(url, **options) as client:
        return client.reload(TENSORS, policy="p", fence=7)


def asynchronous(url: str, **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncRolloutClient(url, **options) as client:
            return await client.reload(TENSORS, policy="p", fence=7)

    return asyncio.run(run())


@pytest.fixture(params=[blocking, asynchronous])
def reload(request: pytest.FixtureRequest) -> Reload:
    asked: Reload = request.param
    return asked


def test_all_of_it_arrives(reload: Reload) -> None:
    with serving(takes_all) as (peer, url):
        assert reload(url, token="secret").version == 3
    expected = hashlib.sha256(b"".join(bytes(piece) for piece in stream_checkpoint(TENSORS)))
    assert peer.bodies == [(LENGTH, expected.hexdigest())]
    first, *fields = peer.heads[0].split("\r\n")
    assert first == "post /reload?policy=p&mode=keep&drain_seconds=60.0 http/1.1"
    assert {
        f"content-length: {LENGTH}",
        "authorization: bearer secret",
        f"{FENCE_HEADER.lower()}: 7",
    } <= set(fields)
    assert "transfer-encoding" not in peer.heads[0]


@pytest.mark.parametrize("behave", [refuses_and_reads_on, refuses_and_reads_nothing])
def test_an_early_answer_ends_it(reload: Reload, behave: Any) -> None:
    with serving(behave) as (peer, url), pytest.raises(Conflict, match="of no use"):
        reload(url)
    assert len(peer.heads) == 1
    ((count, _),) = peer.bodies
    assert count < LENGTH / 2


def test_a_server_that_hangs_up(reload: Reload) -> None:
    with serving(hangs_up) as (peer, url), pytest.raises(ServerUnreachable, match="no answer"):
        reload(url)
    assert len(peer.heads) == 1, "it may have become a version, and is not sent again"


def test_what_is_no_answer(reload: Reload) -> None:
    with serving(says_something_else) as (_, url), pytest.raises(ServerUnreachable, match="SSH"):
        reload(url)


@pytest.mark.parametrize("behave", [is_asleep, takes_all_and_sleeps])
def test_a_server_that_takes_or_says_nothing(reload: Reload, behave: Any) -> None:
    with serving(behave) as (_, url), pytest.raises(ServerUnreachable) as caught:
        reload(url, timeout=0.5)
    assert isinstance(caught.value.__cause__, httpx.WriteTimeout | httpx.ReadTimeout)


def test_nobody_listens(reload: Reload) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServerUnreachable) as caught:
        reload(f"http://127.0.0.1:{port}")
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


def test_a_tensor_of_another_size_ends_the_connection() -> None:
    short = [*TENSORS[:2], LazyTensor(TensorSpec("t", "BF16", (3,)), lambda: b"xxxx")]
    with (
        serving(takes_all) as (peer, url),
        RolloutClient(url) as client,
        pytest.raises(ValueError, match="not 6"),
    ):
        client.reload(short)
    ((count, _),) = peer.bodies
    assert count < stream_length(short)


def test_a_cancelled_upload_ends_the_connection() -> None:
    async def run(peer: Peer, url: str) -> None:
        async with AsyncRolloutClient(url) as client:
            upload = asyncio.create_task(client.reload(TENSORS))
            while not peer.heads:  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.01)
            upload.cancel()
            with pytest.raises(asyncio.CancelledError):
                await upload
            peer.over.set()

    def reads_later(peer: Peer, line: socket.socket, rest: bytes) -> None:
        peer.over.wait(30)
        peer.read(line, rest)

    with serving(reads_later) as (peer, url):
        asyncio.run(run(peer, url))
    ((count, _),) = peer.bodies
    assert count < LENGTH


def test_a_proxy_is_used_where_there_is_one(
    reload: Reload, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(takes_all) as (peer, url):
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert reload("http://server.test:8300").version == 3
        assert peer.heads[0].startswith("post http://server.test:8300/reload")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert reload(url).version == 3
        assert peer.heads[1].startswith("post /reload")

"""Large bodies over real sockets: whole, refused, given up; and the connection afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from rollout_server.bodies import EXTENSION, LARGE_BYTES, MIN_BYTES_PER_S, paced
from rollout_server.http import upload
from shared.errors import Conflict, MalformedBody
from tests.rollout_server.fakes import idle_app
from tests.rollout_server.support import eventually, serving

SILENCE_S = 0.5
ROOM_BYTES = 1 << 20


@dataclass
class Reader:
    """Routes that read bodies, and what has become of them.

    Attributes:
        gate: the reader waits for it after each piece.
        ended: how the last reading ended.
        pieces: sizes of the pieces that were read last.
        is_large: whether they went past the parser.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    ended: list[str] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    is_large: bool = False

    async def digest(self, request: Request) -> Response:
        """SHA-256 of the body."""
        self.pieces, self.is_large = [], EXTENSION in request.scope.get("extensions", {})
        sink = Digest(self)
        try:
            await upload(request)(sink)
        except (ClientDisconnect, MalformedBody) as error:
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("whole")
        return Response(sink.whole.hexdigest())

    async def refuse(self, request: Request) -> Response:
        """Refuses after as many pieces as the query says."""
        if most := int(request.query_params["after"]):
            await upload(request)(Digest(self, most))
        raise Conflict("it is of no use")

    async def cancelled(self, request: Request) -> Response:
        """Gives up a body that does not go on, and answers when nobody waits for it any more."""
        sink = Digest(self)
        reading: asyncio.Task[None] = asyncio.create_task(upload(request)(sink))
        await asyncio.to_thread(eventually, lambda: self.pieces)
        reading.cancel()
        await asyncio.wait({reading})
        room = bytes(sink.room())
        await asyncio.sleep(2 * SILENCE_S)
        self.ended.append("untouched" if room == bytes(sink.room()) else "written to")
        raise Conflict("it is of no use")


@dataclass
class Digest:
    """A sink.

    Attributes:
        reader: is told of pieces; its gate is waited for after each.
        most: pieces after which it refuses.
    """

    reader: Reader
    most: int = 1 << 30
    whole: Any = field(default_factory=hashlib.sha256)
    memory: bytearray = field(default_factory=lambda: bytearray(ROOM_BYTES))

    def room(self) -> memoryview:
        return memoryview(self.memory)

    def filled(self, count: int) -> None:
        self.whole.update(self.memory[:count])
        self.reader.pieces.append(count)
        self.reader.gate.wait(30)
        if len(self.reader.pieces) >= self.most:
            raise Conflict("it is of no use")


@dataclass
class Server:
    url: str
    reader: Reader

    @contextlib.contextmanager
    def line(self) -> Iterator[socket.socket]:
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as line:
            yield line


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def running(request: pytest.FixtureRequest) -> Iterator[Server]:
    reader = Reader()
    app: FastAPI = idle_app(body_silence=SILENCE_S)
    app.add_api_route("/digest", reader.digest, methods=["POST"])
    app.add_api_route("/cancelled", reader.cancelled, methods=["POST"])
    app.add_api_route("/refuse", reader.refuse, methods=["POST"])
    with serving(app, loop=request.param) as url:
        yield Server(url, reader)


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Nothing is known of earlier bodies, and the gate is open."""
    running.reader.ended, running.reader.pieces = [], []
    running.reader.gate.set()
    yield running
    running.reader.gate.set()


def head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def answer(line: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer on a connection, and not a byte more."""
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        received += exactly(line, 1)
    fields = dict(part.lower().split(b": ", 1) for part in received.split(b"\r\n")[1:-2])
    return int(received.split()[1]), exactly(line, int(fields[b"content-length"]))


def exactly(line: socket.socket, count: int) -> bytes:
    received = line.recv(count, socket.MSG_WAITALL)
    assert len(received) == count, "the connection has ended"
    return received


def sha256(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


SIZES = [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, (4 << 20) + 5, 37_000_001]


@pytest.mark.parametrize("together", [1, 100, 1 << 17])
def test_bodies_of_any_size_and_what_follows_them(server: Server, together: int) -> None:
    """Some bytes of the body come with the head; requests follow each other on one connection."""
    with server.line() as line:
        for size in SIZES:
            body = os.urandom(size)
            start = head("/digest", size) + body[:together]
            line.sendall(start)
            line.sendall(body[together:])
            assert answer(line) == (200, sha256(body))
            assert server.reader.is_large == (size >= LARGE_BYTES)
            assert sum(server.reader.pieces) == size


def test_requests_that_are_sent_before_the_answer(server: Server) -> None:
    bodies = [os.urandom(size) for size in (3_000_000, 10, 1_000_000, 2_000_000)]
    with server.line() as line:
        requests = b"".join(head("/digest", len(body)) + body for body in bodies)
        sender = threading.Thread(target=line.sendall, args=(requests,))
        sender.start()
        for body in bodies:
            assert answer(line) == (200, sha256(body))
        sender.join()


@pytest.mark.parametrize("together", [0, 1000, 1 << 17, 1 << 18, 1 << 30])
def test_rooms_are_filled_to_their_end(server: Server, together: int) -> None:
    body = os.urandom((40 << 20) + 12_345)
    with server.line() as line:
        line.sendall(head("/digest", len(body)) + body[:together])
        line.sendall(body[together:])
        assert answer(line) == (200, sha256(body))
    assert server.reader.pieces == [ROOM_BYTES] * 40 + [12_345]


def test_who_is_not_read_has_to_wait(server: Server) -> None:
    server.reader.gate.clear()
    body = os.urandom(200 << 20)
    sent = 0
    with server.line() as line:
        line.sendall(head("/digest", len(body)))
        line.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            while sent < len(body):
                sent += line.send(body[sent : sent + (1 << 20)])
        assert sent < len(body), "the server has taken all of it into memory"
        line.settimeout(30)
        server.reader.gate.set()
        line.sendall(memoryview(body)[sent:])
        assert answer(line) == (200, sha256(body))


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_an_early_answer_and_the_rest_of_the_body(server: Server, after: int) -> None:
    body = os.urandom(60 << 20)
    with server.line() as line:
        line.sendall(head(f"/refuse?after={after}", len(body)) + body[: 30 << 20])
        status, said = answer(line)
        assert (status, json.loads(said)["error"]["message"]) == (409, "it is of no use")
        line.sendall(memoryview(body)[30 << 20 :])
        line.sendall(head("/digest", 5) + b"after")
        assert answer(line) == (200, sha256(b"after"))


def test_an_early_answer_to_a_client_that_only_sends(server: Server) -> None:
    pieces = [bytes(1 << 20)] * 40
    headers = {"content-length": str(40 << 20)}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for _ in range(2):
            response = client.post("/refuse?after=1", content=iter(pieces), headers=headers)
            assert response.status_code == 409


@pytest.mark.parametrize("share", [0.0, 0.003, 0.5, 0.999])
def test_a_caller_who_hangs_up(server: Server, share: float) -> None:
    body = os.urandom(20 << 20)
    with server.line() as line:
        line.sendall(head("/digest", len(body)) + body[: int(share * len(body))])
    eventually(lambda: server.reader.ended)
    assert server.reader.ended == ["ClientDisconnect"]


def test_a_caller_who_hangs_up_while_nobody_reads(server: Server) -> None:
    server.reader.gate.clear()
    body = bytes(2 << 20)
    with server.line() as line:
        line.sendall(head("/digest", 2 * len(body)) + body)
        eventually(lambda: server.reader.pieces)
    server.reader.gate.set()
    eventually(lambda: server.reader.ended)
    assert server.reader.ended == ["ClientDisconnect"]


def test_a_body_that_is_given_up_is_not_written_to_any_more(server: Server) -> None:
    body = os.urandom(20 << 20)
    with server.line() as line:
        line.sendall(head("/cancelled", len(body)) + body[: 3 << 20])
        sender = threading.Thread(target=line.sendall, args=(body[3 << 20 :],))
        eventually(lambda: server.reader.pieces)
        sender.start()
        assert answer(line)[0] == 409
        sender.join()
        line.sendall(head("/digest", 5) + b"after")
        assert answer(line) == (200, sha256(b"after"))
    assert server.reader.ended == ["untouched", "whole"]


@pytest.mark.parametrize("sent", [0, 100, LARGE_BYTES, 5 << 20])
def test_silence_in_a_body_ends_the_request(server: Server, sent: int) -> None:
    with server.line() as line:
        line.sendall(head("/digest", 20 << 20) + bytes(sent))
        status, said = answer(line)
    assert status == 400
    assert f"nothing of it came for {SILENCE_S} s" in json.loads(said)["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_one_byte_now_and_then_is_no_upload(server: Server, chunked: bool) -> None:
    over = threading.Event()

    def drip(line: socket.socket) -> None:
        while not over.wait(SILENCE_S / 10):
            line.sendall(b"1\r\nx\r\n" if chunked else b"x")

    with server.line() as line:
        start = head("/digest", 20 << 20)
        if chunked:
            start = start.replace(b"Content-Length: 20971520", b"Transfer-Encoding: chunked")
        line.sendall(start)
        dripping = threading.Thread(target=drip, args=(line,))
        dripping.start()
        try:
            status, said = answer(line)
        finally:
            over.set()
            dripping.join()
    assert status == 400
    assert "too slowly" in (message := json.loads(said)["error"]["message"])
    assert f"at least {MIN_BYTES_PER_S} bytes a second" in message


def test_a_slow_reader_is_not_held_against_the_caller() -> None:
    async def read() -> int:
        async def chunks() -> Any:
            for _ in range(5):
                yield b"x"

        count = 0
        async for _ in paced(chunks(), 0.01):
            await asyncio.sleep(0.02)
            count += 1
        return count

    assert asyncio.run(read()) == 5


def test_a_caller_who_asks_whether_to_go_on(server: Server) -> None:
    body = os.urandom(2 << 20)
    with server.line() as line:
        line.sendall(head("/digest", len(body), "Expect: 100-continue"))
        assert line.recv(1 << 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(body)
        assert answer(line) == (200, sha256(body))


def test_a_body_of_unknown_length(server: Server) -> None:
    body = os.urandom(9 << 20)
    pieces = (body[at : at + 70_001] for at in range(0, len(body), 70_001))
    response = httpx.post(f"{server.url}/digest", content=pieces, timeout=30)
    assert response.content == sha256(body)
    assert not server.reader.is_large


def test_a_connection_for_one_request(server: Server) -> None:
    body = os.urandom(2 << 20)
    with server.line() as line:
        line.sendall(head("/digest", len(body), "Connection: close") + body)
        assert answer(line) == (200, sha256(body))
        assert line.recv(1) == b""


def test_a_server_that_is_told_to_stop_reads_on() -> None:
    reader, body = Reader(), os.urandom(8 << 20)
    app: FastAPI = idle_app()
    app.add_api_route("/digest", reader.digest, methods=["POST"])
    stopping = contextlib.ExitStack()
    with contextlib.ExitStack() as lines:
        server = Server(stopping.enter_context(serving(app)), reader)
        line = lines.enter_context(server.line())
        line.sendall(head("/digest", len(body)) + body[: 4 << 20])
        eventually(lambda: reader.pieces)
        stopped = threading.Thread(target=stopping.close)
        stopped.start()
        eventually(lambda: not listens(server))
        reader.gate.set()
        line.sendall(body[4 << 20 :])
        assert answer(line) == (200, sha256(body))
        stopped.join(30)
        assert not stopped.is_alive()


def listens(server: Server) -> bool:
    with contextlib.suppress(OSError), server.line():
        return True
    return False

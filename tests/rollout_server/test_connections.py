"""Callers who send no request at all, or one that has no end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from rollout_server.connections import MAX_HEAD_BYTES
from tests.rollout_server.fakes import idle_app
from tests.rollout_server.support import serving

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
FLOOD_BYTES = 8 << 20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(idle_app(), keep_alive=1) as url:
        yield url


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        yield line


@pytest.mark.parametrize(
    ("opening", "flood"),
    [
        (b"GET /", b"x" * 4096),
        (GET, b"a: " + b"x" * 4091 + b"\r\n"),
        (GET + b"a: ", b"x" * 4096),
        (CHUNKED + b"0\r\na: ", b"x" * 4096),
        (CHUNKED + b"1;", b"x" * 4096),
    ],
)
def test_what_belongs_to_no_body_is_bounded(url: str, opening: bytes, flood: bytes) -> None:
    sent = 0
    with connected(url) as line, contextlib.suppress(ConnectionError):
        line.sendall(opening)
        while sent < FLOOD_BYTES:
            line.sendall(flood)
            sent += len(flood)
    assert sent < FLOOD_BYTES


def test_a_long_head_is_told_of(url: str) -> None:
    with connected(url) as line:
        line.sendall(GET + b"a: " + b"x" * MAX_HEAD_BYTES)
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("begun", [b"", GET])
def test_a_request_that_does_not_come_is_not_waited_for(url: str, begun: bytes) -> None:
    with connected(url) as line:
        line.sendall(begun)
        assert line.recv(1) == b""


def test_heads_that_come_in_pieces_and_bodies_of_any_size(url: str) -> None:
    body = b"x" * (4 * MAX_HEAD_BYTES)
    head = f"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connected(url) as line:
        for _ in range(2):
            for at in range(0, len(head), 20):
                line.sendall(head[at : at + 20])
            line.sendall(body)
            assert line.recv(1 << 16).startswith(b"HTTP/1.1 405")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_nobody_is_upgraded(url: str, protocol: bytes) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n"
    with connected(url) as line:
        line.sendall(GET + upgrade + b"\r\n")
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")
    with connected(url) as line:
        # The parser would take the body for what the other protocol says, or for a request.
        line.sendall(GET + upgrade + b"Content-Length: 5\r\n\r\n")
        refused = line.recv(1 << 16)
        assert refused.startswith(b"HTTP/1.1 400")
        assert refused.endswith(b"must not ask for an upgrade.")
        assert line.recv(1) == b""
    with connected(url) as line:
        line.sendall(CHUNKED[:-2] + upgrade + b"\r\n")
        assert line.recv(1 << 16).endswith(b"must not ask for an upgrade.")

"""What both ends of a channel must agree on, and sockets that take the right peer alone."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from shared import channel
from shared.byte_link import LinkError, Receiver, Sender, readable
from shared.channel import ALIGNMENT_BYTES, Layout
from shared.client import RolloutClient
from shared.codec import encode
from shared.errors import MalformedBody
from shared.protocol import MSGPACK
from shared.weights import TensorSpec

SECRET = "0123456789abcdef" * 2
SPECS = [
    TensorSpec("a", "BF16", (3,)),
    TensorSpec("b", "F32", ()),
    TensorSpec("empty", "BF16", (0, 4)),
    TensorSpec("c", "BF16", (100, 2)),
]


def test_tensors_lie_in_order_and_aligned() -> None:
    layout = Layout.of(SPECS)
    assert layout.specs == tuple(SPECS)
    assert layout.offsets == (0, ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES)
    assert layout.nbytes == 2 * ALIGNMENT_BYTES + 512


def test_pieces_cover_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PIECE_BYTES", 768)
    assert Layout.of(SPECS).pieces() == [(0, 768), (768, 1024)]


@pytest.mark.parametrize("answer", [None, [], {}, {"id": "x"}, {"memory": 5}])
def test_an_answer_of_another_form(answer: Any) -> None:
    body = encode(answer, MSGPACK)
    reply = httpx.Response(200, content=body, headers={"content-type": MSGPACK})
    transport = httpx.MockTransport(lambda _: reply)
    with RolloutClient("http://tito", transport=transport) as client:
        with pytest.raises(MalformedBody):
            client.open_channel("ipc", SPECS)
        with pytest.raises(MalformedBody):
            client.await_channel("0" * 32)


def never() -> str | None:
    return None


def soon() -> float:
    return time.monotonic() + 20.0


@pytest.fixture
def receiver() -> Any:
    made = Receiver("127.0.0.1", SECRET)
    yield made
    made.close()


def joined(receiver: Receiver, secret: str = SECRET) -> Sender:
    sender = Sender([("127.0.0.1", receiver.port)], secret, 10.0)
    receiver.join(soon(), never)
    return sender


def test_bytes_arrive(receiver: Receiver) -> None:
    sent, got = bytes(range(256)) * 5000, bytearray(256 * 5000)
    with joined(receiver) as sender:
        sending = threading.Thread(target=sender.send, args=(memoryview(sent),))
        sending.start()
        receiver.receive(memoryview(got), soon(), never)
        sending.join()
    assert bytes(got) == sent


def test_a_stranger_is_turned_away_and_the_trainer_admitted(receiver: Receiver) -> None:
    with socket.create_connection(("127.0.0.1", receiver.port)) as silent:
        stranger = Sender([("127.0.0.1", receiver.port)], "f" * 32, 10.0)
        with joined(receiver) as sender:
            sender.send(memoryview(b"right"))
            got = bytearray(5)
            receiver.receive(memoryview(got), soon(), never)
            assert got == b"right"
        assert silent.recv(1) == b""
        stranger.close()


def test_a_peer_that_has_gone_is_noticed_at_once(receiver: Receiver) -> None:
    with joined(receiver) as sender:
        sender.send(memoryview(b"half"))
    with pytest.raises(LinkError, match="4 bytes had not come"):
        receiver.receive(memoryview(bytearray(8)), soon(), never)


def test_nothing_is_waited_for_beyond_a_deadline(receiver: Receiver) -> None:
    with pytest.raises(LinkError, match="in time"):
        receiver.join(time.monotonic(), never)
    with pytest.raises(LinkError, match="the lease has ended"):
        receiver.join(soon(), lambda: "the lease has ended")


def test_a_receiver_that_is_not_there(receiver: Receiver) -> None:
    port = receiver.port
    receiver.close()
    with pytest.raises(LinkError, match="cannot be reached"):
        Sender([("127.0.0.1", port)], SECRET, 1.0)


def test_descriptors_of_any_number() -> None:
    """A process with many files open, such as a worker of many GPUs, has no low one left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    try:
        one, other = socket.socketpair()
        high = socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 2000))
        with one, other, high:
            assert not readable(high, 0)
            other.sendall(b"x")
            assert readable(high, 10)
            high.recv(1)
            other.close()
            assert readable(high, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

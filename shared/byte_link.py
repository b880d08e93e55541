"""Bytes from one process to another through a socket: what a broadcast is without GPUs.

A receiver listens on a port that the system chooses and takes the one peer that knows a secret.
Every wait has a deadline, and ends early when the caller knows that the peer has gone.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import time
from collections.abc import Callable
from typing import Self

_POLL_S = 0.02
_SECRET_BYTES = 32

GivenUp = Callable[[], str | None]


class LinkError(RuntimeError):
    """The peer has gone, did not come in time, or the wait was given up."""


class Receiver:
    """The end that receives.

    Args:
        interface: address to listen on.
        secret: 32 characters that the peer must send first.

    Attributes:
        port: where it listens.
    """

    def __init__(self, interface: str, secret: str) -> None:
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        self._listener = socket.create_server((interface, 0), family=family)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._secret = secret.encode()
        self._peer: socket.socket | None = None

    def join(self, deadline: float, given_up: GivenUp) -> None:
        """Wait for the peer.

        Raises:
            LinkError: it did not come.
        """
        while self._peer is None:
            _wait(self._listener, deadline, given_up)
            with contextlib.suppress(OSError):
                peer, _ = self._listener.accept()
                peer.setblocking(False)
                self._admit(peer, given_up)
        self._listener.close()

    def _admit(self, peer: socket.socket, given_up: GivenUp) -> None:
        said = bytearray(_SECRET_BYTES)
        try:
            # Whoever does not know it must not keep the one who does waiting for long.
            _fill(peer, memoryview(said), time.monotonic() + 1.0, given_up)
        except LinkError:
            peer.close()
            return
        if hmac.compare_digest(said, self._secret):
            self._peer = peer
        else:
            peer.close()

    def receive(self, into: memoryview, deadline: float, given_up: GivenUp) -> None:
        """Fill a buffer.

        Raises:
            LinkError: fewer bytes came.
        """
        if self._peer is None:
            raise LinkError("nobody has joined")
        _fill(self._peer, into, deadline, given_up)

    def close(self) -> None:
        """Receive nothing more; the peer learns of it."""
        self._listener.close()
        if self._peer is not None:
            self._peer.close()


class Sender:
    """The end that sends, to any number of receivers.

    Args:
        addresses: of the receivers.
        secret: see :class:`Receiver`.
        seconds: how long connecting, and any piece, may take.

    Raises:
        LinkError: one of them is not there.
    """

    def __init__(self, addresses: list[tuple[str, int]], secret: str, seconds: float) -> None:
        self._peers: list[socket.socket] = []
        try:
            for address in addresses:
                self._peers.append(socket.create_connection(address, seconds))
                self._peers[-1].sendall(secret.encode())
        except OSError as error:
            self.close()
            raise LinkError(f"a receiver cannot be reached: {error}") from None

    def send(self, piece: memoryview) -> None:
        """Send the same bytes to all.

        Raises:
            LinkError: somebody has closed the link, or takes nothing.
        """
        try:
            for peer in self._peers:
                peer.sendall(piece)
        except OSError as error:
            raise LinkError(f"a receiver has gone: {error}") from None

    def close(self) -> None:
        """Send nothing more."""
        for peer in self._peers:
            peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def readable(peer: socket.socket, seconds: float) -> bool:
    """Whether there is something to be read, or the end, within so long."""
    # Not select(), which knows no descriptors above 1023.
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _fill(peer: socket.socket, into: memoryview, deadline: float, given_up: GivenUp) -> None:
    while into:
        _wait(peer, deadline, given_up)
        try:
            count = peer.recv_into(into)
        except BlockingIOError:
            continue
        except OSError as error:
            raise LinkError(f"the peer has gone: {error}") from None
        if not count:
            raise LinkError(f"the peer has gone; {len(into)} bytes had not come")
        into = into[count:]


def _wait(peer: socket.socket, deadline: float, given_up: GivenUp) -> None:
    """Wait until there is something to be read."""
    while not readable(peer, _POLL_S):
        if why := given_up():
            raise LinkError(why)
        if time.monotonic() > deadline:
            raise LinkError("the peer did not come, or went on, in time")

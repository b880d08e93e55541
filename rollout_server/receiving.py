"""Inside a worker: its end of a broadcast, by NCCL, or by a socket where there are no GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from shared import nccl
from shared.byte_link import Receiver
from shared.channel import Layout

_HOST_PIECE_BYTES = 16 << 20

GivenUp = Callable[[], str | None]
"""Why nothing is waited for any more, if that is so."""

Arrived = Callable[[int], None]
"""Told how many bytes of the buffer are there; on a GPU, once its current stream is so far."""


class Group(Protocol):
    """A worker's end of a broadcast. What it waits for, it waits for until a deadline."""

    def join(self, deadline: float) -> None:
        """Meet the trainer."""
        ...

    def receive(self, deadline: float, arrived: Arrived) -> None:
        """Fill the buffer with what it sends."""
        ...

    def close(self) -> None:
        """End the group on this side; whatever waits for it ends too."""
        ...


class NcclGroup:
    """A broadcast between GPUs, on a stream beside the engine's."""

    def __init__(
        self, flat: Tensor, layout: Layout, rank: int, rendezvous: Any, given_up: GivenUp
    ) -> None:
        self._flat, self._layout, self._given_up = flat, layout, given_up
        self._stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        self._id = bytes.fromhex(rendezvous["unique_id"])
        self._rank, self._size = rank, rendezvous["size"]
        self._comm: nccl.Communicator | None = None

    def join(self, deadline: float) -> None:
        self._comm = nccl.Communicator(self._id, self._rank, self._size)
        self._comm.settle(lambda: True, deadline, self._given_up)

    def receive(self, deadline: float, arrived: Arrived) -> None:
        assert self._comm is not None
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for start, end in self._layout.pieces():
            pointer = self._flat.data_ptr() + start
            self._comm.broadcast(pointer, end - start, self._stream.cuda_stream)
            self._comm.settle(lambda: True, deadline, self._given_up)
            there.record(self._stream)
            with torch.cuda.stream(self._stream):
                arrived(end)
        self._comm.settle(there.query, deadline, self._given_up)

    def close(self) -> None:
        if self._comm is not None:
            self._comm.abort()


class SocketGroup:
    """The same without GPUs."""

    def __init__(self, flat: Tensor, receiver: Receiver, given_up: GivenUp) -> None:
        self._bytes, self._receiver, self._given_up = flat.numpy().data, receiver, given_up

    def join(self, deadline: float) -> None:
        self._receiver.join(deadline, self._given_up)

    def receive(self, deadline: float, arrived: Arrived) -> None:
        for start in range(0, len(self._bytes), _HOST_PIECE_BYTES):
            piece = self._bytes[start : start + _HOST_PIECE_BYTES]
            self._receiver.receive(piece, deadline, self._given_up)
            arrived(start + len(piece))

    def close(self) -> None:
        self._receiver.close()

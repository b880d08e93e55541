"""How tensors get from this process into the workers' buffers: mapped, broadcast, or by sockets."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from shared import nccl
from shared.byte_link import LinkError, Sender
from shared.channel import SHARED_NAME, Channel, Layout, Rendezvous
from shared.cuda import CudaError, DeviceMemory
from shared.protocol import ReloadResult
from trainer.background import in_background
from trainer.channel_pieces import Named, batches, copy_into, pieces, targets

_PIECES_IN_FLIGHT = 2
BROKEN = (CudaError, LinkError, nccl.NcclError, OSError)
"""What a way raises when it cannot be opened, or has broken."""


class Way(Protocol):
    """How bytes get from here to the workers."""

    def send(self, tensors: Iterable[Named], publish: Callable[[], ReloadResult]) -> ReloadResult:
        """Bring the tensors over, in the layout's order, and publish them."""
        ...

    def close(self) -> None:
        """Send nothing more."""
        ...


class Mapped:
    """Copies into the workers' own buffers."""

    def __init__(
        self, channel: Channel, layout: Layout, first: torch.dtype | None, device: torch.device
    ) -> None:
        self._layout, self._first = layout, first
        buffers = [_mapped(end.device, end.handle, channel.nbytes) for end in channel.memory]
        self._devices = {device, *(buffer.device for buffer in buffers)}
        self._targets = [targets(buffer, layout) for buffer in buffers]

    def send(self, tensors: Iterable[Named], publish: Callable[[], ReloadResult]) -> ReloadResult:
        for slots in batches(self._layout, tensors, self._first):
            sources = [slot.source for slot in slots]
            for places in self._targets:
                torch._foreach_copy_([places[slot.start] for slot in slots], sources)
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return publish()

    def close(self) -> None:
        self._targets = []


class Streamed:
    """Sends through sockets, where there is no GPU."""

    def __init__(
        self, rendezvous: Rendezvous, layout: Layout, first: torch.dtype | None, seconds: float
    ) -> None:
        self._layout, self._first = layout, first
        self._sender = Sender(list(rendezvous.addresses), rendezvous.secret, seconds)

    def send(self, tensors: Iterable[Named], publish: Callable[[], ReloadResult]) -> ReloadResult:
        answer = in_background(publish, "tito-publish")
        try:
            for start, end, slots in pieces(self._layout, tensors, self._first):
                piece = torch.zeros(end - start, dtype=torch.uint8)
                copy_into(piece, start, slots)
                self._sender.send(piece.numpy().data)
        except LinkError:
            answer.result()  # the server knows better what went wrong
            raise
        except BaseException:
            self.close()
            raise
        return answer.result()

    def close(self) -> None:
        self._sender.close()


class Broadcast:
    """Broadcasts from this GPU, piece by piece, on a stream of its own."""

    def __init__(
        self, channel: Channel, layout: Layout, first: torch.dtype | None, device: torch.device
    ) -> None:
        assert channel.rendezvous is not None
        self._layout, self._first, self._seconds = layout, first, channel.seconds
        self._device = device
        size = min(layout.nbytes, layout.pieces()[0][1])
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current for this thread
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._buffers = [
                torch.zeros(size, dtype=torch.uint8, device=device)
                for _ in range(min(_PIECES_IN_FLIGHT, len(layout.pieces())))
            ]
            unique_id = bytes.fromhex(channel.rendezvous.unique_id)
            self._comm = nccl.Communicator(unique_id, 0, channel.rendezvous.size)
            try:
                self._comm.settle(lambda: True, time.monotonic() + channel.seconds)
            except nccl.NcclError:
                self._comm.abort()
                raise

    def send(self, tensors: Iterable[Named], publish: Callable[[], ReloadResult]) -> ReloadResult:
        answer = in_background(publish, "tito-publish")
        try:
            with torch.cuda.device(self._device):
                self._send(tensors, answer)
        except nccl.NcclError:
            self.close()
            if answer.done():
                answer.result()  # the server knows better what went wrong
            raise
        except BaseException:
            self.close()
            raise
        return answer.result()

    def _send(self, tensors: Iterable[Named], answer: Future[ReloadResult]) -> None:
        deadline = time.monotonic() + self._seconds
        copying, sending = torch.cuda.current_stream(), self._stream
        free: list[Any] = [None] * len(self._buffers)
        for index, piece in enumerate(pieces(self._layout, tensors, self._first)):
            start, end, slots = piece
            which = index % len(self._buffers)
            if free[which] is not None:
                copying.wait_event(free[which])
            copy_into(self._buffers[which], start, slots)
            sending.wait_stream(copying)
            pointer = self._buffers[which].data_ptr()
            self._comm.broadcast(pointer, end - start, sending.cuda_stream)
            self._comm.settle(lambda: True, deadline, lambda: _refusal(answer))
            free[which] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            free[which].record(sending)
        self._comm.settle(sending.query, deadline, lambda: _refusal(answer))

    def close(self) -> None:
        self._comm.abort()


def _refusal(answer: Future[ReloadResult]) -> str | None:
    """Why the server takes nothing any more, if that is so."""
    if answer.done() and (error := answer.exception()) is not None:
        return str(error)
    return None


def _mapped(device: str, handle: str, nbytes: int) -> Tensor:
    """A worker's buffer as a tensor of this process.

    Raises:
        CudaError, OSError: it cannot be reached from here.
    """
    if device:
        place = _visible(device)
        with torch.cuda.device(place):
            torch.cuda.synchronize()  # makes the device's context current for this thread
            memory = DeviceMemory.opened(bytes.fromhex(handle), nbytes)
            return torch.as_tensor(memory, device=place)
    if not os.readlink(handle).startswith(f"/memfd:{SHARED_NAME} "):
        raise OSError(f"the server names a file that is no channel's: {handle[:80]!r}")
    descriptor = os.open(handle, os.O_RDWR)
    try:
        there = mmap.MAP_SHARED | mmap.MAP_POPULATE  # twice as fast to write to from the start
        content = mmap.mmap(descriptor, nbytes, flags=there)
    finally:
        os.close(descriptor)
    return torch.frombuffer(content, dtype=torch.uint8)


def _visible(uuid: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise CudaError(f"this process does not see the server's GPU {uuid}")

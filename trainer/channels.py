"""Weights from this process's memory straight into the server's, without HTTP.

``ipc`` maps the server's buffers into this process and copies into them. ``nccl`` broadcasts to
them piece by piece, so that no second model is needed here. Either way the tensors are cast on the
way to what the server serves, and the server verifies, loads and labels them as it does an upload.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from shared import nccl
from shared.byte_link import LinkError, Sender
from shared.channel import Channel, Kind, Layout, Rendezvous
from shared.client import RolloutClient
from shared.cuda import CudaError, DeviceMemory
from shared.errors import Conflict, NotFound, ServerUnreachable, TitoError, WeightsRejected
from shared.protocol import ReloadResult
from shared.weights import TensorSpec
from trainer.background import in_background

Named = tuple[str, Callable[[], Tensor]]
"""A tensor's name, and what gives it when it is about to be sent."""

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_BATCH_BYTES = 1 << 30
_PIECES_IN_FLIGHT = 2
_SHARED_FILE = re.compile(r"/dev/shm/tito-channel-\w+")
_BROKEN = (CudaError, LinkError, nccl.NcclError, OSError)


class ChannelError(ServerUnreachable):
    """The way into the server's memory cannot be opened, or has broken."""


class _Way(Protocol):
    """How bytes get from here to the workers."""

    def send(self, tensors: Iterable[Named], publish: Callable[[], ReloadResult]) -> ReloadResult:
        """Bring the tensors over, in the layout's order, and publish them."""
        ...

    def close(self) -> None: ...


class ChannelSender:
    """A channel to one server, opened again when it has ended.

    Args:
        client: of the server.
        kind: ``ipc`` or ``nccl``.
        specs: the whole checkpoint, in the dtype that the server serves.
        first: dtype to which floating-point tensors are cast before that; None casts once.
        device: where the tensors are.
    """

    def __init__(
        self,
        client: RolloutClient,
        kind: Kind,
        specs: Sequence[TensorSpec],
        *,
        first: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._client, self._kind, self._specs = client, kind, specs
        self._first, self._device = first, device
        self._layout = Layout.of(specs)
        self._channel: Channel | None = None
        self._way: _Way | None = None
        self._fence: int | None = None

    @property
    def id(self) -> str:
        """Name of the channel; empty while there is none."""
        return "" if self._channel is None else self._channel.id

    def open(self, fence: int | None) -> None:
        """Open the channel, unless there is one under this lease.

        Raises:
            ChannelError: there is no such way from here to there.
            TitoError: the server refuses.
        """
        if self._channel is not None and self._fence == fence:
            return
        self.close()
        channel = self._client.open_channel(self._kind, self._specs, fence=fence)
        self._channel, self._fence = channel, fence
        try:
            self._way = self._way_through(channel)
        except _BROKEN as error:
            self.close()
            raise ChannelError(f"{self._kind}: {error}") from error

    def _way_through(self, channel: Channel) -> _Way:
        if channel.kind == "ipc":
            return _Mapped(channel, self._layout, self._first, self._device)
        assert channel.rendezvous is not None
        if channel.rendezvous.unique_id:
            if self._device.type != "cuda":
                raise LinkError("the server is on a GPU, and this process is not")
            return _Broadcast(channel, self._layout, self._first, self._device)
        return _Streamed(channel.rendezvous, self._layout, self._first, channel.seconds)

    def publish(self, tensors: Sequence[Named], fence: int | None, **target: Any) -> ReloadResult:
        """Make the server sample from these tensors.

        Args:
            tensors: in the order of the specs.
            fence: number of the lease.
            target: as for :meth:`shared.client.RolloutClient.reload`.

        Raises:
            ChannelError: the way there broke, twice.
            WeightsRejected, Conflict: the server refused, and serves what it served before.
        """
        try:
            return self._publish(tensors, fence, target)
        except ChannelError:
            # The server, or its engine, may have been restarted, or a transfer have broken off.
            return self._publish(tensors, fence, target)

    def _publish(
        self, tensors: Sequence[Named], fence: int | None, target: dict[str, Any]
    ) -> ReloadResult:
        self.open(fence)
        assert self._channel is not None
        assert self._way is not None
        id, seconds = self._channel.id, self._channel.seconds
        try:
            self._await(id, seconds)
            return self._way.send(
                tensors,
                lambda: self._client.reload_channel(id, fence=fence, **target),
            )
        except _BROKEN as error:
            self.close()
            raise ChannelError(f"{self._kind}: {error}") from error
        except (WeightsRejected, Conflict):
            raise  # the channel is as good as before
        except BaseException:
            self.close()  # also lets the server's workers go, if they wait for the rest
            raise

    def _await(self, id: str, seconds: float) -> None:
        """Wait until the server has copied what was sent last, and let the workers join."""
        deadline = time.monotonic() + 2 * seconds
        try:
            while (state := self._client.await_channel(id, seconds)) != "open":
                if time.monotonic() > deadline:
                    raise LinkError(f"the channel is still {state} after {2 * seconds:g} s")
        except (Conflict, NotFound) as error:
            self.close()
            raise ChannelError(error.message) from error

    def close(self) -> None:
        """Give the memory back, on both sides."""
        way, self._way = self._way, None
        channel, self._channel = self._channel, None
        if way is not None:
            way.close()
        if channel is not None:
            with contextlib.suppress(TitoError):  # it ends with the lease at the latest
                self._client.close_channel(channel.id)


class _Mapped:
    """Copies into the workers' own buffers."""

    def __init__(
        self, channel: Channel, layout: Layout, first: torch.dtype | None, device: torch.device
    ) -> None:
        self._layout, self._first, self._device = layout, first, device
        self._buffers = [_mapped(end.device, end.handle, channel.nbytes) for end in channel.memory]

    def send(self, tensors: Iterable[Named], publish: Callable[[], ReloadResult]) -> ReloadResult:
        for slots in _batches(self._layout, tensors, self._first):
            for buffer in self._buffers:
                _copy(buffer, 0, slots)
        for device in {self._device, *(buffer.device for buffer in self._buffers)}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return publish()

    def close(self) -> None:
        self._buffers = []


class _Slot:
    """A tensor, flat, and where it belongs: bytes from ``start`` on of the whole buffer."""

    def __init__(self, source: Tensor, dtype: torch.dtype, start: int) -> None:
        self.source, self.dtype, self.start = source, dtype, start
        self.end = start + source.numel() * dtype.itemsize

    def part(self, start: int, end: int) -> _Slot:
        """What of it lies between two bytes of the buffer."""
        low, high = max(start, self.start), min(end, self.end)
        size = self.dtype.itemsize
        elements = self.source[(low - self.start) // size : (high - self.start) // size]
        return _Slot(elements, self.dtype, low)


def _copy(buffer: Tensor, origin: int, slots: Sequence[_Slot]) -> None:
    """Copy tensors into a buffer that begins at byte ``origin``, casting, in few launches."""
    targets = [buffer[slot.start - origin : slot.end - origin].view(slot.dtype) for slot in slots]
    torch._foreach_copy_(targets, [slot.source for slot in slots])


@torch.no_grad()
def _slots(layout: Layout, tensors: Iterable[Named], first: torch.dtype | None) -> Iterator[_Slot]:
    """Every tensor that has elements, in order.

    Raises:
        ValueError: a tensor is not that of the layout.
    """
    places = zip(layout.specs, layout.offsets, tensors, strict=True)
    for spec, start, (name, load) in places:
        tensor = load().detach()
        if name != spec.name or tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{spec} was announced, and {name} {list(tensor.shape)} came")
        if first is not None and tensor.is_floating_point():
            tensor = tensor.to(first)
        if tensor.numel():
            yield _Slot(tensor.reshape(-1), DTYPES[spec.dtype], start)


@torch.no_grad()
def _batches(
    layout: Layout, tensors: Iterable[Named], first: torch.dtype | None
) -> Iterator[list[_Slot]]:
    """Tensors in batches, so that those that are made for this are soon forgotten."""
    batch: list[_Slot] = []
    for slot in _slots(layout, tensors, first):
        batch.append(slot)
        if slot.end - batch[0].start >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


@torch.no_grad()
def _pieces(
    layout: Layout, tensors: Iterable[Named], first: torch.dtype | None
) -> Iterator[tuple[int, int, list[_Slot]]]:
    """What lies in each piece of a broadcast: its first byte, its last, and its tensors' parts."""
    slots = _slots(layout, tensors, first)
    held: list[_Slot] = []
    for start, end in layout.pieces():
        while (not held or held[-1].end < end) and (slot := next(slots, None)) is not None:
            held.append(slot)
        yield start, end, [slot.part(start, end) for slot in held if slot.start < end]
        held = [slot for slot in held if slot.end > end]


class _Streamed:
    """Sends through sockets, where there is no GPU."""

    def __init__(
        self, rendezvous: Rendezvous, layout: Layout, first: torch.dtype | None, seconds: float
    ) -> None:
        self._layout, self._first = layout, first
        self._sender = Sender(list(rendezvous.addresses), rendezvous.secret, seconds)

    def send(self, tensors: Iterable[Named], publish: Callable[[], ReloadResult]) -> ReloadResult:
        answer = in_background(publish, "tito-publish")
        try:
            for start, end, slots in _pieces(self._layout, tensors, self._first):
                piece = torch.zeros(end - start, dtype=torch.uint8)
                _copy(piece, start, slots)
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


class _Broadcast:
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
        pieces = _pieces(self._layout, tensors, self._first)
        for index, (start, end, slots) in enumerate(pieces):
            which = index % len(self._buffers)
            if free[which] is not None:
                copying.wait_event(free[which])
            _copy(self._buffers[which], start, slots)
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
    if not _SHARED_FILE.fullmatch(handle):
        raise OSError(f"the server names a file that is no channel's: {handle[:80]!r}")
    descriptor = os.open(handle, os.O_RDWR | os.O_NOFOLLOW)
    try:
        content = mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(content, dtype=torch.uint8)


def _visible(uuid: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise CudaError(f"this process does not see the server's GPU {uuid}")

"""Which tensors, or parts of them, lie where in a channel's buffer, and copying them there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shared.channel import Layout
from trainer.publish import SAFETENSORS_NAMES

Named = tuple[str, Callable[[], Tensor]]
"""A tensor's name, and what gives it when it is about to be sent."""

DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_BATCH_BYTES = 1 << 30


class Slot:
    """A tensor, flat, and where it belongs: bytes from ``start`` on of the whole buffer."""

    def __init__(self, source: Tensor, dtype: torch.dtype, start: int) -> None:
        self.source, self.dtype, self.start = source, dtype, start
        self.end = start + source.numel() * dtype.itemsize

    def part(self, start: int, end: int) -> Slot:
        """What of it lies between two bytes of the buffer."""
        low, high = max(start, self.start), min(end, self.end)
        size = self.dtype.itemsize
        elements = self.source[(low - self.start) // size : (high - self.start) // size]
        return Slot(elements, self.dtype, low)


def copy_into(buffer: Tensor, origin: int, slots: Sequence[Slot]) -> None:
    """Copy tensors into a buffer that begins at byte ``origin``, casting, in few launches."""
    places = [buffer[slot.start - origin : slot.end - origin].view(slot.dtype) for slot in slots]
    torch._foreach_copy_(places, [slot.source for slot in slots])


def _slots(layout: Layout, tensors: Iterable[Named], first: torch.dtype | None) -> Iterator[Slot]:
    """Every tensor that has elements, in order.

    Raises:
        ValueError: a tensor is not that of the layout.
    """
    places = zip(layout.specs, layout.offsets, tensors, strict=True)
    for spec, start, (name, load) in places:
        tensor = load()
        if name != spec.name or tensor.shape != spec.shape:
            raise ValueError(f"{spec} was announced, and {name} {list(tensor.shape)} came")
        if first is not None and tensor.is_floating_point():
            tensor = tensor.to(first)
        if spec.nbytes:
            yield Slot(tensor.reshape(-1), DTYPES[spec.dtype], start)


def targets(buffer: Tensor, layout: Layout) -> dict[int, Tensor]:
    """Where each tensor belongs in a buffer that holds all of them, flat, by its first byte."""
    places = zip(layout.specs, layout.offsets, strict=True)
    return {
        start: buffer[start : start + spec.nbytes].view(DTYPES[spec.dtype])
        for spec, start in places
        if spec.nbytes
    }


@torch.no_grad()
def batches(
    layout: Layout, tensors: Iterable[Named], first: torch.dtype | None
) -> Iterator[list[Slot]]:
    """Tensors in batches, so that those that are made for this are soon forgotten."""
    batch: list[Slot] = []
    for slot in _slots(layout, tensors, first):
        batch.append(slot)
        if slot.end - batch[0].start >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


@torch.no_grad()
def pieces(
    layout: Layout, tensors: Iterable[Named], first: torch.dtype | None
) -> Iterator[tuple[int, int, list[Slot]]]:
    """What lies in each piece of a broadcast: its first byte, its last, and its tensors' parts."""
    slots = _slots(layout, tensors, first)
    held: list[Slot] = []
    for start, end in layout.pieces():
        while (not held or held[-1].end < end) and (slot := next(slots, None)) is not None:
            held.append(slot)
        yield start, end, [slot.part(start, end) for slot in held if slot.start < end]
        held = [slot for slot in held if slot.end > end]

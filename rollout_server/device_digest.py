"""Digests of a channel's tensors where they lie, and a look for values that are not finite.

Weights that come from another process of the same GPU never pass through the host's memory, and
their digests must not make them. All that is asked for is known when a channel opens, so a look is
a few launches over tables that are there already, and one short copy to the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_server import digest_kernels, digest_plan, xxh3
from rollout_server.digest_plan import Step
from rollout_server.tensor_check import TensorLook
from rollout_server.verification import Verdict
from shared.channel import Layout
from shared.cuda import DeviceMemory

_UNROLL = 64
_ALIGNMENT = 16
_SUM_BYTES = 8 * xxh3.LANES
_ROW_BYTES = 8 * digest_kernels.ROW_WORDS


@dataclass(frozen=True, slots=True)
class _Launch:
    """A step whose tables are on the device."""

    end: int
    lane: _Lane
    sums: Tensor
    scans: Tensor


@dataclass(frozen=True, slots=True)
class _Lane:
    """Where steps go on one after the other: a stream, and memory for their sums.

    On the CPU, where kernels are interpreted, there is no stream.
    """

    stream: Any
    scratch: Tensor

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def after(self, stream: Any) -> None:
        """Let what is done from here on wait for another stream."""
        if self.stream is not None:
            self.stream.wait_stream(stream)


class DeviceVerification:
    """In a GPU's memory. What is current when a method is called is what the buffer waits for.

    Args:
        flat: the buffer; it must outlive this, which keeps its address only.
        layout: of it.
        ends: the buffer is filled up to each of them in turn; nothing if it is filled before
            anybody looks at it.

    Raises:
        ValueError: the buffer does not begin at a multiple of 16 bytes.
    """

    def __init__(self, flat: Tensor, layout: Layout, ends: Sequence[int] = ()) -> None:
        if flat.data_ptr() % _ALIGNMENT:
            raise ValueError(f"the buffer begins at {flat.data_ptr()}; allowed: multiples of 16")
        self._layout, self._device = layout, flat.device
        address = flat.data_ptr()
        steps = (
            digest_plan.in_pieces(layout, address, ends)
            if ends
            else digest_plan.at_once(layout, address)
        )
        self._tensors = self._table(digest_plan.tensor_table(layout, address))
        self._secrets = self._table(xxh3.secrets())
        self._lanes = [self._lane(steps, lane) for lane in range(1 + _last_lane(steps))]
        self._launches = [self._launch(step) for step in steps]
        count = len(layout.specs)
        self._short = [i for i, s in enumerate(layout.specs) if s.nbytes <= xxh3.LONGER_THAN]
        self._states = self._empty(count * _SUM_BYTES).view(torch.uint64)
        self._found = self._empty(count * (_ROW_BYTES + 4))
        self._results = self._found[: count * _ROW_BYTES].view(torch.uint64)
        self._flags = self._found[count * _ROW_BYTES :].view(torch.int32)
        on_gpu = self._device.type == "cuda"
        self._on_host = torch.empty_like(self._found, device="cpu", pin_memory=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._next = 0

    def _lane(self, steps: Sequence[Step], lane: int) -> _Lane:
        rows = max((step.blocks for step in steps if step.lane == lane), default=0)
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        return _Lane(stream, self._empty(max(rows, 1) * _SUM_BYTES).view(torch.uint64))

    def _empty(self, nbytes: int) -> Tensor:
        """Memory apart from the engine's pools, which would keep it when the channel has gone."""
        if self._device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8)
        return torch.as_tensor(DeviceMemory.allocate(nbytes), device=self._device)

    def _table(self, rows: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _launch(self, step: Step) -> _Launch:
        lane = self._lanes[step.lane]
        return _Launch(step.end, lane, self._table(step.sums), self._table(step.scans))

    def begin(self) -> None:
        main = self._joined()  # a look that broke off may have left some work
        self._next = 0
        with main.active():
            self._flags.zero_()
        for lane in self._lanes[1:]:
            lane.after(main.stream)

    def _joined(self) -> _Lane:
        """The first lane, where what is done from here on waits for all others."""
        main, *others = self._lanes
        for lane in others:
            main.after(lane.stream)
        return main

    def arrived(self, end: int) -> None:
        while self._next < len(self._launches) and self._launches[self._next].end <= end:
            launch = self._launches[self._next]
            if launch.lane.stream is not None:
                launch.lane.after(torch.cuda.current_stream(self._device))
            with launch.lane.active():
                self._run(launch)
            self._next += 1

    def _run(self, launch: _Launch) -> None:
        scratch = launch.lane.scratch
        if len(launch.sums):
            digest_kernels.block_sums[(len(launch.sums),)](
                launch.sums, self._tensors, self._secrets, scratch, self._flags,
                BLOCKS=digest_plan.BLOCKS_PER_PROGRAM,
            )  # fmt: skip
        if len(launch.scans):
            digest_kernels.scan_blocks[(len(launch.scans),)](
                launch.scans, self._tensors, self._secrets, scratch, self._states, self._flags,
                self._results, UNROLL=_UNROLL, num_warps=1,
            )  # fmt: skip

    def finished(self) -> Verdict:
        if self._next < len(self._launches):
            raise ValueError("not all of the buffer is there")
        main = self._joined()
        with main.active():
            self._on_host.copy_(self._found, non_blocking=True)
            if self._done is not None:
                self._done.record()
        if self._done is not None:
            self._done.synchronize()
        return self._verdict()

    def _verdict(self) -> Verdict:
        count = len(self._layout.specs)
        rows = self._on_host[: count * _ROW_BYTES].numpy().reshape(count, _ROW_BYTES)
        flags = self._on_host[count * _ROW_BYTES :].numpy().view(np.int32)
        # The high half first, and its highest byte.
        text = rows[:, 15::-1].tobytes().hex()
        hashes = [text[start : start + 32] for start in range(0, len(text), 32)]
        broken = set(np.flatnonzero(flags).tolist())
        for index in self._short:
            spec = self._layout.specs[index]
            look = TensorLook(spec, spec.dtype)
            look.update(rows[index, : spec.nbytes].tobytes())
            seen = look.result()
            hashes[index] = seen.hash
            if seen.problem is not None:
                broken.add(index)
        return Verdict(hashes, [self._layout.specs[index].name for index in sorted(broken)])

    def close(self) -> None:
        if self._done is not None:
            for lane in self._lanes:
                lane.stream.synchronize()


def _last_lane(steps: Sequence[Step]) -> int:
    return max((step.lane for step in steps), default=0)

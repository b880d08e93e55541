"""Digests of a channel's tensors where they lie, and a look for values that are not finite.

Weights that come from another process of the same GPU never pass through the host's memory, and
their digests must not make them. All that is asked for is known when a channel opens, so a look is
a launch over tables that are there already, and one short copy to the host.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_server import digest_kernels, xxh3
from rollout_server.digest_pieces import DIGEST_BYTES, Numbers, Pieces, finite_words
from rollout_server.tensor_check import check_piece
from rollout_server.verification import Verdict
from shared.channel import Layout
from shared.cuda import DeviceMemory

_BLOCKS_AT_ONCE = 4
_ALIGNMENT = 16
_SHORT_BYTES = 8 * digest_kernels.SHORT_WORDS


class DeviceVerification:
    """In a GPU's memory. What is current when a method is called is what the buffer waits for.

    Args:
        flat: the buffer; it must outlive this, which keeps its address only.
        layout: of it.

    Raises:
        ValueError: the buffer does not begin at a multiple of 16 bytes.
    """

    def __init__(self, flat: Tensor, layout: Layout) -> None:
        if flat.data_ptr() % _ALIGNMENT:
            raise ValueError(f"the buffer begins at {flat.data_ptr()}; allowed: multiples of 16")
        self._layout, self._device = layout, flat.device
        self._pieces = Pieces.of(layout)
        lengths = self._pieces.ends - self._pieces.starts
        self._short = np.flatnonzero(lengths <= xxh3.LONGER_THAN)
        self._work = self._on_device(self._table(flat.data_ptr(), lengths))
        self._secrets = self._on_device(xxh3.secrets())
        # Digests of all pieces, the bytes of those too short for the kernel, and a flag for each
        # tensor: what comes to the host, together.
        self._digest_bytes = DIGEST_BYTES * len(lengths)
        self._result_bytes = self._digest_bytes + _SHORT_BYTES * len(self._short)
        self._found = self._empty(self._result_bytes + 4 * len(layout.specs))
        self._results = self._found[: self._result_bytes].view(torch.uint64)
        self._flags = self._found[self._result_bytes :].view(torch.int32)
        on_gpu = self._device.type == "cuda"
        self._on_host = torch.empty_like(self._found, device="cpu", pin_memory=on_gpu)
        # On the CPU, where kernels are interpreted, there is no stream.
        self._stream: Any = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._next = 0

    def _table(self, address: int, lengths: Numbers) -> Numbers:
        """``[pieces, 8]``, as the kernel reads it; any slice of rows is aligned as the whole is."""
        words = 2 * np.arange(len(lengths))
        shorts = np.arange(len(self._short))
        words[self._short] = 2 * len(lengths) + digest_kernels.SHORT_WORDS * shorts
        told = np.array([finite_words(spec.dtype) for spec in self._layout.specs], np.int64)
        tensors = self._pieces.tensors
        table = np.zeros((len(lengths), digest_kernels.COLUMNS), np.int64)
        table[:, :4] = np.stack([address + self._pieces.starts, lengths, words, tensors], 1)
        table[:, 4:7] = told.reshape(-1, 3)[tensors]
        return table

    def _empty(self, nbytes: int) -> Tensor:
        """Memory apart from the engine's pools, which would keep it when the channel has gone."""
        if self._device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8)
        return torch.as_tensor(DeviceMemory.allocate(nbytes), device=self._device)

    def _on_device(self, table: NDArray[Any]) -> Tensor:
        return torch.from_numpy(table).to(self._device)

    def _active(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin(self) -> None:
        self._next = 0
        with self._active():  # behind what a look that broke off may have left
            self._flags.zero_()

    def arrived(self, end: int) -> None:
        first, self._next = self._next, self._pieces.complete(end)
        if first == self._next:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._active():
            digest_kernels.digest_pieces[(self._next - first,)](
                self._work[first:], self._secrets, self._results, self._flags,
                AT_ONCE=_BLOCKS_AT_ONCE, num_warps=1,
            )  # fmt: skip

    def finished(self) -> Verdict:
        if self._next < len(self._work):
            raise ValueError("not all of the buffer is there")
        with self._active():
            self._on_host.copy_(self._found, non_blocking=True)
        self.close()
        return self._verdict()

    def _verdict(self) -> Verdict:
        found = self._on_host.numpy()
        # The highest byte first.
        digests = found[: self._digest_bytes].view(np.uint64).byteswap()
        rows = digests.view(np.uint8).reshape(-1, DIGEST_BYTES)
        shorts = found[self._digest_bytes : self._result_bytes].reshape(-1, _SHORT_BYTES)
        broken = set(np.flatnonzero(found[self._result_bytes :].view(np.int32)).tolist())
        for row, content in zip(self._short, shorts, strict=True):
            tensor, start, end = self._pieces.row(row)
            dtype = self._layout.specs[tensor].dtype
            digest, is_finite = check_piece(content[: end - start].data, dtype)
            rows[row] = np.frombuffer(digest, np.uint8)
            if not is_finite:
                broken.add(tensor)
        return Verdict.of(self._layout, self._pieces, digests.tobytes(), broken)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

"""Inside a worker: an upload, copied from its files into device memory while generation goes on.

A load from the host's memory would keep generation waiting for the copy; what lies on the device
already is loaded in milliseconds. There is a copy only where there is room: an engine that runs out
of memory would be a worse thing than a pause.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_server.worker_buffer import NoRoom, WorkerBuffer
from shared.channel import Layout
from shared.weights import (
    PREFIX_BYTES,
    TensorRange,
    checkpoint_digest,
    header_length,
    parse_header,
)

_THREADS = min(4, os.cpu_count() or 1)
_PIECE_BYTES = 8 << 20
_LEAST_MARGIN_BYTES = 1 << 30
_MARGIN_SHARE = 50


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a file, and where they belong in the buffer."""

    file: int
    source: int
    target: int
    nbytes: int


def spare_bytes(device: torch.device) -> int:
    """Memory of a device that nobody has taken; on a CPU nobody counts."""
    if device.type != "cuda":
        return sys.maxsize
    free, total = torch.cuda.mem_get_info(device)
    return free - max(_LEAST_MARGIN_BYTES, total // _MARGIN_SHARE)


class WorkerUpload(WorkerBuffer):
    """The copy that one worker makes of an upload.

    Args:
        address: the socket where it takes commands.
        device: where the copy goes.
        reserved: bytes that the engine may yet ask of the device.
        ready: called with the tensors once they are there.
        ended: called when it has ended.
    """

    def __init__(
        self,
        address: Path,
        device: torch.device,
        reserved: int,
        ready: Callable[[Mapping[str, Tensor]], None],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(address, device, ended)
        self._reserved, self._ready = reserved, ready

    def _do_read(self, paths: Sequence[str]) -> str:
        """Copy the tensors of safetensors files to the device; their digest, as they lie there.

        Raises:
            NoRoom: the device has too little memory to spare.
            OSError: a file cannot be read.
        """
        with contextlib.ExitStack() as files:
            opened = [files.enter_context(Path(path).open("rb")).fileno() for path in paths]
            found = [(file, item) for file in opened for item in _ranges(file)]
            layout = Layout.of(item.spec for _, item in found)
            self._check_room(layout.nbytes)
            self._hold(layout)
            places = zip(found, layout.offsets, strict=True)
            parts = [p for (file, item), start in places for p in _parts(file, item, start)]
            self._copy(parts)
        assert self.tensors is not None
        self._ready(self.tensors)
        return checkpoint_digest(zip(layout.specs, self._looked().hashes, strict=True))

    def _check_room(self, nbytes: int) -> None:
        spare = spare_bytes(self._device) - self._reserved
        if nbytes > spare:
            raise NoRoom(f"a copy on the device takes {nbytes} bytes; it can spare {spare}")

    def _copy(self, parts: Sequence[_Part]) -> None:
        left = iter(parts)  # each is taken by one of the threads
        with ThreadPoolExecutor(_THREADS, "tito-upload") as threads:
            for copied in [threads.submit(self._copy_some, left) for _ in range(_THREADS)]:
                copied.result()

    def _copy_some(self, parts: Iterator[_Part]) -> None:
        on_gpu = self._device.type == "cuda"
        with self._beside_the_engine():
            # Several times faster to copy from than memory that the system may move.
            bounce = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
            for part in parts:
                piece = bounce[: part.nbytes]
                _read_into(piece.numpy().data, part)
                target = self.flat[part.target : part.target + part.nbytes]
                target.copy_(piece, non_blocking=True)
                if on_gpu:
                    torch.cuda.current_stream(self._device).synchronize()

    def _do_release(self) -> None:
        """Free the memory now: what comes next may need it."""
        self._let_go()


def _ranges(file: int) -> list[TensorRange]:
    size = header_length(os.pread(file, PREFIX_BYTES, 0))
    return parse_header(os.pread(file, size, PREFIX_BYTES))


def _parts(file: int, item: TensorRange, start: int) -> Iterator[_Part]:
    for low in range(item.start, item.end, _PIECE_BYTES):
        nbytes = min(_PIECE_BYTES, item.end - low)
        yield _Part(file, low, start + low - item.start, nbytes)


def _read_into(piece: Any, part: _Part) -> None:
    done = 0
    while done < part.nbytes:
        count = os.preadv(part.file, [piece[done:]], part.source + done)
        if not count:
            raise OSError("a checkpoint's file ends early")
        done += count

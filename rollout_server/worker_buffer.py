"""Inside a worker: a flat buffer of tensors, and the thread that fills it.

The thread fills the buffer and looks at what is in it while the engine's loop goes on. The server
commands it by a socket, one JSON document a line. When the server closes the socket, or has gone,
whatever the thread waits for is given up and the memory is freed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_server.verification import HostVerification, Verdict, Verification
from rollout_server.weight_receiver import SAFETENSORS_NAMES
from shared import nccl
from shared.byte_link import LinkError
from shared.channel import SHARED_NAME, Layout
from shared.cuda import DeviceMemory

log = logging.getLogger("tito.staging")

_ACCEPT_S = 30.0
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a layout, in its flat buffer of bytes."""
    return {
        spec.name: flat[start : start + spec.nbytes].view(_DTYPES[spec.dtype]).view(spec.shape)
        for spec, start in zip(layout.specs, layout.offsets, strict=True)
    }


class NoRoom(RuntimeError):
    """The device has too little memory to spare."""


class WorkerBuffer(threading.Thread):
    """One buffer of one worker.

    Args:
        address: the socket where it takes commands.
        device: where the buffer is.
        ended: called when it has ended.

    Attributes:
        tensors: in the buffer; None before it is held, and when it has ended.
        layout: of the buffer, once it is held.
        flat: all of it, as bytes.
    """

    def __init__(self, address: Path, device: torch.device, ended: Callable[[], None]) -> None:
        super().__init__(name="tito-buffer", daemon=True)
        self._device = device
        self._ended = ended
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(1)
        self._listener.settimeout(_ACCEPT_S)
        self._server: socket.socket | None = None
        self._file: int | None = None
        self._memory: DeviceMemory | None = None
        self._verification: Verification | None = None
        self.layout = Layout.of([])
        self.flat = torch.empty(0)
        self.tensors: dict[str, Tensor] | None = None

    def _hold(self, layout: Layout) -> None:
        """Allocate a buffer of this layout, and prepare to look at it."""
        self.layout = layout
        self.flat = self._allocate()
        self._verification = self._looking()
        self.tensors = views(self.flat, layout)

    def _allocate(self) -> Tensor:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # makes its context current for this thread
            self._memory = DeviceMemory.allocate(self.layout.nbytes)
            return torch.as_tensor(self._memory, device=self._device)
        # It has no name that could outlive this process.
        self._file = os.memfd_create(SHARED_NAME)
        os.posix_fallocate(self._file, 0, self.layout.nbytes)
        there = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no publish has to wait for a page
        content = mmap.mmap(self._file, self.layout.nbytes, flags=there)
        return torch.frombuffer(content, dtype=torch.uint8)

    def _looking(self) -> Verification:
        if self._device.type != "cuda":
            return HostVerification(self.flat, self.layout)
        from rollout_server.device_digest import DeviceVerification

        return DeviceVerification(self.flat, self.layout)

    def run(self) -> None:
        try:
            self._server, _ = self._listener.accept()
            self._listener.close()
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                self._warm_up()
            with self._server, self._server.makefile("rb") as commands:
                for line in commands:
                    self._server.sendall(self._answered(json.loads(line)))
        except (OSError, ValueError) as error:
            log.warning("a buffer ends: %s", error)
        finally:
            self.end()

    def _answered(self, command: dict[str, Any]) -> bytes:
        do: Callable[..., Any] = getattr(self, f"_do_{command.pop('do')}")
        try:
            answer = {"ok": do(**command)}
        except Exception as error:  # whatever it is, the server shall know
            expected = isinstance(error, LinkError | nccl.NcclError | NoRoom)
            # As text: a log that kept the error itself would keep the memory, too.
            log.warning("a buffer's work failed: %s", f"{error}", exc_info=not expected)
            answer = {"error": f"{type(error).__name__}: {error}"}
        return json.dumps(answer).encode() + b"\n"

    def _warm_up(self) -> None:
        """Have ready what a publish launches, so that none waits for a compiler."""
        from rollout_server.load_plan import warm_up

        try:
            with self._beside_the_engine():
                warm_up(self._device)
                if self.tensors is not None:
                    self._looked()
        except Exception as error:  # it will be told to whoever asks for it
            log.warning("a buffer's kernels cannot be made ready: %s", error)

    def _looked(self) -> Verdict:
        """What is in the buffer now, all of which is there."""
        assert self._verification is not None
        with self._beside_the_engine():
            self._verification.begin()
            self._verification.arrived(self.layout.nbytes)
            return self._verification.finished()

    @contextlib.contextmanager
    def _beside_the_engine(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield

    def _let_go(self) -> None:
        """Free the memory."""
        if self._verification is not None:
            self._verification.close()
        if self._file is not None:
            os.close(self._file)
        # Views may still be in use by a load; the memory goes with the last of them.
        self._memory = self._verification = self._file = None
        self.tensors, self.flat = None, torch.empty(0)
        self._ended()

    def end(self) -> None:
        """Give everything back; to be called only if the thread was not started."""
        self._listener.close()
        self._let_go()

"""Inside a worker: a channel, which is a flat buffer that a trainer fills, and its thread.

The thread joins the trainer, receives, verifies and copies to a file while the engine's loop goes
on. The server commands it by a socket, one JSON document a line. When the server closes the socket,
or has gone, whatever the thread waits for is given up and the memory is freed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from rollout_server.receiving import Group, NcclGroup, SocketGroup
from rollout_server.staging import open_over, write_all
from rollout_server.verification import HostVerification, Verification
from rollout_server.weight_receiver import SAFETENSORS_NAMES
from shared import nccl
from shared.byte_link import LinkError, Receiver, readable
from shared.channel import SHARED_NAME, Layout
from shared.cuda import DeviceMemory
from shared.weights import TensorSpec, checkpoint_digest, encode_header

log = logging.getLogger("tito.staging")

_ACCEPT_S = 30.0
_HOST_PIECE_BYTES = 16 << 20
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a layout, in its flat buffer of bytes."""
    return {
        spec.name: flat[start : start + spec.nbytes].view(_DTYPES[spec.dtype]).view(spec.shape)
        for spec, start in zip(layout.specs, layout.offsets, strict=True)
    }


class WorkerChannel(threading.Thread):
    """One channel of one worker.

    Args:
        address: the socket where it takes commands.
        kind: ``ipc`` or ``nccl``.
        ended: called when it has ended.
        layout: of the buffer.
        device: where the buffer is.
        interface: on which it listens for the trainer, without GPUs.
        secret: that the trainer will know then.
    """

    def __init__(
        self,
        address: Path,
        kind: str,
        layout: Layout,
        device: torch.device,
        interface: str,
        secret: str,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(name="tito-channel", daemon=True)
        self._ended = ended
        self._kind, self.layout = kind, layout
        self._device = device
        self._secret, self._interface = secret, interface
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(1)
        self._listener.settimeout(_ACCEPT_S)
        self._server: socket.socket | None = None
        self._file: int | None = None
        self._receiver: Receiver | None = None
        self._group: Group | None = None
        self._memory: DeviceMemory | None = None
        self._pinned: Tensor | None = None
        self._verification: Verification | None = None
        self._is_seen = False
        try:
            self.flat = self._allocate()
            self._verification = self._looking()
        except BaseException:
            self.end()
            raise
        self.tensors: dict[str, Tensor] | None = views(self.flat, layout)

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

        # A trainer that maps the buffer fills it before the server hears of it.
        ends = [] if self._kind == "ipc" else [end for _, end in self.layout.pieces()]
        return DeviceVerification(self.flat, self.layout, ends)

    def described(self, *, leads: bool) -> dict[str, Any]:
        """What the trainer must know to reach the buffer.

        Args:
            leads: of all workers, this is the one that says how NCCL's group comes together.
        """
        if self._kind == "ipc" and self._memory is not None:
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            return {"memory": {"device": uuid, "handle": self._memory.handle().hex()}}
        if self._kind == "ipc":
            path = f"/proc/{os.getpid()}/fd/{self._file}"
            return {"memory": {"device": "", "handle": path}}
        if self._memory is not None:
            return {"unique_id": nccl.unique_id().hex()} if leads else {}
        self._receiver = Receiver(self._interface, self._secret)
        return {"port": self._receiver.port}

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
            log.warning("a channel ends: %s", error)
        finally:
            self.end()

    def _answered(self, command: dict[str, Any]) -> bytes:
        do: Callable[..., Any] = getattr(self, f"_do_{command.pop('do')}")
        try:
            answer = {"ok": do(**command)}
        except Exception as error:  # whatever it is, the server shall know
            expected = isinstance(error, LinkError | nccl.NcclError)
            # As text: a log that kept the error itself would keep the memory, too.
            log.warning("a channel's work failed: %s", f"{error}", exc_info=not expected)
            answer = {"error": f"{type(error).__name__}: {error}"}
        return json.dumps(answer).encode() + b"\n"

    def _do_join(self, rank: int, rendezvous: dict[str, Any], seconds: float) -> None:
        if self._receiver is not None:
            self._group = SocketGroup(self.flat, self._receiver, self._given_up)
        else:
            self._group = NcclGroup(self.flat, self.layout, rank, rendezvous, self._given_up)
        self._group.join(time.monotonic() + seconds)

    def _do_receive(self, seconds: float) -> None:
        assert self._group is not None
        assert self._verification is not None
        self._is_seen = False
        self._verification.begin()
        self._group.receive(time.monotonic() + seconds, self._verification.arrived)
        self._is_seen = True

    def _do_verify(self) -> dict[str, Any]:
        """What was seen while the buffer was filled, or is in it now."""
        assert self._verification is not None
        if not self._is_seen:
            with self._beside_the_engine():
                self._verification.begin()
                self._verification.arrived(self.layout.nbytes)
        self._is_seen = False
        return asdict(self._verification.finished())

    def _warm_up(self) -> None:
        """Have ready what a publish launches, so that none waits for a compiler."""
        from rollout_server.load_plan import warm_up

        try:
            with self._beside_the_engine():
                warm_up(self._device)
                self._do_verify()
        except Exception as error:  # it will be told to whoever asks for it
            log.warning("a channel's kernels cannot be made ready: %s", error)

    def _do_spill(self, path: str) -> str:
        """Write the tensors to a safetensors file; the digest of what was written."""
        hashes: list[tuple[TensorSpec, str]] = []
        with self._beside_the_engine(), open_over(Path(path)) as file:
            write_all(file.fileno(), [encode_header(self.layout.specs)])
            for spec, start in zip(self.layout.specs, self.layout.offsets, strict=True):
                seen = xxhash.xxh3_128()
                for piece in self._on_host(start, start + spec.nbytes):
                    write_all(file.fileno(), [piece])
                    seen.update(piece)
                hashes.append((spec, seen.hexdigest()))
            file.truncate(file.tell())
        return checkpoint_digest(hashes)

    def _on_host(self, start: int, end: int) -> Iterator[memoryview]:
        """Bytes of the buffer in pieces; each is good until the next is asked for."""
        on_gpu = self._device.type == "cuda"
        if on_gpu and self._pinned is None:
            # Several times faster to copy to than memory that the system may move.
            self._pinned = torch.empty(_HOST_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        for low in range(start, end, _HOST_PIECE_BYTES):
            piece = self.flat[low : min(low + _HOST_PIECE_BYTES, end)]
            if self._pinned is not None:
                piece = self._pinned[: len(piece)].copy_(piece)
            yield piece.numpy().data

    @contextlib.contextmanager
    def _beside_the_engine(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield

    def _given_up(self) -> str | None:
        """Why nothing is waited for any more: the server has closed the socket."""
        assert self._server is not None
        if not readable(self._server, 0):
            return None
        with contextlib.suppress(ConnectionError):
            if self._server.recv(1, socket.MSG_PEEK):
                return None
        return "the channel was closed"

    def end(self) -> None:
        """Give everything back; to be called only of a channel whose thread was not started."""
        self._listener.close()
        if self._group is not None:
            self._group.close()
        if self._verification is not None:
            self._verification.close()
        if self._receiver is not None:
            self._receiver.close()
        if self._file is not None:
            os.close(self._file)
        # Views may still be in use by a load; the memory goes with the last of them.
        self._group = self._memory = self._verification = None
        self.tensors, self.flat, self._pinned = None, torch.empty(0), None
        self._ended()

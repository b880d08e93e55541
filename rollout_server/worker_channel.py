"""Inside a worker: a channel, which is a flat buffer that a trainer fills.

Its thread joins the trainer, receives, verifies and copies to a file while the engine's loop goes
on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_server.receiving import Group, NcclGroup, SocketGroup
from rollout_server.staging import open_over, write_all
from rollout_server.worker_buffer import WorkerBuffer
from shared import nccl
from shared.byte_link import Receiver, readable
from shared.channel import Layout
from shared.tensor_hash import TensorHash
from shared.weights import TensorSpec, checkpoint_digest, encode_header

_HOST_PIECE_BYTES = 16 << 20


class WorkerChannel(WorkerBuffer):
    """One channel of one worker.

    Args:
        address: the socket where it takes commands.
        kind: ``ipc`` or ``nccl``.
        layout: of the buffer.
        device: where the buffer is.
        interface: on which it listens for the trainer, without GPUs.
        secret: that the trainer will know then.
        ready: called with the tensors when they may be loaded soon.
        ended: called when it has ended.
    """

    def __init__(
        self,
        address: Path,
        kind: str,
        layout: Layout,
        device: torch.device,
        interface: str,
        secret: str,
        ready: Callable[[Mapping[str, Tensor]], None],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(address, device, ended)
        self._kind, self._ready = kind, ready
        self._secret, self._interface = secret, interface
        self._receiver: Receiver | None = None
        self._group: Group | None = None
        self._pinned: Tensor | None = None
        self._is_seen = False
        try:
            self._hold(layout)
        except BaseException:
            self.end()
            raise

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
        """Digest of what is in the buffer, and names of tensors with values that are not finite."""
        assert self._verification is not None
        assert self.tensors is not None
        verdict = self._verification.finished() if self._is_seen else self._looked()
        self._is_seen = False
        self._ready(self.tensors)
        digest = checkpoint_digest(zip(self.layout.specs, verdict.hashes, strict=True))
        return {"digest": digest, "not_finite": verdict.not_finite}

    def _do_spill(self, path: str) -> str:
        """Write the tensors to a safetensors file; the digest of what was written."""
        hashes: list[tuple[TensorSpec, str]] = []
        with self._beside_the_engine(), open_over(Path(path)) as file:
            write_all(file.fileno(), [encode_header(self.layout.specs)])
            for spec, start in zip(self.layout.specs, self.layout.offsets, strict=True):
                seen = TensorHash()
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
        if self._group is not None:
            self._group.close()
        if self._receiver is not None:
            self._receiver.close()
        self._group = self._pinned = None
        super().end()

"""Processes that train one model together, as ``torchrun`` starts them.

    torchrun --nproc-per-node 2 -m trainer train CONFIG.toml

Rank 0 runs the loop as it does alone: it alone samples, scores, publishes and writes. The others
wait for its orders, see :mod:`trainer.follower`, and do their part of what takes all of them. So
nothing has to be decided twice, and what fails on rank 0 between two orders leaves nobody behind in
the middle of a collective operation.

Orders go over a group of their own on the host, in which waiting for hours costs nothing. The first
failure of any rank is noted in torchrun's store, where the others look for it: rank 0 tells it, and
all are gone soon after, also those that wait for one that will never come.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.codec import decode, encode
from shared.errors import TitoError
from shared.protocol import MSGPACK
from trainer.errors import TrainerError

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_ORDER_TIMEOUT = timedelta(days=7)
"""Between two orders lies a rollout. A rank that dies meanwhile is noticed at once all the same."""
_LOOK_S = 1.0
_GRACE_S = 5.0
"""For a rank that failed, or whose peer did, to end by itself."""
_FAILED, _TOLD = "failed", "told"
OTHER_FAILED = "another rank has failed"
OTHER_LOST = "another rank has ended without a word"
BEGIN, END = "begin", "end"


@dataclass(frozen=True)
class Order:
    """What rank 0 wants another rank to do.

    Attributes:
        name: of the work.
        details: plain data.
        tensors: by name, on the host.
    """

    name: str
    details: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Ranks:
    """This process's place among all; a single process is rank 0 of 1.

    Attributes:
        rank, size: its number, and how many there are.
        local_rank: its number on this machine, which is that of its GPU.
        turn: held by a thread while it has all ranks do something.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.turn = threading.RLock()
        self._store: Any = None
        self._orders: dist.ProcessGroup | None = None
        self._over = threading.Event()
        self._telling = False
        self._neighbours: list[int] = []

    def join(self, *, cuda: bool) -> None:
        """Meet the others.

        Args:
            cuda: whether tensors of GPUs are exchanged.
        """
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        if cuda:
            torch.cuda.set_device(self.local_rank)
        self._store, _, _ = next(rendezvous("env://", self.rank, self.size))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        self._orders = dist.new_group(backend="gloo", timeout=_ORDER_TIMEOUT)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(self.size):  # all on this machine
            own = torch.tensor([os.getpid()])
            pids = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(pids, own)
            self._neighbours = [int(pid) for pid in pids]
        threading.Thread(target=self._watch, name="tito-ranks", daemon=True).start()
        if self.rank == 0:
            signal.signal(signal.SIGTERM, self._terminate)

    def tell(self, orders: Sequence[Order]) -> None:
        """Give each other rank, from rank 1 on, its order."""
        for rank, order in enumerate(orders, start=1):
            layout = [[n, str(x.dtype)[6:], list(x.shape)] for n, x in order.tensors.items()]
            head = encode([order.name, dict(order.details), layout], MSGPACK)
            self._send(torch.tensor([len(head)]), rank)
            self._send(torch.frombuffer(bytearray(head), dtype=torch.uint8), rank)
            for tensor in order.tensors.values():
                self._send(tensor, rank)

    def tell_all(self, name: str, **details: Any) -> None:
        """Give all other ranks the same order."""
        self.tell([Order(name, details)] * (self.size - 1))

    def hear(self) -> Order:
        """Wait for the next order of rank 0."""
        (length,) = self._receive(torch.int64, [1]).tolist()
        head = bytes(self._receive(torch.uint8, [length]).numpy())
        name, details, layout = decode(head, MSGPACK)
        tensors = {n: self._receive(getattr(torch, dtype), shape) for n, dtype, shape in layout}
        return Order(name, details, tensors)

    def _send(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            data = tensor.contiguous().flatten().view(torch.uint8)
            dist.send(data, rank, group=self._orders)

    def _receive(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            # A view of the same memory, as bytes: not every type can be sent.
            dist.recv(tensor.flatten().view(torch.uint8), 0, group=self._orders)
        return tensor

    def most(self, count: int) -> int:
        """The largest of a number that each rank has one of."""
        return int(self.reduced(torch.tensor(count), dist.ReduceOp.MAX))

    def reduced(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum, or what ``operation`` says, of a tensor that each rank has one of."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, operation)
        return tensor

    def leave(self) -> None:
        """All work is done: the others may go too."""
        if self.rank == 0:
            self.tell_all(END)
        self._over.set()
        if self.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dist.destroy_process_group()

    def failed(self, error: BaseException) -> str:
        """Note an error for the others; what the first one of all ranks is, and of which."""
        kind = "" if isinstance(error, TitoError) else f"{type(error).__name__}: "
        advice = f" ({error.advice})" if isinstance(error, TrainerError) and error.advice else ""
        found = f"rank {self.rank}: {kind}{str(error).strip() or 'no reason given'}{advice}"
        try:
            return str(self._store.compare_set(_FAILED, "", found).decode())
        except RuntimeError:  # the store has gone with torchrun
            return found

    def told(self) -> None:
        """Rank 0 is about to tell of a failure, and must not be ended by torchrun before."""
        self._telling = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(RuntimeError):
            self._store.set(_TOLD, "")

    def hang_up(self) -> None:
        """Wake rank 0 from a collective operation, and wait until it tells of a failure.

        As soon as this process ends, torchrun ends all.
        """
        with suppress(RuntimeError):
            dist.destroy_process_group(self._orders)
            if dist.get_backend() == "gloo":
                dist.destroy_process_group()
            self._store.wait([_TOLD], timedelta(seconds=2 * _GRACE_S))

    def _terminate(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """What SIGTERM does on rank 0 before and after the loop.

        torchrun sends it as soon as any rank has ended, and this one has still to tell of that.
        """
        with suppress(RuntimeError):
            if self._trouble():
                return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _watch(self) -> None:
        """End this process when another has ended and this one does not notice.

        It may wait on its GPU for what will never come.
        """
        while not self._over.wait(_LOOK_S):
            try:
                reason = self._trouble()
            except RuntimeError:  # the store has gone with torchrun
                return
            if reason and not self._over.wait(_GRACE_S):
                if self.rank == 0 and not self._telling:
                    print(f"error: {reason}", file=sys.stderr, flush=True)
                    self._store.set(_TOLD, "")
                os._exit(1)

    def _trouble(self) -> str | None:
        """What has become of another rank, if anything has."""
        if self._store.check([_FAILED]):
            return f"{OTHER_FAILED}: {self._store.get(_FAILED).decode()}"
        try:
            for pid in self._neighbours:
                os.kill(pid, 0)
        except ProcessLookupError:
            return OTHER_LOST
        return None


ALONE = Ranks()

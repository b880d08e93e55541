"""A checkpoint in parts that are sent at the same time: one connection is slower than memory.

Each part is a run of tensors that follow each other in the file, so each tensor is loaded once, by
one thread, and a part that does not arrive is a part that can be sent again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared import calls
from shared.calls import Call, Target
from shared.errors import TitoError
from shared.protocol import DEFAULT_POLICY, ReloadResult, ServerInfo
from shared.tensor_hash import tensor_hash
from shared.weights import LazyTensor, TensorSpec, checkpoint_digest, encode_header, stream_tensors

_LEAST_BYTES = 32 << 20  # of a part: for less, another connection is not worth its while
_MOST = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that follow each other.

    Attributes:
        start: where in the file the first of them begins.
        tensors: at least one.
    """

    start: int
    tensors: Sequence[LazyTensor]

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)


class Parts:
    """A checkpoint that is cut into parts.

    Args:
        tensors: all of it, in the order of the file.
        info: of the server; says how many parts it takes at a time.

    Attributes:
        tensors: see above.
        parts: no more than the server takes, and this machine has processors for.
    """

    def __init__(self, tensors: Sequence[LazyTensor], info: ServerInfo) -> None:
        self.tensors = tensors
        self._hashes: dict[TensorSpec, str] = {}
        taken = int(info.limits.get("max_upload_parts", 1))
        self.parts = _cut(tensors, min(taken, os.cpu_count() or 1, _MOST))

    def sending(self, id: str) -> list[Call[None]]:
        """The requests that bring them, in any order.

        Args:
            id: of the upload.
        """
        return [
            calls.bring_part(
                id, part.start, part.nbytes, partial(stream_tensors, part.tensors, self._hashes)
            )
            for part in self.parts
        ]

    @property
    def digest(self) -> str:
        """Of the checkpoint, once all of it has been sent."""
        empty = {t.spec: tensor_hash(b"") for t in self.tensors if not t.spec.nbytes}
        return checkpoint_digest((self._hashes | empty).items())


def are_worth_it(tensors: Sequence[LazyTensor], to: Target) -> bool:
    """Whether a checkpoint is so large; adapters are not, and come in one piece."""
    nbytes = sum(tensor.spec.nbytes for tensor in tensors)
    return to.policy == DEFAULT_POLICY and nbytes > _LEAST_BYTES


def publish(call: Callable[[Call[Any]], Any], parts: Parts, to: Target) -> ReloadResult:
    """Publish a checkpoint.

    Args:
        call: sends a request; in several threads at once.

    Raises:
        TitoError: what the first part that failed, or the publish itself, has raised.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    id: str = call(calls.begin_parts(parts.tensors, to))
    with ThreadPoolExecutor(len(parts.parts), "tito-part") as threads:
        try:
            for sent in as_completed([threads.submit(call, p) for p in parts.sending(id)]):
                sent.result()
        except BaseException:
            with contextlib.suppress(TitoError):
                call(calls.give_up_parts(id))  # which ends the others
            raise
    result: ReloadResult = call(calls.end_parts(id, parts.digest))
    return result


async def publish_async(
    call: Callable[[Call[Any]], Awaitable[Any]], parts: Parts, to: Target
) -> ReloadResult:
    """The same; ``call`` may be running several times at once."""
    import asyncio

    id: str = await call(calls.begin_parts(parts.tensors, to))
    sending = [asyncio.ensure_future(call(part)) for part in parts.sending(id)]
    try:
        await asyncio.gather(*sending)
    except BaseException:
        for sent in sending:
            sent.cancel()
        with contextlib.suppress(TitoError):
            await call(calls.give_up_parts(id))
        await asyncio.wait(sending)
        raise
    result: ReloadResult = await call(calls.end_parts(id, parts.digest))
    return result


def _cut(tensors: Sequence[LazyTensor], most: int) -> list[Part]:
    """A part for each share of the file; a tensor is of that in which it begins."""
    head = len(encode_header(tensor.spec for tensor in tensors))
    ends = itertools.accumulate((tensor.spec.nbytes for tensor in tensors), initial=head)
    begun = [(start, t) for start, t in zip(ends, tensors, strict=False) if t.spec.nbytes]
    total = sum(tensor.spec.nbytes for _, tensor in begun)
    share = max(_LEAST_BYTES, -(-total // most))
    groups = itertools.groupby(begun, key=lambda item: (item[0] - head) // share)
    cut = [list(group) for _, group in groups]
    return [Part(group[0][0], [tensor for _, tensor in group]) for group in cut]

"""From the live checkpoint and a delta to the next checkpoint, on the server's disk.

Tensors that a delta does not name are copied from the live checkpoint as they are; the others are
copied, changed in memory and checked. All are hashed, so the result's digest vouches for the whole
file: for what was sent, for the base, and for both having met in the right order.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollout_server.checkpoints import Checkpoint, Manifest, canonical_tensors, reject_if
from rollout_server.staging import open_over
from rollout_server.tensor_check import count_not_finite, not_finite
from shared.delta import Frame, apply_frame, block_ranges
from shared.delta_reader import parse_delta
from shared.errors import MalformedBody, WeightsRejected
from shared.tensor_hash import TensorHash
from shared.weights import TensorSpec, checkpoint_digest, encode_header

_THREADS = min(8, os.cpu_count() or 1)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor of the new checkpoint.

    Attributes:
        spec: which.
        hash: of its bytes.
        broken: how many of its changed values are not finite.
    """

    spec: TensorSpec
    hash: str
    broken: int


def apply_delta(delta_path: Path, base: Checkpoint, manifest: Manifest, out: Path) -> str:
    """Write the checkpoint that results from a delta, in canonical form.

    Args:
        delta_path: the delta, complete. Its base is not compared with the live policy's digest:
            the caller does that, under the lock that keeps it so.
        base: the live policy's checkpoint, in any form that it may be served from.
        manifest: what the model consists of.
        out: the new file, or one to be written over; incomplete and useless if this raises.

    Returns:
        Digest of the result, which is the one that the delta announces.

    Raises:
        MalformedBody: the delta was damaged on the way or does not follow the format.
        WeightsRejected: it does not fit the model, makes a value NaN or infinite, or leads to
            another checkpoint than it says.
    """
    delta = parse_delta(_mapped(delta_path), manifest.required)
    frames: dict[str, dict[int, Frame]] = {}
    for frame in delta.frames:
        frames.setdefault(frame.spec.name, {})[frame.block] = frame
    written = _write(canonical_tensors(base, manifest), frames, manifest, out)
    problems = [not_finite(w.spec.name, w.broken) for w in written]
    reject_if([p for p in problems if p], "the delta holds values that are not finite")
    digest = checkpoint_digest((w.spec, w.hash) for w in written)
    if digest != delta.digest:
        raise WeightsRejected(
            f"the delta leads to a checkpoint with digest {digest}, not {delta.digest} as "
            "announced: it was made for another base, or from other weights"
        )
    return digest


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise MalformedBody("the delta is empty")
        # Unmapped when the last view of it is gone.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _write(
    tensors: Iterable[tuple[TensorSpec, memoryview]],
    frames: dict[str, dict[int, Frame]],
    manifest: Manifest,
    out: Path,
) -> list[_Written]:
    header = encode_header(manifest.required.values())
    with open_over(out) as file, ThreadPoolExecutor(_THREADS) as pool:
        _write_at(file.fileno(), header, 0)

        def write(item: tuple[int, TensorSpec, memoryview]) -> _Written:
            offset, spec, data = item
            return _write_tensor(file.fileno(), offset, spec, data, frames.get(spec.name, {}))

        written = list(_map_ahead(pool, write, _with_offsets(tensors, len(header))))
        file.truncate(len(header) + sum(w.spec.nbytes for w in written))
        return written


def _with_offsets(
    tensors: Iterable[tuple[TensorSpec, memoryview]], offset: int
) -> Iterator[tuple[int, TensorSpec, memoryview]]:
    for spec, data in tensors:
        yield offset, spec, data
        offset += spec.nbytes


def _map_ahead(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T]
) -> Iterator[R]:
    """Like ``pool.map``, but items are taken only a few at a time: a cast makes each a tensor."""
    running: deque[Future[R]] = deque()
    for item in items:
        running.append(pool.submit(function, item))
        if len(running) > _THREADS:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _write_tensor(
    fd: int, offset: int, spec: TensorSpec, data: memoryview, frames: dict[int, Frame]
) -> _Written:
    # Block by block, so that what was just changed is still in the cache when it is hashed.
    whole, broken = TensorHash(), 0
    for block, where in enumerate(block_ranges(spec)):
        content: bytearray | memoryview = data[where]
        if frame := frames.get(block):
            content = bytearray(content)
            bits = apply_frame(content, frame)
            broken += count_not_finite(bits, spec.dtype, spec.dtype)
        whole.update(content)
        _write_at(fd, content, offset + where.start)
    return _Written(spec, whole.hexdigest(), broken)


def _write_at(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        # One call writes at most 2 GiB, or less when the disk is nearly full.
        count = os.pwrite(fd, left, offset)
        left, offset = left[count:], offset + count

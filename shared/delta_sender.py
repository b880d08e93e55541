"""What a trainer remembers of the weights that it last published, so that it can send less.

    base = DeltaBase()
    send(stream_checkpoint(base.record(tensors)))    # in full, remembered on its way out
    base.commit()                                    # the server took it
    ...
    send(base.encode(tensors))                       # from now on, what changed
    base.commit()

Without ``commit`` nothing was published as far as the base knows: a delta may be encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from shared.delta import MAGIC, Frame, apply_frame, block_ranges, encode_block, encode_json
from shared.tensor_hash import tensor_hash
from shared.weights import LazyTensor, TensorSpec, checkpoint_digest


@dataclass(frozen=True, slots=True)
class _Pending:
    """What becomes of the base if the server takes what was sent."""

    digest: str
    hashes: dict[str, str]
    frames: list[Frame]


class DeltaBase:
    """A copy, in host memory, of the checkpoint that the server is known to serve.

    Deltas name their result by a digest, so the tensors must be those that the server holds, in
    the dtype that it serves; ``digest`` equals the live policy's exactly when that is so.

    It costs the checkpoint's size, and a delta's size from its encoding to its commit.

    Attributes:
        digest: of the remembered checkpoint; None until a full one is committed.
    """

    def __init__(self) -> None:
        self.digest: str | None = None
        self._data: dict[str, bytearray] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._hashes: dict[str, str] = {}
        self._pending: _Pending | None = None

    def covers(self, tensors: Sequence[LazyTensor]) -> bool:
        """Whether there is a committed checkpoint of just these tensors to take a delta from."""
        return self.digest is not None and self._specs == {t.spec.name: t.spec for t in tensors}

    def record(self, tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
        """The same tensors, which are remembered while a full publish loads them.

        The old checkpoint is forgotten at once: two would not fit into memory.
        """
        self.digest = self._pending = None
        self._hashes = {}
        self._specs = {tensor.spec.name: tensor.spec for tensor in tensors}
        self._data = {}
        return [replace(tensor, load=partial(self._remember, tensor)) for tensor in tensors]

    def _remember(self, tensor: LazyTensor) -> memoryview:
        data = _load(tensor)
        self._data[tensor.spec.name] = bytearray(data)
        self._hashes[tensor.spec.name] = tensor_hash(data)
        return data

    def commit(self) -> None:
        """The server now serves what was last recorded or encoded.

        Raises:
            ValueError: that was not sent to its end, or nothing was.
        """
        if self._pending is not None:
            self._advance(self._pending)
        elif self.digest is None and self._specs.keys() == self._hashes.keys() != set():
            self.digest = self._digest_of(self._hashes)
        else:
            raise ValueError("nothing to commit: no checkpoint or delta was sent to its end")

    def _advance(self, pending: _Pending) -> None:
        # Should this fail half-way (memory, an interrupt), no base is better than a torn one.
        self.digest, self._hashes, self._pending = None, {}, None
        # Blocks are disjoint, so they can be changed at the same time.
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(self._apply, pending.frames):
                pass
        self.digest, self._hashes = pending.digest, pending.hashes

    def _apply(self, frame: Frame) -> None:
        data = memoryview(self._data[frame.spec.name])
        apply_frame(data[block_ranges(frame.spec)[frame.block]], frame)

    def _digest_of(self, hashes: dict[str, str]) -> str:
        return checkpoint_digest((spec, hashes[name]) for name, spec in self._specs.items())

    def encode(self, tensors: Sequence[LazyTensor]) -> Iterator[bytes]:
        """What turns this checkpoint into ``tensors``, in pieces of at most a few MiB.

        One tensor is loaded at a time. The remembered checkpoint stays as it is until ``commit``.

        Raises:
            ValueError: there is no committed checkpoint, or it has other tensors; publish in full.
                While it streams: a tensor produced another number of bytes than its spec says.
        """
        if self.digest is None:
            raise ValueError("no full checkpoint was committed, so there is nothing to change")
        specs = {tensor.spec.name: tensor.spec for tensor in tensors}
        if specs != self._specs or len(specs) != len(tensors):
            raise ValueError("the tensors are not those of the base; publish them in full")
        self._pending = None
        return self._stream(tensors)

    def _stream(self, tensors: Sequence[LazyTensor]) -> Iterator[bytes]:
        whole = xxhash.xxh3_128()
        hashes: dict[str, str] = {}
        frames: list[Frame] = []

        def sent(piece: bytes) -> bytes:
            whole.update(piece)
            return piece

        yield sent(MAGIC + encode_json({"base": self.digest}))
        with ThreadPoolExecutor() as pool:
            for tensor in tensors:
                for frame in self._changes(tensor, hashes, pool):
                    frames.append(frame)
                    yield sent(frame.to_bytes())
        digest = self._digest_of(hashes)
        yield sent(encode_json({"digest": digest}))
        # Set before the last piece leaves: a receiver that has it all asks for no more.
        self._pending = _Pending(digest, hashes, frames)
        yield whole.hexdigest().encode()

    def _changes(
        self, tensor: LazyTensor, hashes: dict[str, str], pool: ThreadPoolExecutor
    ) -> Iterator[Frame]:
        spec, data = tensor.spec, _load(tensor)
        hashes[spec.name] = tensor_hash(data)
        if hashes[spec.name] == self._hashes[spec.name]:
            return
        kept = memoryview(self._data[spec.name])

        def change(item: tuple[int, slice]) -> Frame | None:
            block, where = item
            return encode_block(spec, block, kept[where], data[where])

        for frame in pool.map(change, enumerate(block_ranges(spec))):
            if frame is not None:
                yield frame


def _load(tensor: LazyTensor) -> memoryview:
    data = memoryview(tensor.load()).cast("B")
    if len(data) != tensor.spec.nbytes:
        raise ValueError(f"{tensor.spec} produced {len(data)} bytes, not {tensor.spec.nbytes}")
    return data

"""Small checkpoints, and both ends of a delta."""

from __future__ import annotations

from shared.delta import Frame, apply_frame, block_ranges
from shared.delta_reader import parse_delta
from shared.delta_sender import DeltaBase
from shared.tensor_hash import tensor_hash
from shared.weights import LazyTensor, TensorSpec, checkpoint_digest, stream_checkpoint

Tensors = dict[TensorSpec, bytes]

SPEC = TensorSpec("w", "BF16", (64,))
OLD: Tensors = {SPEC: bytes(128), TensorSpec("none", "F32", (0, 3)): b""}
NEW: Tensors = {**OLD, SPEC: bytes(126) + b"\1\2"}


def digest_of(tensors: Tensors) -> str:
    return checkpoint_digest((s, tensor_hash(data)) for s, data in tensors.items())


def lazy(tensors: Tensors) -> list[LazyTensor]:
    return [LazyTensor(spec, lambda data=data: data) for spec, data in tensors.items()]  # type: ignore[misc]


def published(tensors: Tensors) -> DeltaBase:
    """A base from which ``tensors`` were published in full."""
    base = DeltaBase()
    for _ in stream_checkpoint(base.record(lazy(tensors))):
        pass
    base.commit()
    return base


def encoded(old: Tensors, new: Tensors) -> bytes:
    return b"".join(published(old).encode(lazy(new)))


def applied(delta: bytes, old: Tensors) -> Tensors:
    """What a receiver that holds ``old`` makes of a delta."""
    content = {spec: bytearray(data) for spec, data in old.items()}
    parsed = parse_delta(memoryview(delta), {spec.name: spec for spec in old})
    assert parsed.base == digest_of(old)
    for frame in parsed.frames:
        apply_frame(memoryview(content[frame.spec])[block_ranges(frame.spec)[frame.block]], frame)
    new = {spec: bytes(data) for spec, data in content.items()}
    assert parsed.digest == digest_of(new)
    return new


def frames_of(delta: bytes, tensors: Tensors) -> tuple[Frame, ...]:
    return parse_delta(memoryview(delta), {spec.name: spec for spec in tensors}).frames

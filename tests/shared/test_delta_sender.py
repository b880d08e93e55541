"""A sender believes only what it was told, and a failed publish costs nothing but time."""

from __future__ import annotations

import pytest

from shared.delta_sender import DeltaBase
from shared.weights import LazyTensor, TensorSpec, stream_checkpoint
from tests.shared.delta_support import NEW, OLD, SPEC, Tensors, applied, digest_of, lazy, published

NEWER: Tensors = {**OLD, SPEC: b"\7" * 128}


def test_deltas_follow_each_other() -> None:
    base, held = published(OLD), OLD
    for tensors in (NEW, NEWER, NEWER, OLD):
        held = applied(b"".join(base.encode(lazy(tensors))), held)
        base.commit()
        assert held == tensors
        assert base.digest == digest_of(tensors)


def test_without_commit_the_next_delta_starts_where_the_last_one_did() -> None:
    base = published(OLD)
    first = b"".join(base.encode(lazy(NEW)))
    assert b"".join(base.encode(lazy(NEW))) == first
    assert applied(b"".join(base.encode(lazy(NEWER))), OLD) == NEWER
    base.commit()
    assert base.digest == digest_of(NEWER)


def test_a_delta_that_was_not_sent_to_its_end_cannot_be_committed() -> None:
    base = published(OLD)
    for _ in base.encode(lazy(NEW)):
        break
    with pytest.raises(ValueError, match="nothing to commit"):
        base.commit()
    assert base.digest == digest_of(OLD)


def test_a_full_publish_that_was_not_sent_to_its_end_leaves_no_base() -> None:
    base = published(OLD)
    base.record(lazy(NEW))
    with pytest.raises(ValueError, match="nothing to commit"):
        base.commit()
    with pytest.raises(ValueError, match="no full checkpoint"):
        base.encode(lazy(NEW))


def test_nothing_is_committed_twice() -> None:
    base = published(OLD)
    with pytest.raises(ValueError, match="nothing to commit"):
        base.commit()


@pytest.mark.parametrize(
    "tensors",
    [
        {SPEC: bytes(128)},
        {**OLD, TensorSpec("more", "U8", (1,)): b"\0"},
        {TensorSpec("w", "F16", (64,)): bytes(128), TensorSpec("none", "F32", (0, 3)): b""},
    ],
)
def test_other_tensors_need_a_full_publish(tensors: Tensors) -> None:
    with pytest.raises(ValueError, match="publish them in full"):
        published(OLD).encode(lazy(tensors))


def test_a_tensor_listed_twice() -> None:
    with pytest.raises(ValueError, match="publish them in full"):
        published(OLD).encode([*lazy(OLD), *lazy({SPEC: OLD[SPEC]})])


def test_a_commit_that_fails_half_way_leaves_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    base = published(OLD)
    list(base.encode(lazy(NEW)))

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("shared.delta_sender.apply_frame", out_of_memory)
    with pytest.raises(MemoryError):
        base.commit()
    assert base.digest is None
    with pytest.raises(ValueError, match="nothing to commit"):
        base.commit()


def test_a_tensor_of_another_length_than_it_says() -> None:
    tensors = [LazyTensor(spec, lambda: b"abc") for spec in OLD]
    with pytest.raises(ValueError, match="produced 3 bytes, not 128"):
        list(published(OLD).encode(tensors))


def test_the_base_copies_what_it_remembers() -> None:
    live = bytearray(128)
    base, spec = DeltaBase(), SPEC
    list(stream_checkpoint(base.record([LazyTensor(spec, lambda: live)])))
    base.commit()
    live[:] = NEWER[spec]
    delta = b"".join(base.encode([LazyTensor(spec, lambda: live)]))
    assert applied(delta, {spec: bytes(128)}) == {spec: NEWER[spec]}

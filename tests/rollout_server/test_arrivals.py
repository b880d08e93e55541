"""Uploads in pieces of any size: the same end as in one piece, and bad ones refused early."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollout_server import staging
from rollout_server.arrivals import SENT_FILE, CheckpointArrival, DeltaArrival
from rollout_server.checkpoints import Manifest, Verified
from rollout_server.sinks import Sink, fill
from rollout_server.staged_files import MappedFiles, StagedFile, WrittenFile
from shared.delta_reader import OPENING_BYTES
from shared.delta_sender import DeltaBase
from shared.errors import (
    BodyTooLarge,
    Conflict,
    InsufficientStorage,
    MalformedBody,
    WeightsRejected,
)
from shared.weights import TRAILER_BYTES, stream_checkpoint
from tests.rollout_server.support import Tensors, digest_of, lazy, spec_of, upload_of

LIMIT = 1 << 30


@pytest.fixture
def tensors() -> Tensors:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(1300, 101).bfloat16(),  # longer than a piece of its hash
        "none": torch.empty(0, 8, dtype=torch.bfloat16),
        "norm": torch.ones(7, dtype=torch.bfloat16),
        "count": torch.arange(5),
        "head": torch.randn(64, 64).bfloat16(),
    }


Begin = Callable[..., CheckpointArrival]


def written(path: Path, size: int) -> StagedFile:  # noqa: ARG001 - as the spool has it
    return WrittenFile(path)


def take(sink: Sink, raw: bytes) -> None:
    """Fill the sink's rooms, as a socket would that has no more than this."""
    while raw:
        room = sink.room()[: len(raw)]
        room[:] = raw[: len(room)]
        raw = raw[len(room) :]
        sink.filled(len(room))


@pytest.fixture(params=["written", "mapped"])
def begin(tmp_path: Path, tensors: Tensors, request: pytest.FixtureRequest) -> Iterator[Begin]:
    """Begins an upload of these tensors, or of others for the same model."""
    files = MappedFiles(tmp_path)
    files.is_in_memory = True  # else nothing would be mapped where this is a disk
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    begun: list[CheckpointArrival] = []

    def start(announced: str | None = None, *, trailer: bool = True) -> CheckpointArrival:
        arrival = CheckpointArrival(
            tmp_path / SENT_FILE,
            files.open if request.param == "mapped" else written,
            Manifest.of_checkpoint(specs, dtype="BF16", tied=False),
            announced=announced,
            trailer=trailer,
            max_bytes=LIMIT,
        )
        begun.append(arrival)
        return arrival

    yield start
    for arrival in begun:
        arrival.close()
    files.close()


def pieces(raw: bytes, size: int) -> list[bytes]:
    return [raw[start : start + size] for start in range(0, len(raw), size)]


@pytest.mark.parametrize("size", [1, 7, 4096, 10**6])
def test_pieces_of_any_size(begin: Begin, tmp_path: Path, tensors: Tensors, size: int) -> None:
    raw, arrival = upload_of(tensors), begin()
    for piece in pieces(raw, size):
        take(arrival, piece)
    assert arrival.verified() == Verified((tmp_path / SENT_FILE,), digest_of(tensors))
    assert (tmp_path / SENT_FILE).read_bytes() == raw[:-TRAILER_BYTES]


def test_a_digest_that_was_announced(begin: Begin, tensors: Tensors) -> None:
    raw = upload_of(tensors)[:-TRAILER_BYTES]
    for announced in (None, digest_of(tensors)):
        arrival = begin(announced, trailer=False)
        take(arrival, raw)
        assert arrival.verified().digest == digest_of(tensors)
    arrival = begin("0" * 32, trailer=False)
    take(arrival, raw)
    with pytest.raises(WeightsRejected, match="as announced"):
        arrival.verified()


def test_a_cast_leaves_only_its_result(begin: Begin, tmp_path: Path, tensors: Tensors) -> None:
    wide = tensors | {"head": tensors["head"].float()}
    arrival = begin()
    take(arrival, upload_of(wide))
    verified = arrival.verified()
    assert verified.digest == digest_of(tensors)
    assert list(tmp_path.iterdir()) == list(verified.files)


def test_a_header_that_does_not_fit_ends_the_upload(begin: Begin, tensors: Tensors) -> None:
    raw, arrival = upload_of(tensors | {"norm": torch.ones(8).bfloat16()}), begin()
    end = 8 + int.from_bytes(raw[:8], "little")
    take(arrival, raw[: end - 1])
    with pytest.raises(WeightsRejected, match="norm"):
        take(arrival, raw[end - 1 : end])


def test_a_size_that_is_not_allowed(tmp_path: Path, tensors: Tensors) -> None:
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    manifest = Manifest.of_checkpoint(specs, dtype="BF16", tied=False)
    arrival = CheckpointArrival(
        tmp_path / SENT_FILE, written, manifest, announced=None, trailer=True, max_bytes=10_000
    )
    with pytest.raises(BodyTooLarge):
        take(arrival, upload_of(tensors)[:9000])
    arrival.close()


def test_tensors_are_looked_at_as_soon_as_they_are_whole(begin: Begin, tensors: Tensors) -> None:
    bad = tensors["embed"].clone()
    bad[299, 100] = float("nan")
    raw, arrival = upload_of(tensors | {"embed": bad}), begin()
    end = 8 + int.from_bytes(raw[:8], "little") + bad.numel() * 2
    take(arrival, raw[: end - 1])
    assert set(arrival.checks) == {"none"}  # which has no bytes to wait for
    take(arrival, raw[end - 1 : end])
    assert set(arrival.checks) == {"embed", "none"}
    take(arrival, raw[end:])
    with pytest.raises(WeightsRejected, match="embed: got 1 NaN"):
        arrival.verified()


def arrived(arrival: CheckpointArrival, raw: bytes) -> Verified:
    for piece in pieces(raw, 5000):
        take(arrival, piece)
    return arrival.verified()


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_anywhere(begin: Begin, tensors: Tensors, bit: int) -> None:
    raw = bytearray(upload_of(tensors))
    start = 8 + int.from_bytes(raw[:8], "little")
    for position in (start, (start + len(raw)) // 2, len(raw) - TRAILER_BYTES - 1, len(raw) - 1):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << bit
        with pytest.raises((WeightsRejected, MalformedBody)):
            arrived(begin(), bytes(damaged))


def test_an_upload_that_is_cut_short(begin: Begin, tensors: Tensors) -> None:
    raw = upload_of(tensors)
    for length in (0, 4, 8, 20, 500, len(raw) // 2, len(raw) - 33, len(raw) - 32, len(raw) - 1):
        arrival = begin()
        take(arrival, raw[:length])
        with pytest.raises(MalformedBody):
            arrival.verified()


@pytest.mark.parametrize("trailer", [True, False])
def test_an_upload_that_goes_on(begin: Begin, tensors: Tensors, trailer: bool) -> None:
    raw = upload_of(tensors)
    arrival = begin(trailer=trailer)
    take(arrival, raw if trailer else raw[:-TRAILER_BYTES])
    with pytest.raises(MalformedBody, match="goes on"):
        take(arrival, b"x")


def test_no_safetensors_at_all(begin: Begin) -> None:
    with pytest.raises(MalformedBody):
        take(begin(), b"PK\3\4 is a zip file, and a pickle in it")


def test_a_delta_is_refused_at_its_header(tmp_path: Path) -> None:
    live = {"head": torch.randn(1000, 400).bfloat16()}
    base = DeltaBase()
    for _ in stream_checkpoint(base.record(lazy(live))):
        pass
    base.commit()
    raw = b"".join(base.encode(lazy({"head": torch.randn(1000, 400).bfloat16()})))
    assert len(raw) > 4 * OPENING_BYTES
    asked: list[str] = []

    def refuse(digest: str) -> None:
        asked.append(digest)
        raise Conflict("another version is live")

    arrival = DeltaArrival(tmp_path / "delta", limits(), refuse, lambda *_: pytest.fail("applied"))
    take(arrival, raw[: OPENING_BYTES - 1])
    assert asked == []
    with pytest.raises(Conflict):
        take(arrival, raw[OPENING_BYTES - 1 : OPENING_BYTES])
    assert asked == [digest_of(live)]
    arrival.close()


def test_a_short_delta_is_looked_at_in_the_end(tmp_path: Path) -> None:
    arrival = DeltaArrival(tmp_path / "delta", limits(), print, lambda *_: pytest.fail("applied"))
    take(arrival, b"TITO")
    with pytest.raises(MalformedBody, match="not a delta"):
        arrival.verified()
    arrival.close()


def test_a_delta_that_is_too_long(tmp_path: Path) -> None:
    arrival = DeltaArrival(tmp_path / "delta", limits(99), print, lambda *_: pytest.fail("applied"))
    take(arrival, bytes(99))
    with pytest.raises(BodyTooLarge, match="99 bytes"):
        take(arrival, b"x")
    arrival.close()


def limits(most: int = LIMIT) -> staging.UploadLimits:
    return staging.UploadLimits([], most, 1)


def test_a_header_that_is_longer_than_most(tmp_path: Path) -> None:
    many = {f"{'layer.' * 20}{index}": torch.ones(3).bfloat16() for index in range(2000)}
    specs = [spec_of(name, tensor) for name, tensor in many.items()]
    manifest = Manifest.of_checkpoint(specs, dtype="BF16", tied=False)
    arrival = CheckpointArrival(
        tmp_path / SENT_FILE, written, manifest, announced=None, trailer=True, max_bytes=LIMIT
    )
    raw = upload_of(many)
    assert int.from_bytes(raw[:8], "little") > 256 << 10
    take(arrival, raw)
    assert arrival.verified().digest == digest_of(many)
    arrival.close()


# Chunks, one after the other.


async def chunks_of(raw: bytes, size: int) -> AsyncIterator[bytes]:
    for piece in pieces(raw, size):
        yield piece


class Kept:
    """A sink that keeps what comes, and takes one call at a time.

    Args:
        refuse: what it raises when a room is filled.
        begun: set when one is.
        gate: waited for then.
    """

    def __init__(
        self,
        refuse: Exception | None = None,
        begun: threading.Event | None = None,
        gate: threading.Event | None = None,
    ) -> None:
        self.kept, self.calls = bytearray(), 0
        self._room = bytearray(1000)
        self._busy = threading.Lock()
        self._refuse, self._begun, self._gate = refuse, begun, gate

    def room(self) -> memoryview:
        return memoryview(self._room)

    def filled(self, count: int) -> None:
        assert self._busy.acquire(blocking=False), "two calls at once"
        self.kept += self._room[:count]
        self.calls += 1
        if self._begun is not None:
            self._begun.set()
        if self._gate is not None:
            self._gate.wait(0.2)
            self._gate.set()
        if self._refuse is not None:
            raise self._refuse
        self._busy.release()


def test_chunks_come_in_order_and_one_at_a_time() -> None:
    raw = os.urandom((3 << 20) + 1)
    for size in (1 << 14, 300_000, 30 << 20):
        sink = Kept()
        asyncio.run(fill(chunks_of(raw, size), sink))
        assert sink.kept == raw
        assert sink.calls == len(raw) // 1000 + 1


def test_nothing_is_under_way_when_an_upload_ends_early() -> None:
    ended, begun = threading.Event(), threading.Event()

    async def broken() -> AsyncIterator[bytes]:
        yield bytes(2 << 20)
        await asyncio.to_thread(begun.wait)
        raise ConnectionError("the caller is gone")

    with pytest.raises(ConnectionError):
        asyncio.run(fill(broken(), Kept(begun=begun, gate=ended)))
    assert ended.is_set()


def test_what_is_refused_ends_an_upload() -> None:
    sink = Kept(OSError(errno.ENOSPC, "no space"))
    with pytest.raises(InsufficientStorage), staging.storage_errors():
        asyncio.run(fill(chunks_of(bytes(64 << 20), 1 << 20), sink))
    assert sink.calls == 1


def test_writes_that_are_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.writev

    def short(descriptor: int, buffers: list[memoryview]) -> int:
        return plain(descriptor, [b"".join(buffers)[:1000]])

    monkeypatch.setattr(os, "writev", short)
    raw = os.urandom(10_000)
    with (tmp_path / "file").open("wb") as file:
        staging.write_all(file.fileno(), [b"", *pieces(raw, 333), b""])
    assert (tmp_path / "file").read_bytes() == raw

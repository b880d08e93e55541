"""Versions that are no longer kept: set aside at once, removed later, whatever happens between."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_server.spool import Spool, record_now
from rollout_server.staged_files import MappedFiles

BASE = "0" * 32


def commit(spool: Spool, version: int, size: int = 1000) -> Path:
    folder = spool.stage()
    (folder / "a.safetensors").write_bytes(bytes([version]) * size)
    (folder / "b.safetensors").write_bytes(b"small")
    return spool.commit(folder, "default", record_now(version, f"{version:032}", BASE, "me"))


def numbers(spool: Spool) -> list[int]:
    return [record.version for record, _ in spool.versions("default", BASE)]


@pytest.fixture(params=[True, False], ids=["durable", "scratch"])
def spool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Spool]:
    spool = Spool(tmp_path / "spool", durable=request.param, keep=2)
    yield spool
    spool.close()


def test_versions_that_are_not_kept_go(spool: Spool) -> None:
    for version in range(1, 5):
        commit(spool, version)
    retired = spool.retire("default", 4)
    assert numbers(spool) == [4, 3]
    assert all((folder / "a.safetensors").exists() for folder in retired)
    assert len(retired) == 2
    spool.clear(retired)
    assert not any(folder.exists() for folder in retired)
    assert spool.retire("default", 4) == []
    assert spool.newest_number("default") == 4


def test_the_live_version_is_kept_however_old(spool: Spool) -> None:
    for version in range(1, 5):
        commit(spool, version)
    spool.clear(spool.retire("default", 1))
    assert numbers(spool) == [4, 3, 1]


def test_versions_of_another_base_are_named(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    folder = commit(spool, 1)
    other = "f" * 32
    assert spool.versions("default", other) == []
    for told in (str(folder), BASE, other, "another definition"):
        assert told in caplog.text


def test_a_crash_before_they_are_removed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, durable=True, keep=1)
    commit(spool, 1)
    commit(spool, 2)
    (retired,) = spool.retire("default", 2)
    spool.close()
    spool = Spool(tmp_path, durable=True, keep=1)
    assert not retired.exists()
    assert numbers(spool) == [2]
    spool.close()


def test_scratch_keeps_one_file_to_be_written_over(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "scratch", durable=False, keep=1)
    for version in (1, 2, 3):
        commit(spool, version)
        spool.clear(spool.retire("default", version))
    file = spool.stage() / "file"
    spool.recycle(file)
    assert file.read_bytes() == bytes([2]) * 1000
    other = spool.stage() / "file"
    spool.recycle(other)  # there is only one
    assert not other.exists()
    spool.close()
    assert not (tmp_path / "scratch").exists()


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    spool = Spool(tmp_path, durable=False, keep=1)
    commit(spool, 1)
    commit(spool, 2)
    spare = spool.stage() / "upload"
    with spool.reading():
        spool.clear(spool.retire("default", 2))
        spool.recycle(spare)
        assert not spare.exists()
    spool.recycle(spare)
    assert spare.exists()
    spool.close()


def test_a_durable_spool_keeps_none(tmp_path: Path) -> None:
    spool = Spool(tmp_path, durable=True, keep=1)
    commit(spool, 1)
    commit(spool, 2)
    spool.clear(spool.retire("default", 2))
    spool.recycle(tmp_path / "file")
    assert not (tmp_path / "file").exists()
    spool.close()


def test_clearing_what_is_gone_already(spool: Spool, tmp_path: Path) -> None:
    spool.clear([tmp_path / "gone"])


def test_what_fails_while_a_policy_is_forgotten_loses_no_number(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space")

    commit(spool, 7)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(OSError, match="no space"):
            spool.forget("default")
    assert numbers(spool) == [7]
    spool.forget("default")
    assert numbers(spool) == []
    assert spool.newest_number("default") == 7


def test_what_somebody_else_has_put_there_is_no_version(spool: Spool) -> None:
    commit(spool, 3)
    (spool.root / "policies" / "default" / "v-old").mkdir()
    assert spool.newest_number("default") == 3
    assert numbers(spool) == [3]


def names_of_mapped_files(folder: Path) -> list[str]:
    """What this process has mapped of a folder's files, under their last names."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.partition(str(folder))[2] for line in lines if str(folder) in line)


def test_a_file_in_memory_stays_mapped_until_it_has_gone(memory: Path) -> None:
    spool = Spool(memory, durable=False, keep=1)
    inodes = []
    for version, size in enumerate([5000, 9000, 20_000, 3000, 30_000], 1):
        folder = spool.stage()
        file = spool.open_over(folder / "a.safetensors", size)
        content = bytes([version]) * size
        parts = file.part(0, 2000), file.part(2000, size)
        for start in range(0, size, 500):
            piece, part = content[start : start + 500], parts[start >= 2000]
            part.room(len(piece))[:] = piece
            assert part.filled(len(piece)) == piece
        file.end(size)
        file.close()
        inodes.append((folder / "a.safetensors").stat().st_ino)
        record = record_now(version, f"{version:032}", BASE, "me")
        live = spool.commit(folder, "default", record)
        assert (live / "a.safetensors").read_bytes() == content
        spool.clear(spool.retire("default", version))
    assert inodes == [inodes[0], inodes[1], inodes[0], inodes[1], inodes[0]]
    assert len(set(names_of_mapped_files(memory))) == 2
    spool.forget("default")
    assert names_of_mapped_files(memory) == ["/spare"]
    discarded = spool.stage()
    spool.open_over(discarded / "file", 1 << 20).close()
    spool.discard(discarded)
    assert names_of_mapped_files(memory) == []
    spool.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory."""
    shared = Path("/dev/shm")
    if not MappedFiles(shared).is_in_memory:
        pytest.skip("/dev/shm is not in memory here")
    folder = Path(tempfile.mkdtemp(prefix="tito-test-", dir=shared))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)

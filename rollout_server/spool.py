"""Where checkpoints lie on the server's disk: being staged, or committed as a version.

    ROOT/staging/00000007/...                     one folder for each publish under way
    ROOT/policies/default/v00000012/record.json   a committed version, beside its files
    ROOT/retired/00000008/...                     a version about to be removed
    ROOT/policies/mine/numbered                   how far a policy's versions went, if further

A commit is one rename, after everything in the folder has reached the disk, so a crash leaves
either the whole version or none of it. The last few versions are kept. A spool that is not durable
lives in scratch space, skips the waiting for the disk, and goes with the process. It also keeps the
largest file that it would remove, for the next upload to be written over it: memory that is there
already takes bytes several times as fast. Two checkpoints are there during a publish anyway.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from rollout_server.staged_files import MappedFiles, StagedFile, WrittenFile

log = logging.getLogger("tito.spool")

_RECORD = "record.json"
_NUMBERED = "numbered"
_SCRATCH = "scratch-"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a committed version.

    Attributes:
        version: its number.
        digest: digest of its canonical checkpoint.
        base: digest of the model it belongs to, so that another model does not load it.
        publisher: who published it.
        committed_at: seconds since the epoch.
    """

    version: int
    digest: str
    base: str
    publisher: str
    committed_at: float


class Spool:
    """Folders for staging and committed versions, all on one filesystem.

    Args:
        root: a directory of this server alone.
        durable: whether commits must survive the machine.
        keep: committed versions of each policy that are kept; at least the live one.

    Raises:
        BlockingIOError: another server uses this directory.
    """

    def __init__(self, root: Path, *, durable: bool, keep: int) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(root)
        self.root = root
        self._durable = durable
        self._spare = root / "spare"
        self._keep = max(keep, 1)
        self._staging, self._retired = root / "staging", root / "retired"
        for area in (self._staging, self._retired):
            shutil.rmtree(area, ignore_errors=True)  # what a crash has left
            area.mkdir()
        self._serial = itertools.count()
        self._readers = 0
        self._reading = threading.Lock()
        self._mapped = MappedFiles(root)

    def stage(self) -> Path:
        """A new empty folder for one publish."""
        folder = self._staging / f"{next(self._serial):08d}"
        folder.mkdir()
        return folder

    def recycle(self, file: Path) -> None:
        """Put a file of old content at a path, if there is one to be written over."""
        with self._reading, contextlib.suppress(FileNotFoundError):
            if not self._readers:
                self._spare.rename(file)

    def open_over(self, file: Path, size: int) -> StagedFile:
        """A file to be filled, over one of old content if there is one.

        Args:
            file: where it will be, in a staging folder.
            size: that it will have, in bytes.
        """
        if self._durable:
            return WrittenFile(file)
        self.recycle(file)
        return self._mapped.open(file, size)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read a live version inside: its files are not written over, should it be retired.

        They are mapped into memory, and a process that reads beyond the end of a file that has
        become shorter is killed.
        """
        with self._reading:
            self._readers += 1
        try:
            yield
        finally:
            with self._reading:
                self._readers -= 1

    def discard(self, folder: Path) -> None:
        """Remove a staged folder, if it was not committed."""
        shutil.rmtree(folder, ignore_errors=True)
        self._mapped.release()

    def prepare(self, folder: Path) -> None:
        """Make sure that a staged folder's files have reached the disk."""
        if self._durable:
            for file in folder.iterdir():
                _sync(file)

    def commit(self, folder: Path, policy: str, record: Record) -> Path:
        """Turn a prepared folder into a version, all at once; returns where it now is."""
        (folder / _RECORD).write_text(json.dumps(asdict(record)))
        target = self._folder(policy, record.version)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._durable:
            _sync(folder / _RECORD)
            _sync(folder)
        folder.rename(target)
        if self._durable:
            _sync(target.parent)
        return target

    def retire(self, policy: str, live: int) -> list[Path]:
        """Set aside the versions of a policy that are older than those to be kept.

        Returns:
            where they are now, for :meth:`clear`; after a crash the next start removes them.
        """
        retired = []
        for _, folder in self._versions(policy)[: -self._keep]:
            if folder != self._folder(policy, live):
                retired.append(self._retired / f"{next(self._serial):08d}")
                folder.rename(retired[-1])
        return retired

    def clear(self, retired: list[Path]) -> None:
        """Remove what was set aside, which takes a while for large files."""
        for folder in retired:
            if not self._durable:
                with contextlib.suppress(OSError):  # it goes with the whole spool just now
                    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
                    largest.rename(self._spare)
            shutil.rmtree(folder, ignore_errors=True)
        self._mapped.release()

    def versions(self, policy: str, base: str) -> list[tuple[Record, Path]]:
        """Committed versions of a policy on a given model, the newest first."""
        found = self._versions(policy)
        for record, folder in found:
            if record.base != base:
                told = "%s is passed over: it belongs to the model %s, and this one is %s %s"
                why = "(another one, or its digest was made by another definition)"
                log.warning(told, folder, record.base, base, why)
        return [item for item in found if item[0].base == base][::-1]

    def policies(self) -> list[str]:
        """Names of the policies that have committed versions here."""
        return sorted({folder.parent.name for folder in (self.root / "policies").glob("*/v*")})

    def forget(self, policy: str) -> None:
        """Remove every version of a policy, but not how far its numbers went.

        A later policy of that name goes on from there: a version names one set of weights for good.
        """
        self.reserve(policy, self.newest_number(policy))  # before anything is removed
        for version in (self.root / "policies" / policy).glob("v*"):
            shutil.rmtree(version, ignore_errors=True)
        self._mapped.release()

    def reserve(self, policy: str, number: int) -> None:
        """Never give this number, or a lower one, to another version of the policy."""
        folder = self.root / "policies" / policy
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{_NUMBERED}.new"
        fresh.write_text(str(number))
        if self._durable:
            _sync(fresh)
        fresh.rename(folder / _NUMBERED)  # whole or not at all
        if self._durable:
            _sync(folder)

    def newest_number(self, policy: str) -> int:
        """The highest version that ever had a folder here, intact or not, or 0."""
        folder = self.root / "policies" / policy
        names = [version.name[1:] for version in folder.glob("v*")]
        numbers = [int(name) for name in names if name.isdecimal()]
        if (forgotten := folder / _NUMBERED).is_file():
            numbers.append(int(forgotten.read_text()))
        return max(numbers, default=0)

    def close(self) -> None:
        """Let another server use the directory; a scratch spool is removed."""
        self._mapped.close()
        if not self._durable:
            shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()

    def _folder(self, policy: str, version: int) -> Path:
        return self.root / "policies" / policy / f"v{version:08d}"

    def _versions(self, policy: str) -> list[tuple[Record, Path]]:
        found = []
        for folder in sorted((self.root / "policies" / policy).glob("v*")):
            try:
                found.append((Record(**json.loads((folder / _RECORD).read_text())), folder))
            except (OSError, ValueError, TypeError) as error:
                log.warning("%s is passed over: %s", folder, error)
        return found


def open_spool(spool_dir: Path | None, scratch_parent: Path, *, keep: int) -> Spool:
    """The operator's spool directory, or a scratch spool that is gone after this process."""
    if spool_dir is not None:
        return Spool(spool_dir, durable=True, keep=keep)
    scratch_parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(scratch_parent)
    root = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=scratch_parent))
    return Spool(root, durable=False, keep=1)


def record_now(version: int, digest: str, base: str, publisher: str) -> Record:
    """The record of a version that is committed now."""
    return Record(version, digest, base, publisher, time.time())


def _remove_abandoned(parent: Path) -> None:
    """Remove the scratch spools of servers that were killed; a live one holds its lock."""
    for root in parent.glob(f"{_SCRATCH}*"):
        try:
            lock = _locked(root)
        except OSError:
            continue
        shutil.rmtree(root, ignore_errors=True)
        lock.close()


def _locked(root: Path) -> IO[str]:
    lock = (root / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise BlockingIOError(f"another server uses {root}") from None
    return lock


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

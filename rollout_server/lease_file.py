"""The file in which leases survive a restart: the last fencing number, and who holds what."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path


class LeaseFileError(ValueError):
    """The file of leases cannot be used; starting without it could hand out a number twice."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to publish a policy, for a while.

    Attributes:
        policy: its name.
        holder: which process writes, for people to read; a new process has a new one.
        owner: name of the caller who acquired it; nobody else can use it.
        fence: the fencing number.
        ttl_s: seconds that it lives without a heartbeat.
        expires_at: when it runs out, on the clock of :class:`Leases`.
    """

    policy: str
    holder: str
    owner: str
    fence: int
    ttl_s: float
    expires_at: float


def first_number() -> int:
    """Where to count from when nothing is remembered.

    Trainers of an earlier life may still be about. Milliseconds of the wall clock lie above any
    number that it can have come to.
    """
    return time.time_ns() // 1_000_000


def read_leases(file: Path, now: float) -> tuple[int, dict[str, Lease]]:
    """Last number and leases of a file; a server that starts for the first time has none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        leases = [Lease(**lease, expires_at=now + lease["ttl_s"]) for lease in document["leases"]]
        return int(document["last_fence"]), {lease.policy: lease for lease in leases}
    except FileNotFoundError:
        return first_number(), {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LeaseFileError(f"the leases in {file} cannot be read: {error!r}") from None


def write_leases(file: Path, last_fence: int, leases: dict[str, Lease]) -> None:
    """Replace the file in one step, on the disk and not only in its cache."""
    written = [
        {key: value for key, value in asdict(lease).items() if key != "expires_at"}
        for lease in leases.values()
    ]
    fresh = file.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as out:
        json.dump({"last_fence": last_fence, "leases": written}, out)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Numbers of versions: whoever asks at the same time, and when there is no room to write them."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from rollout_server.numbering import Numbering
from rollout_server.policies import Policy
from rollout_server.spool import Spool
from shared.errors import InsufficientStorage


@pytest.fixture
def policy() -> Policy:
    return Policy("default", 4, "0" * 32)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path, durable=True, keep=2)


def test_two_that_reserve_at_once_get_one_number(policy: Policy, spool: Spool) -> None:
    numbers = Numbering(policy, spool)

    async def both() -> None:
        await asyncio.gather(*(numbers.reserve() for _ in range(8)))

    asyncio.run(both())
    assert numbers.next() == 5
    assert Numbering(policy, spool).next() == 6  # the next process does not give it again


def test_a_full_disk_has_an_answer(
    policy: Policy, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    numbers = Numbering(policy, spool)
    monkeypatch.setattr(Spool, "reserve", full)
    with pytest.raises(InsufficientStorage):
        asyncio.run(numbers.reserve())

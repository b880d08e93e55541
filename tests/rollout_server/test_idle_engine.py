"""What an engine leaves to others while it has nothing to do."""

from __future__ import annotations

import time

from shared.client import RolloutClient
from tests.rollout_server.engines import engine_processes, server_process

WATCHED_S = 0.6


def test_an_engine_that_waits_leaves_the_cores_to_a_trainer(
    client: RolloutClient, server_url: str
) -> None:
    processes = engine_processes(server_process(server_url))
    assert set(processes) == {"core", "worker"}
    client.rollout([[5, 6]], group_size=1, max_tokens=2)
    before = {role: process.cpu_seconds for role, process in processes.items()}
    assert min(before.values()) > 0
    time.sleep(WATCHED_S)
    used = {role: process.cpu_seconds - before[role] for role, process in processes.items()}
    assert max(used.values()) < WATCHED_S / 4, used

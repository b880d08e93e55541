"""Trainer A is killed, trainer B takes its policy over: two processes, one server, one lease."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import Conflict
from shared.protocol import DELTA, FENCE_HEADER, SAFETENSORS
from tests.rollout_server.engines import LONG_PROMPT, PATIENCE_S, assert_made_by, greedy
from tests.rollout_server.support import (
    Weights,
    base_weights,
    eventually,
    lazy,
    post,
    sharpened,
    upload_of,
)
from tests.rollout_server.test_delta_publish import Recording, remembering, stepped

TTL_S = 3.0
STEPS = 2


def trainer_a(url: str, model: str, announce: Any = print) -> None:
    """A trainer of its own: leases the policy, publishes, tells, and goes on for ever."""
    # A test run in the background would hand on that it ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    weights, base = sharpened(base_weights(Path(model)), 1), DeltaBase()
    with RolloutClient(url) as client, client.lease(holder="trainer A", ttl=TTL_S) as lease:
        for step in range(STEPS):
            weights = stepped(weights, step)
            result = client.reload(lazy(weights.tensors), base=base, fence=lease.fence)
            announce(lease.fence, result.version, result.digest, flush=True)
        while True:
            time.sleep(0.1)
            try:
                assert lease.fence
            except Conflict:
                announce("lost", flush=True)
                return


@contextlib.contextmanager
def started(url: str, model: Path) -> Iterator[subprocess.Popen[str]]:
    """Trainer A as a process."""
    code = "import sys; from tests.rollout_server.test_swap_trainers import *; "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code} trainer_a(*sys.argv[1:])", url, str(model)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def published(process: subprocess.Popen[str]) -> tuple[int, int, str]:
    """Fence, version and digest of the last publish of trainer A."""
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(STEPS)]
    assert all(lines), "the trainer ended early"
    fence, version, digest = lines[-1]
    return int(fence), int(version), digest


def test_b_takes_over_from_a_that_was_killed(
    client: RolloutClient, server_url: str, tiny_model: Path, base: Weights, first: Weights
) -> None:
    with started(server_url, tiny_model) as a:
        fence, version, digest = published(a)
        with pytest.raises(Conflict, match="trainer A"), client.lease(holder="too early"):
            pass
        # Until here its heartbeats have kept the lease; from here on nobody does.
        a.send_signal(signal.SIGKILL)
        a.wait()

    wire = Recording()
    with (
        RolloutClient(server_url, timeout=PATIENCE_S, transport=wire) as b,
        b.lease(holder="trainer B", ttl=30, wait=PATIENCE_S) as lease,
    ):
        assert (fence_b := lease.fence) > fence

        # What A committed is what B finds, and its own copy of it is all that B needs.
        own = stepped(stepped(first, 0), 1)
        known = remembering(own.tensors)
        found = b.policy()
        assert (found["version"], found["digest"]) == (version, digest) == (version, known.digest)
        assert found["lease"]["holder"] == "trainer B"
        sample = b.rollout([LONG_PROMPT], group_size=1, max_tokens=30).samples[0]
        assert (sample.version, sample.digest) == (version, digest)
        assert_made_by(sample, lambda _: own)

        new = stepped(own, 2)
        result = b.reload(lazy(new.tensors), base=known, fence=lease.fence)
        assert (result.version, result.digest) == (version + 1, new.digest)
        assert wire.kinds == [DELTA]

        # A's last publish was long on its way; it arrives now, in one form or another.
        for late, kind in (
            (upload_of(stepped(own, 3).tensors), SAFETENSORS),
            (b"".join(remembering(own.tensors).encode(lazy(stepped(own, 3).tensors))), DELTA),
            (b"".join(remembering(new.tensors).encode(lazy(stepped(own, 3).tensors))), DELTA),
        ):
            answer = publish_with(server_url, fence, late, kind)
            assert answer.status_code == 409
            details = answer.json()["error"]["details"]
            assert (details["fence"], details["holder"]) == (lease.fence, "trainer B")
        assert publish_with(server_url, None, upload_of(own.tensors)).status_code == 409
        assert (b.policy()["version"], b.info().digest) == (version + 1, new.digest)

        # Or B starts afresh.
        reset = b.reset(fence=lease.fence)
        assert (reset.version, reset.digest) == (version + 2, base.digest)
        sample = b.rollout([LONG_PROMPT], group_size=1, max_tokens=30).samples[0]
        assert_made_by(sample, lambda _: base)

    # B has given the lease up; nobody needs to wait for its end.
    with client.lease(holder="next") as after:
        assert after.fence > fence_b


def publish_with(
    url: str, fence: int | None, raw: bytes, kind: str = SAFETENSORS
) -> httpx.Response:
    headers = {} if fence is None else {FENCE_HEADER: str(fence)}
    if kind == SAFETENSORS:
        headers["x-tito-digest"] = "trailer"
    return post(url, raw=raw, path="/reload", content_type=kind, headers=headers)


def test_a_that_was_frozen_finds_its_lease_lost(
    client: RolloutClient, server_url: str, tiny_model: Path, second: Weights
) -> None:
    with started(server_url, tiny_model) as a:
        fence, version, _ = published(a)
        a.send_signal(signal.SIGSTOP)
        with client.lease(holder="trainer B", ttl=30, wait=PATIENCE_S) as lease:
            result = client.reload(lazy(second.tensors), fence=lease.fence)
            assert result.version == version + 1
            a.send_signal(signal.SIGCONT)
            assert a.stdout is not None
            assert a.stdout.readline() == "lost\n"
            assert a.wait(60) == 0
            # On its way out A gave nothing up that was not its own.
            assert client.policy()["lease"]["fence"] == lease.fence
            assert publish_with(server_url, fence, upload_of(second.tensors)).status_code == 409
        assert client.policy()["version"] == version + 1
        assert greedy(client) == second.greedy(LONG_PROMPT, 10)


def test_a_that_stops_by_itself_frees_the_policy_at_once(
    client: RolloutClient, server_url: str, tiny_model: Path
) -> None:
    with started(server_url, tiny_model) as a:
        published(a)
        a.send_signal(signal.SIGINT)
        a.wait(60)
    assert client.policy()["lease"] is None
    with client.lease(holder="trainer B") as lease:
        assert lease.fence


def test_a_lease_that_ran_out_is_gone_even_if_nobody_wants_it(
    client: RolloutClient, server_url: str, tiny_model: Path, first: Weights
) -> None:
    with started(server_url, tiny_model) as a:
        fence, version, _ = published(a)
        a.send_signal(signal.SIGKILL)
        a.wait()
    eventually(lambda: client.policy()["lease"] is None, seconds=60)
    assert publish_with(server_url, fence, upload_of(first.tensors)).status_code == 409
    # A lone trainer needs no ceremony, now that nobody holds a lease.
    assert client.reload(lazy(first.tensors)).version == version + 1

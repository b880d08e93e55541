"""Channels into vLLM's own workers: labels, digests, samples in flight, a trainer that is killed.

Without GPUs, ``ipc`` is shared memory and ``nccl`` a socket; all else is as it is with them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.channel import Kind
from shared.client import RolloutClient
from shared.errors import WeightsRejected
from tests.rollout_server.channel_support import changed, named, sender_to
from tests.rollout_server.engines import (
    LONG_PROMPT,
    PATIENCE_S,
    assert_made_by,
    assert_tiles,
    greedy,
    in_flight,
)
from tests.rollout_server.support import Weights, eventually, lazy, make_live
from tests.rollout_server.test_channels import KILLED_TRAINER, KINDS, NORM


@pytest.mark.parametrize("kind", KINDS)
def test_samples_in_flight_go_on_under_what_a_channel_brings(
    kind: Kind, client: RolloutClient, server_url: str, first: Weights, second: Weights
) -> None:
    uploaded = client.reload(lazy(second.tensors))
    version = client.reload(lazy(first.tensors)).version
    sender = sender_to(client, kind, second)
    prompts = [[5, 6, number] for number in range(100, 104)]
    with in_flight(server_url, prompts, group_size=2, max_tokens=600, ignore_eos=True) as rolls:
        result = sender.publish(named(second.tensors), None)
        rollouts = [roll.result(PATIENCE_S) for roll in rolls]
    assert (result.version, result.digest) == (version + 1, uploaded.digest)
    assert greedy(client) == second.greedy(LONG_PROMPT, 10)
    made_by = {first.digest: first, second.digest: second}
    for sample in (sample for rollout in rollouts for sample in rollout.samples):
        assert_tiles(sample)
        assert_made_by(sample, made_by.__getitem__)
    # A second time through the same buffers, and what is refused changes nothing.
    with pytest.raises(WeightsRejected):
        sender.publish(named(changed(first.tensors, NORM, float("nan"))), None)
    assert greedy(client) == second.greedy(LONG_PROMPT, 10)
    again = sender.publish(named(first.tensors), None, durable=True)
    assert (again.version, again.digest, again.durable) == (version + 2, first.digest, True)
    assert greedy(client) == first.greedy(LONG_PROMPT, 10)
    sender.close()


def test_a_trainer_killed_in_the_middle_of_a_broadcast(
    client: RolloutClient, server_url: str, tiny_model: Path, first: Weights, second: Weights
) -> None:
    version = make_live(client, second)
    lease = client.lease(holder="run")
    with lease:
        command = [sys.executable, "-c", KILLED_TRAINER, server_url, str(tiny_model), "nccl"]
        trainer = subprocess.Popen([*command, str(lease.fence)], stdout=subprocess.PIPE)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"in the middle\n"
        eventually(lambda: client.policy()["state"] == "staging", seconds=60)
        # The transfer that is stuck holds nobody up.
        assert greedy(client) == second.greedy(LONG_PROMPT, 10)
        trainer.kill()
        trainer.wait()
        eventually(lambda: client.policy()["state"] == "live", seconds=60)
        assert (client.info().version, client.info().digest) == (version, second.digest)
        sender = sender_to(client, "nccl", first)
        result = sender.publish(named(first.tensors), lease.fence)
        assert result.digest == first.digest
        assert greedy(client) == first.greedy(LONG_PROMPT, 10)
        sender.close()

"""A trainer that is killed in the middle of a broadcast, and the one that comes after it.

    python -m tests.bench.killed_trainer URL MODEL DEVICE

is the trainer that waits to be killed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

from shared.client import RolloutClient
from tests.bench.channel_ways import Served
from tests.bench.checkpoints import named, random_weights, specs_of_model
from tests.bench.results import report, seconds
from tests.bench.servers import roll
from trainer.channels import ChannelSender

_MIDDLE = "in the middle"


def killed(served: Served, device: torch.device) -> None:
    """What becomes of the server when that trainer is killed."""
    client = served.client
    before = client.info().digest
    victim = _in_the_middle(served, device)
    _await_state(client, "staging")
    meanwhile = seconds(lambda: roll(client, 1))
    victim.kill()
    start = time.perf_counter()
    victim.wait()
    _await_state(client, "live")
    noticed = time.perf_counter() - start
    assert roll(client, 1) == before, "the last good version is not served"
    serving = time.perf_counter() - start
    weights = random_weights(served.specs, device, 5)
    sender = ChannelSender(client, "nccl", served.specs, first=None, device=device)
    start = time.perf_counter()
    result = sender.publish(named(weights), None)
    report(
        f"{served.dims}: trainer killed in a broadcast",
        token_during_the_broadcast=meanwhile,
        until_noticed=noticed,
        until_served=serving,
        next_trainer_published_after=time.perf_counter() - start,
        served=roll(client, 1) == result.digest,
    )
    sender.close()


def _in_the_middle(served: Served, device: torch.device) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench.killed_trainer"]
    command += [served.url, str(served.model), str(device)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    # NCCL may print its version before.
    assert any(line.strip() == _MIDDLE for line in victim.stdout), "the victim did not begin"
    return victim


def _await_state(client: RolloutClient, state: str) -> None:
    while client.policy()["state"] != state:
        time.sleep(0.002)


def main(url: str, model: Path, device: torch.device) -> None:
    """Send half of a model, and wait to be killed."""
    specs = specs_of_model(model)
    tensors = named(random_weights(specs, device, 6))

    def stall() -> torch.Tensor:
        print(_MIDDLE, flush=True)
        time.sleep(600)
        raise AssertionError

    middle = len(tensors) // 2
    tensors[middle] = (tensors[middle][0], stall)
    client = RolloutClient(url)
    ChannelSender(client, "nccl", specs, first=None, device=device).publish(tensors, None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), torch.device(sys.argv[3]))

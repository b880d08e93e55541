"""Publishing through GPU memory, beside plain copies of the same bytes, HTTP and vLLM's own engine.

    python -m tests.bench.bench_channels [--dims 0.6b 4b 8b] [--kinds ipc nccl] [--repeats 5]
        [--device cuda|cpu] [--others http delta disk] [--others-of 0.6b]
        [--kill] [--peers nccl disk]

Starts a real server for each model, of random weights, and publishes other random weights to it:
`ipc` from a process on the same GPU and on the second, `nccl` from the second. With `--device
cpu`, shared memory and sockets stand in for both. A publish is timed from the call to its answer,
and to the first token under the new weights. `--others` publishes weights as large by HTTP, as a
delta, and from a directory where somebody wrote them. `--kill` kills a trainer in the middle of a
transfer. `--peers` times vLLM's NCCL weight transfer, and its `reload_weights` from a directory.
Prints one JSON line for each result; times are seconds and medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from shared.channel import Kind
from shared.client import RolloutClient
from shared.errors import TitoError
from tests.bench.channel_peers import PEERS
from tests.bench.channel_ways import OTHERS, Served, by_channel
from tests.bench.checkpoints import specs_of_model, staging_folder, written_root
from tests.bench.killed_trainer import killed
from tests.bench.models import DIMS, make_model
from tests.bench.results import report
from tests.bench.servers import CONTEXT, READY_S, roll, rollout_server, set_environment

Work = Callable[[], None]


def main() -> None:
    """Everything that was asked for, one after the other; one failure does not end it."""
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    set_environment()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _run(asked, Path(scratch))
    finally:
        for folder in (staging_folder(), written_root()):
            shutil.rmtree(folder, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dims", nargs="+", choices=DIMS, default=["tiny"])
    parser.add_argument("--kinds", nargs="*", choices=["ipc", "nccl"], default=["ipc", "nccl"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=[])
    parser.add_argument("--others-of", nargs="*", choices=DIMS, help="the first model if not given")
    parser.add_argument("--kill", action="store_true", help="a trainer of the first model")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="for the last model")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this directory")
    parser.add_argument("--gate", type=Path, help="measure when this file is there")
    return parser.parse_args()


def _run(asked: argparse.Namespace, scratch: Path) -> None:
    gpus = torch.cuda.device_count() if asked.device == "cuda" else 0
    near = torch.device("cuda", 0) if gpus else torch.device("cpu")
    far = torch.device("cuda", 1) if gpus > 1 else near
    gpu = torch.cuda.get_device_name() if gpus else None
    report("setting", gpu=gpu, gpus=gpus, dims=asked.dims, repeats=asked.repeats)
    models = {dims: make_model(scratch / dims, DIMS[dims], CONTEXT) for dims in asked.dims}
    if asked.kinds or asked.others or asked.kill:
        with ExitStack() as stack:
            served = _all_served(models, asked.logs or scratch, stack)
            while asked.gate is not None and not asked.gate.exists():
                time.sleep(0.1)
            _each(_planned(asked, served, near, far))
    dims = asked.dims[-1]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the peers' would be among the results
    _each([partial(PEERS[name], dims, models[dims], asked.repeats) for name in asked.peers])


def _all_served(models: dict[str, Path], logs: Path, stack: ExitStack) -> dict[str, Served]:
    """A server of each model, on the first GPU; all start at once."""
    flags = ["--load-format", "dummy", "--eager", "--kv-cache-gib", "1", "--memory-share", "0.25"]
    flags += ["--staging-dir", str(staging_folder()), "--reload-dirs", str(written_root())]
    servers = {
        dims: stack.enter_context(
            rollout_server(model, logs / f"server-{dims}.log", *flags, CUDA_VISIBLE_DEVICES="0")
        )
        for dims, model in models.items()
    }
    served = {}
    for dims, server in servers.items():
        server.wait_ready("/readyz")
        client = stack.enter_context(RolloutClient(server.url, timeout=READY_S))
        roll(client, 1)
        served[dims] = Served(dims, models[dims], specs_of_model(models[dims]), server.url, client)
    return served


def _planned(
    asked: argparse.Namespace, served: dict[str, Served], near: torch.device, far: torch.device
) -> list[Work]:
    """What is to be measured, the most telling first: a run may be cut short.

    Args:
        near: the device that the servers are on.
        far: another one, if there is one.
    """
    first, last = asked.dims[0], asked.dims[-1]
    telling: list[tuple[str, Kind, torch.device]] = [
        (first, "ipc", near), (last, "nccl", far), (first, "nccl", far)
    ]  # fmt: skip
    ways: list[tuple[Kind, torch.device]] = [("ipc", near), ("nccl", far), ("ipc", far)]
    everything = [(dims, kind, device) for kind, device in ways for dims in asked.dims]
    work: list[Work] = [
        partial(by_channel, served[dims], kind, device, asked.repeats)
        for dims, kind, device in dict.fromkeys(telling + everything)
        if kind in asked.kinds
    ]
    work += [
        partial(OTHERS[other], served[dims], near, asked.repeats)
        for dims in asked.others_of or [first]
        for other in asked.others
    ]
    if asked.kill:
        work.insert(3, partial(killed, served[first], far))
    return work


def _each(work: Sequence[Work]) -> None:
    """Do some work; what fails is told and the rest goes on."""
    for part in work:
        try:
            part()
        except (TitoError, RuntimeError, AssertionError, OSError, ValueError) as error:
            report("failed", error=f"{type(error).__name__}: {error}")
            traceback.print_exc()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""What a publish costs, beside the least that the same bytes could cost and beside vLLM alone.

    python -m tests.bench.bench_publish [--megabytes 500] [--repeats 5]

Builds a Qwen3-shaped model of random weights and that size, takes real AdamW steps with it, and
publishes the results to a real server on this machine. Prints one JSON line for each result; times
are seconds and medians, ratios are medians of the ratios within one repeat. Needs about sixteen
times the model's size in memory, and three times in temporary files.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from tests.bench.checkpoints import Tensors, lazy, size_of, write
from tests.bench.publish_copies import bare_uvicorn, http_copy, memory_copy, socket_copy
from tests.bench.publish_model import LEARNING_RATE, save, trained
from tests.bench.publish_stalls import stalls
from tests.bench.publish_ways import SharedMemory, Timed, TimedClient, publish, serving
from tests.bench.results import median, ratio, report, seconds
from tests.bench.servers import set_environment
from tests.bench.vllm_peer import reload_seconds


class Copies:
    """Plain copies of the same bytes, one of each kind for each publish.

    Args:
        size: of the weights, bytes.
        bare: client of a web server that throws uploads away.
    """

    def __init__(self, size: int, bare: Any) -> None:
        self._size, self._bare = size, bare
        self._target = np.zeros(size, np.uint8)
        self._memory: list[float] = []
        self._socket: list[float] = []
        self._http: list[float] = []

    def add(self, weights: Tensors) -> None:
        """One more of each."""
        target = self._target
        self._memory.append(seconds(lambda: memory_copy(weights, target)))
        self._socket.append(seconds(lambda: socket_copy(weights, target.data)))
        self._http.append(seconds(lambda: http_copy(weights, self._bare)))

    def report(self) -> None:
        """What they took by themselves."""
        report("memory copy", bytes=self._size, seconds=median(self._memory))
        report("loopback socket copy", bytes=self._size, seconds=median(self._socket))
        report(
            "peer: upload to bare uvicorn, thrown away",
            bytes=self._size,
            seconds=median(self._http),
            ratio_to_socket_copy=ratio(self._http, self._socket),
        )

    def report_beside(self, what: str, times: list[float]) -> None:
        """Something else that was done with the same bytes, once each time."""
        report(
            what,
            bytes=self._size,
            seconds=median(times),
            ratio_to_socket_copy=ratio(times, self._socket),
            ratio_to_memory_copy=ratio(times, self._memory),
            ratio_to_bare_uvicorn=ratio(times, self._http),
        )


def full_publishes(
    client: TimedClient, versions: list[Tensors], repeats: int, log: Path
) -> list[Timed]:
    """By HTTP, which are returned, and by shared memory, beside plain copies of the same bytes."""
    with bare_uvicorn(log) as bare, closing(SharedMemory(client, versions[1])) as memory:
        copies = Copies(size_of(versions[0]), bare)
        uploaded, shared = [], []
        for index in range(repeats):
            weights = versions[index % 2]
            copies.add(weights)
            uploaded.append(publish(client, weights))
            shared.append(memory.publish(weights))
    copies.report()
    for what, runs, stages, staged in (
        ("full", uploaded, ["upload"], "upload alone"),
        ("by shared memory", shared, ["write", "transfer", "verify"], "staged and verified"),
    ):
        times = [sum(run.result.timings[stage] for stage in stages) for run in runs]
        copies.report_beside(f"{what}, {staged}", times)
        copies.report_beside(f"{what}, whole publish", [run.total for run in runs])
    _report_stages("full", uploaded)
    _report_stages("by shared memory", shared)
    return uploaded


def _report_stages(what: str, runs: list[Timed]) -> None:
    """Where the time of publishes went."""
    stages = runs[0].result.timings
    report(
        f"{what}, by stage",
        paused_seconds=median(run.paused for run in runs),
        **{stage: median(run.result.timings[stage] for run in runs) for stage in stages},
    )


def deltas(client: RolloutClient, versions: list[Tensors], full_seconds: float) -> None:
    """One optimizer step after the other, each published as a delta."""
    base, size = DeltaBase(), size_of(versions[0])
    publish(client, versions[0], base)
    runs, sizes, shares = [], [], []
    for before, after in itertools.pairwise(versions):
        changed = sum(int((before[name] != after[name]).sum()) for name in after)
        shares.append(changed / (size / 2))
        sizes.append(sum(map(len, base.encode(lazy(after)))))
        runs.append(publish(client, after, base))
    report(
        f"delta of an AdamW step at {LEARNING_RATE}",
        changed_share=median(shares),
        bytes=int(median(sizes)),
        bytes_ratio_to_full=median(sizes) / size,
        seconds=median(run.total for run in runs),
        seconds_ratio_to_full=median(run.total for run in runs) / full_seconds,
        paused_seconds=median(run.paused for run in runs),
        upload=median(run.result.timings["upload"] for run in runs),
        verify=median(run.result.timings["verify"] for run in runs),
    )


def peer(folders: list[Path], weights: Tensors, full: list[Timed], repeats: int) -> None:
    """A checkpoint written by one process and reloaded by vLLM's own means."""
    copy = folders[0].parent / "written"
    copy.mkdir()
    writing = median(seconds(partial(write, weights, copy)) for _ in range(repeats))
    paused = median(reload_seconds(folders, repeats)[1:])
    report(
        "peer: vLLM's reload_weights from disk",
        write_seconds=writing,
        paused_seconds=paused,
        seconds=writing + paused,
        tito_full_ratio=median(run.total for run in full) / (writing + paused),
        tito_paused_ratio=median(run.paused for run in full) / paused,
    )


def main() -> None:
    """Everything, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500, help="size of the model")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement")
    asked = parser.parse_args()
    set_environment()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the peer's would be among the results
    config, versions = trained(asked.megabytes, steps=4)
    report(
        "setting",
        model_bytes=size_of(versions[0]),
        layers=config.num_hidden_layers,
        cores=os.cpu_count(),
        threads=os.environ.get("OMP_NUM_THREADS", "all"),
        repeats=asked.repeats,
        load=os.getloadavg()[0],
    )
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folders = [save(scratch / f"{i}", config, versions[i]) for i in range(2)]
        with serving(folders[0]) as client:
            publish(client, versions[1])  # warms up
            full = full_publishes(client, versions, asked.repeats, scratch / "uvicorn.log")
            deltas(client, versions, median(run.total for run in full))
            stalls(client, versions, asked.repeats)
        peer(folders, versions[1], full, asked.repeats)


if __name__ == "__main__":
    main()

"""Measuring optimizer steps within a contender's process, for ``bench_trainer.py``."""

from __future__ import annotations

import argparse
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_WARM_UP = 2
"""Steps of each process that are left out."""


class Steps:
    """Times, and the memory at the highest, from its creation on."""

    def __init__(self, device: str) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.cuda = device == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / 2**20
        else:
            self.before = _resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far

    def now(self) -> tuple[float, float]:
        """By the clock and of the processor, once the device has done its work."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def __call__(self, work: Callable[[], Any]) -> Any:
        """One step; returns what the work does."""
        wall, cpu = self.now()
        result = work()
        ended = self.now()
        self.add(ended[0] - wall, ended[1] - cpu)
        return result

    def add(self, seconds: float, cpu_seconds: float) -> None:
        """One step that was measured by somebody else."""
        self.seconds.append(seconds)
        self.cpu_seconds.append(cpu_seconds)

    def result(self, gradient_norm: float) -> dict[str, Any]:
        """What a contender's process tells."""
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.cuda else _resident("VmHWM")
        return {
            "seconds": self.seconds[_WARM_UP:],
            "cpu_seconds": self.cpu_seconds[_WARM_UP:],
            "first_seconds": self.seconds[0],
            "peak_mib": peak,
            "grown_mib": peak - self.before,
            "gradient_norm": gradient_norm,
        }


def _resident(name: str) -> float:
    """MiB, of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


@contextmanager
def turn(arguments: argparse.Namespace) -> Iterator[None]:
    """Alone among the contenders that were started together."""
    with Path(arguments.gate or os.devnull).open("a", encoding="utf-8") as file:
        if arguments.gate:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def profile(work: Callable[[], Any], arguments: argparse.Namespace) -> None:
    """Add to a file the 25 kernels that took longest, and what the step took in all."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = 1000 * (time.perf_counter() - started)
    kernels = [e for e in recorded.key_averages() if e.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / 1000
    lines = [
        f"{arguments.dims} {arguments.contender}: step {wall:.1f} ms under the profiler, "
        f"kernels {busy:.1f} ms"
    ]
    for e in kernels[:25]:
        spent = e.self_device_time_total / 1000
        lines.append(f"{spent:8.2f} ms {100 * spent / busy:5.1f}% {e.count:5d}  {e.key[:140]}")
    with Path(arguments.profile).open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n\n")

"""A worker whose loads go wrong when a file says so; it runs inside vLLM's worker process.

The file is named by an environment variable, since nothing else reaches a worker from a test. Each
line holds one word and perhaps a tensor's name, is meant for one load, and is removed when it is
read, so that the load after the last one succeeds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rollout_server.vllm_engine import VLLMEngine
from rollout_server.weight_check import Repacking
from rollout_server.worker_plugin import WeightLoader

FAULT_VARIABLE = "TITO_TEST_FAULT"


class FaultyEngine(VLLMEngine):
    """vLLM with workers that can be told to fail."""

    worker_extension = "tests.rollout_server.faulty_worker.FaultyLoader"


class FaultyLoader(WeightLoader):
    """Loads as it should unless the fault file is there.

    ``raise`` and ``kill`` happen after half of the tensors, ``corrupt NAME`` changes the lowest
    bit of the last element of one tensor without a word. Among several workers it is the last one,
    which holds that element if any does alone, that goes wrong.
    """

    def _tito_load(self, staged: Any, repacking: Repacking) -> None:
        last = self.rank == self.vllm_config.parallel_config.world_size - 1
        match _fault() if last else []:
            case ["raise"]:
                staged = _Interrupted(staged, _raise)
            case ["kill"]:
                staged = _Interrupted(staged, _die)
            case ["corrupt", name]:
                staged = _Corrupted(staged, name)
        super()._tito_load(staged, repacking)


def _fault() -> list[str]:
    path = Path(os.environ[FAULT_VARIABLE])
    if not path.exists():
        return []
    line, *later = path.read_text().splitlines()
    path.write_text("\n".join(later)) if later else path.unlink()
    return line.split()


def _raise() -> None:
    raise OSError("the worker tripped over a cable")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Interrupted:
    """A checkpoint during whose reading something happens."""

    def __init__(self, staged: Any, act: Callable[[], None]) -> None:
        self._staged, self._act = staged, act
        self.read = staged.read

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = list(self._staged)
        yield from tensors[: len(tensors) // 2]
        self._act()
        yield from tensors[len(tensors) // 2 :]


class _Corrupted:
    """A checkpoint that gives one wrong value while it is loaded, and the right one afterwards."""

    def __init__(self, staged: Any, name: str) -> None:
        self._staged, self._name = staged, name
        self.read = staged.read

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._staged:
            if name == self._name:
                tensor = tensor.clone()  # noqa: PLW2901 - the file's own must stay as it is
                tensor.view(-1).view(torch.int16)[-1] ^= 1
            yield name, tensor

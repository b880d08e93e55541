"""The peers of ``bench_channels.py``: what vLLM has itself for new weights."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.channel_ways import wait
from tests.bench.checkpoints import Tensors, random_weights, specs_of_model, write, written_folder
from tests.bench.results import median, report, seconds
from tests.bench.servers import free_port
from tests.bench.vllm_peer import bare_engine, reload_seconds


def by_reloading(dims: str, model: Path, repeats: int) -> None:
    """vLLM's ``reload_weights`` from a directory where this process writes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with written_folder("peer") as folder:
        for file in model.iterdir():
            shutil.copy(file, folder)
        weights = random_weights(specs_of_model(model), device, 8)
        _, written = (seconds(partial(write, weights, folder)) for _ in range(2))
        del weights
        times = reload_seconds([folder], repeats, gpu_memory_utilization=0.4)
    paused = median(times[1:])
    report(
        f"{dims} by vLLM's reload_weights, nothing verified",
        written=written,
        paused=paused,
        seconds=written + paused,
        all_seconds=times,
    )


# vLLM's NCCL weight transfer.


def by_nccl(dims: str, model: Path, repeats: int) -> None:
    """vLLM's NCCL weight transfer from the second GPU, paused as its documentation does."""
    device = torch.device("cuda", 1)
    weights = random_weights(specs_of_model(model), device, 7)
    engine = _Engine(model)
    times = []
    with torch.cuda.device(device):
        sender = _sender(engine, weights)
        for _ in range(repeats + 1):
            engine.pause()
            wait(device)
            begun = time.perf_counter()
            sender.send_weights()
            wait(device)
            times.append(time.perf_counter() - begun)
            engine.resume()
    report(f"{dims} by vLLM's NCCL engine", seconds=median(times[1:]), all_seconds=times)
    engine.shutdown()


class _Engine:
    """vLLM, on an event loop in a thread of its own, so that one may wait for it."""

    def __init__(self, model: Path) -> None:
        from vllm.config import WeightTransferConfig

        os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # for the engine's process; this one sees both
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        settings = {
            "load_format": "dummy",
            "gpu_memory_utilization": 0.25,
            "weight_transfer_config": WeightTransferConfig(backend="nccl"),
        }

        async def start() -> Any:  # within the loop, as it has to be
            return bare_engine(model, **settings)

        self._llm = self._do(start())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, method: str, **kwargs: Any) -> None:
        """A method of its workers."""
        self._do(self._llm.collective_rpc(method, kwargs=kwargs))

    def pause(self) -> None:
        self._do(self._llm.pause_generation(mode="keep", clear_cache=True))

    def resume(self) -> None:
        self._do(self._llm.resume_generation())

    def shutdown(self) -> None:
        self._llm.shutdown()


class _Client:
    """What vLLM's sender calls in the process of its engine."""

    def __init__(self, engine: _Engine) -> None:
        self._call = engine.call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002
        self._call("finish_weight_update")


def _sender(engine: _Engine, weights: Tensors) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine,
    )

    class Source(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in weights.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(weights.items())

    info = NCCLTrainerInitInfo("127.0.0.1", free_port(), world_size=2, rank=0)
    return NCCLTrainerWeightTransferEngine.trainer_init(
        info, client=_Client(engine), source=Source()
    )


PEERS = {"nccl": by_nccl, "disk": by_reloading}

"""Weights that lie on the GPU already: digests, a look for NaN, loading, comparing.

    python -m tests.bench.bench_load [--dims 0.6b 4b 8b] [--repeats 7] [--constants]

The bare vLLM model in this process, without an engine, and random tensors with the names of a
checkpoint of Qwen3 dimensions. Prints one JSON line for each result: medians, beside a plain copy
of the same bytes on the device and vLLM's own ``load_weights`` from the same tensors. Without a GPU
it runs as well, which shows that it works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout_server import device_digest
from rollout_server.device_digest import DeviceVerification
from rollout_server.load_plan import LoadPlan
from rollout_server.verification import HostVerification, Verification
from rollout_server.worker_buffer import views
from shared.channel import Layout
from shared.tensor_hash import tensor_hash
from shared.weights import TensorSpec
from tests.bench.models import DIMS
from tests.bench.results import report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config_of(dims: str) -> Qwen3Config:
    """As Qwen3, with random weights."""
    shape: dict[str, Any] = {"tie_word_embeddings": True, **DIMS[dims]}
    config = Qwen3Config(**shape, max_position_embeddings=1024)
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def layout_of(config: Qwen3Config) -> Layout:
    """How a trainer would send its checkpoint."""
    with torch.device("meta"):
        named = list(Qwen3ForCausalLM(config).named_parameters())
    return Layout.of(TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in named)


def random_buffer(layout: Layout, seed: int) -> Tensor:
    """Random tensors, one after the other."""
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=DEVICE)
    values = buffer.view(torch.bfloat16)
    for piece in values.split(1 << 30):
        piece.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
    return buffer


def looked(verification: Verification, *ends: int) -> Any:
    """What is found in a buffer that is there up to each of these."""
    verification.begin()
    for end in ends:
        verification.arrived(end)
    return verification.finished()


def vllm_model(config: Qwen3Config, folder: Path) -> nn.Module:
    """vLLM's model with plain parameters, as a worker on a GPU has it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.save_pretrained(folder)
    asked = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=1024, enforce_eager=True
    )
    vllm_config = asked.create_engine_config()
    with set_current_vllm_config(vllm_config):
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend)
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device(DEVICE):
            model: nn.Module = initialize_model(vllm_config)
            return model


def seconds(act: Callable[[], Any], repeats: int, warm_up: int = 2) -> float:
    """Median wall time of something, until the device has done it."""
    found = []
    for _ in range(warm_up + repeats):
        _wait()
        start = time.perf_counter()
        act()
        _wait()
        found.append(time.perf_counter() - start)
    return statistics.median(found[warm_up:])


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Bench:
    """One model's dimensions."""

    def __init__(self, dims: str, repeats: int) -> None:
        self._dims, self._repeats = dims, repeats
        self._config = config_of(dims)
        self._layout = layout_of(self._config)
        self._buffers = [random_buffer(self._layout, seed) for seed in (0, 1)]
        self._bytes = self._layout.nbytes
        spare = torch.empty_like(self._buffers[0])
        self._copy_s = seconds(lambda: spare.copy_(self._buffers[0]), repeats)
        self._say("plain copy", self._copy_s)

    def _say(self, what: str, took: float, **more: Any) -> None:
        report(
            what,
            dims=self._dims,
            gigabytes=self._bytes / 1e9,
            milliseconds=took * 1e3,
            gigabytes_per_second=self._bytes / took / 1e9,
            of_plain_copy=took / self._copy_s,
            **more,
        )

    def _verification(self) -> Verification:
        if DEVICE == "cuda":
            return DeviceVerification(self._buffers[0], self._layout)
        return HostVerification(self._buffers[0], self._layout)

    def digests(self) -> None:
        """Right for every tensor, and how fast, with the look for values that are not finite."""
        start = time.perf_counter()
        verification = self._verification()
        self._say("tables of the digests", time.perf_counter() - start)
        found = looked(verification, self._bytes)
        wanted = [
            tensor_hash(_host_bytes(tensor))
            for tensor in views(self._buffers[0], self._layout).values()
        ]
        wrong = sum(one != other for one, other in zip(found.hashes, wanted, strict=True))
        took = seconds(lambda: looked(verification, self._bytes), self._repeats)
        self._say("digests and finite", took, wrong=wrong, not_finite=found.not_finite)
        if DEVICE == "cuda":
            for name, spent in self._kernels(verification):
                self._say(f"digests, {name}", spent)
        self._in_pieces(verification, found)

    def _in_pieces(self, verification: Verification, found: Any) -> None:
        """The same piece after piece, and what is left to do when the last has come."""
        ends = [end for _, end in self._layout.pieces()]
        times = []
        for _ in range(self._repeats + 2):
            verification.begin()
            for end in ends[:-1]:
                verification.arrived(end)
            _wait()
            start = time.perf_counter()
            verification.arrived(ends[-1])
            agrees = verification.finished() == found
            times.append(time.perf_counter() - start)
        self._say("digests, after the last piece", statistics.median(times[2:]), agrees=agrees)
        took = seconds(lambda: looked(verification, *ends), self._repeats)
        self._say("digests, by pieces", took)

    def _kernels(self, verification: Verification) -> Iterator[tuple[str, float]]:
        """Time on the device of what a look launches."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            looked(verification, self._bytes)
            _wait()
        for event in profile.key_averages():
            if event.device_time_total > 20:
                yield event.key[:40], event.device_time_total / 1e6

    def constants(self) -> None:
        """Whether the constants of the kernels are well chosen."""
        chosen, verification = device_digest._BLOCKS_AT_ONCE, self._verification()
        for blocks in (1, 2, 4, 8):
            device_digest._BLOCKS_AT_ONCE = blocks
            looked(verification, self._bytes)
            for name, took in self._kernels(verification):
                self._say(f"constants, {name}", took, blocks_at_once=blocks)
        device_digest._BLOCKS_AT_ONCE = chosen

    def loads(self, folder: Path) -> None:
        """The plan against the loaders that it was recorded from."""
        model = vllm_model(self._config, folder)
        one, other = (views(buffer, self._layout) for buffer in self._buffers)
        load: Any = model.load_weights
        with torch.no_grad():
            took = seconds(lambda: load(one.items()), self._repeats)
        self._say("peer: vLLM's load_weights", took)
        start = time.perf_counter()
        plan = LoadPlan.recorded(model, one)
        _wait()
        self._say("plan recorded", time.perf_counter() - start)
        self._say("apply, same storage", seconds(lambda: plan.apply(one), self._repeats))
        stages = iter([other, one] * self._repeats + [other, one, one])
        self._say("apply, other storage", seconds(lambda: plan.apply(next(stages)), self._repeats))
        plan.apply(one)
        wrong = plan.differing(one)
        took = seconds(lambda: plan.differing(one), self._repeats)
        self._say("differing", took, wrong=wrong, unlike=len(plan.differing(other)))
        name, parameter = list(model.named_parameters())[-2]
        parameter.data.view(-1).view(torch.int16)[-1] ^= 1
        report("one bit flipped", dims=self._dims, parameter=name, noticed=plan.differing(one))


def _host_bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).cpu().numpy().data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--dims", nargs="+", choices=DIMS, default=["tiny"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--constants", action="store_true", help="try others, on a GPU")
    parser.add_argument("--loads", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    for dims in asked.dims:
        bench = Bench(dims, asked.repeats)
        bench.digests()
        if asked.constants and DEVICE == "cuda":
            bench.constants()
        # vLLM builds one model in a process.
        if asked.loads and dims == asked.dims[-1]:
            with tempfile.TemporaryDirectory() as scratch:
                bench.loads(Path(scratch))
        del bench
    print(json.dumps({"bench": "done", "dims": asked.dims}), flush=True)


if __name__ == "__main__":
    main()

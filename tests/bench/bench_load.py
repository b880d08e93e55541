"""Weights that lie on the GPU already: digests, a look for NaN, loading, comparing.

    python -m tests.bench.bench_load [--dims 0.6b|4b] [--repeats 7] [--constants]

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
import xxhash
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout_server import device_digest
from rollout_server.device_digest import not_finite, tensor_digests
from rollout_server.load_plan import LoadPlan
from tests.bench.bench_rollout import DIMS, report

Tensors = dict[str, Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config_of(dims: str) -> Qwen3Config:
    """As Qwen3, with random weights."""
    shape: dict[str, Any] = dict(DIMS[dims])
    config = Qwen3Config(**shape, max_position_embeddings=1024, tie_word_embeddings=True)
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def checkpoint(config: Qwen3Config, seed: int) -> Tensors:
    """Random tensors, one after the other in one buffer, as a trainer would send them."""
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in Qwen3ForCausalLM(config).named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.bfloat16, device=DEVICE)
    buffer.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
    pieces = zip(shapes.items(), buffer.split(sizes), strict=True)
    return {name: piece.view(shape) for (name, shape), piece in pieces}


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

    def __init__(self, dims: str, repeats: int, folder: Path) -> None:
        self._dims, self._repeats = dims, repeats
        config = config_of(dims)
        self._sets = [checkpoint(config, seed) for seed in (0, 1)]
        self._bytes = sum(tensor.nbytes for tensor in self._sets[0].values())
        self._model = vllm_model(config, folder)
        spare = torch.empty(self._bytes // 2, dtype=torch.bfloat16, device=DEVICE)
        whole = next(iter(self._sets[0].values())).as_strided(spare.shape, (1,), 0)
        self._copy_s = seconds(lambda: spare.copy_(whole), repeats)
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

    def digests(self) -> None:
        """Right for every tensor, and how fast."""
        tensors = self._sets[0]
        wrong = [
            name
            for name, digest in tensor_digests(tensors).items()
            if digest != xxhash.xxh3_128_hexdigest(_host_bytes(tensors[name]))
        ]
        took = seconds(lambda: tensor_digests(tensors), self._repeats)
        self._say("digests", took, wrong=wrong)
        if DEVICE == "cuda":
            for name, spent in self._kernels(tensors):
                self._say(f"digests, {name}", spent)
        took = seconds(lambda: not_finite(tensors), self._repeats)
        self._say("not finite", took, wrong=not_finite(tensors))

    def _kernels(self, tensors: Tensors) -> Iterator[tuple[str, float]]:
        """Time on the device of what a call launches."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            tensor_digests(tensors)
            _wait()
        for event in profile.key_averages():
            if event.device_time_total > 50:
                yield event.key[:40], event.device_time_total / 1e6

    def unrolling(self) -> None:
        """Whether the constants of the kernels are well chosen."""
        chosen = device_digest._UNROLL, device_digest._BLOCKS_PER_PROGRAM
        for unroll, blocks in ((32, 64), (64, 64), (128, 32), (128, 128)):
            device_digest._UNROLL, device_digest._BLOCKS_PER_PROGRAM = unroll, blocks
            names = {"block_sums": 0.0, "scan_blocks": 0.0}
            tensor_digests(self._sets[0])
            names |= dict(self._kernels(self._sets[0]))
            took = {name: names[name] * 1e3 for name in ("block_sums", "scan_blocks")}
            report("constants", dims=self._dims, unroll=unroll, blocks=blocks, **took)
        device_digest._UNROLL, device_digest._BLOCKS_PER_PROGRAM = chosen

    def loads(self) -> None:
        """The plan against the loaders that it was recorded from."""
        load: Any = self._model.load_weights
        with torch.no_grad():
            took = seconds(lambda: load(self._sets[0].items()), self._repeats)
        self._say("peer: vLLM's load_weights", took)
        start = time.perf_counter()
        plan = LoadPlan.recorded(self._model, self._sets[0])
        _wait()
        self._say("plan recorded", time.perf_counter() - start)
        one, other = self._sets
        self._say("apply, same storage", seconds(lambda: plan.apply(one), self._repeats))
        stages = iter([other, one] * self._repeats + [other, one, one])
        self._say("apply, other storage", seconds(lambda: plan.apply(next(stages)), self._repeats))
        plan.apply(one)
        wrong = plan.differing(one)
        took = seconds(lambda: plan.differing(one), self._repeats)
        self._say("differing", took, wrong=wrong, unlike=len(plan.differing(other)))
        name, parameter = list(self._model.named_parameters())[-2]
        parameter.data.view(-1).view(torch.int16)[-1] ^= 1
        report("one bit flipped", dims=self._dims, parameter=name, noticed=plan.differing(one))


def _host_bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).cpu().numpy().data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--dims", choices=DIMS, default="tiny")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--constants", action="store_true", help="try others, on a GPU")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(asked.dims, asked.repeats, Path(scratch))
        bench.loads()
        bench.digests()
        if asked.constants:
            bench.unrolling()
    print(json.dumps({"bench": "done", "dims": asked.dims}), flush=True)


if __name__ == "__main__":
    main()

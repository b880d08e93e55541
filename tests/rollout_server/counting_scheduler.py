"""vLLM's scheduler, and a count of what happens in it; this runs inside the engine's process."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCore

from rollout_server.decode_steps import DecodeSteps

_counts = Counter[str]()


class CountingScheduler(AsyncScheduler):  # type: ignore[misc]
    """Counts preemptions that lack of blocks led to; quick steps count themselves."""

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        _counts["preemptions"] += not kwargs.get("drop_stale_output")
        super()._preempt_request(*args, **kwargs)


def _count(method: str, name: str) -> None:
    plain = getattr(DecodeSteps, method)

    def counted(self: Any, *args: Any) -> Any:
        _counts[name] += 1
        return plain(self, *args)

    setattr(DecodeSteps, method, counted)


def _tito_counts(engine: Any) -> dict[str, float]:
    """The counts, and what is left in the scheduler: nothing, once all requests have ended."""
    scheduler = engine.scheduler
    left = {
        "requests": len(scheduler.requests),
        "held": len(scheduler.held),
        "cache": scheduler.kv_cache_manager.usage,
    }
    return {**_counts, **left}


_count("_scheduled", "quick steps")
_count("_append", "quick tokens")
EngineCore.tito_counts = _tito_counts

"""Quick steps against vLLM's own scheduler: whatever happens, both decide and remember the same."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rollout_server.decode_steps import DecodeSteps
from rollout_server.holding import _messages

BLOCK = 4
CONTEXT = 48
EOS = 1
STATE = (
    "status",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_in_flight_tokens",
    "num_stale_output_tokens",
    "is_prefill_chunk",
    "num_preemptions",
    "stop_reason",
    "_all_token_ids",
    "_output_token_ids",
    "block_hashes",
)


class QuickScheduler(DecodeSteps, Scheduler):  # type: ignore[misc]
    """As it is mixed where steps wait for each other."""


class QuickAsyncScheduler(DecodeSteps, AsyncScheduler):  # type: ignore[misc]
    """As it is mixed where a step is scheduled before the last one's tokens are known."""


@dataclass(frozen=True)
class Setting:
    """What a scheduler is made for."""

    ahead: bool
    second_runner: bool
    sequences: int
    blocks: int
    policy: str = "fcfs"
    caching: bool = True


@pytest.fixture
def make(tiny_model: Path) -> Callable[..., Any]:
    """Makes a scheduler, of vLLM's or the quick one."""
    init_none_hash(get_hash_fn_by_name("sha256"))

    def one(setting: Setting, quick: bool) -> Any:
        config = EngineArgs(
            model=str(tiny_model),
            max_model_len=CONTEXT,
            max_num_seqs=setting.sequences,
            max_num_batched_tokens=32,
            enable_chunked_prefill=True,
            enable_prefix_caching=setting.caching,
            scheduling_policy=setting.policy,
            block_size=BLOCK,
        ).create_engine_config()
        runner = {"use_v2_model_runner": setting.second_runner}
        config.__class__ = type("Config", (VllmConfig,), runner)
        config.cache_config.num_gpu_blocks = setting.blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        theirs, ours = (
            (AsyncScheduler, QuickAsyncScheduler) if setting.ahead else (Scheduler, QuickScheduler)
        )
        return (ours if quick else theirs)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=setting.blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )

    return one


class Engine:
    """A scheduler, and a model whose tokens follow from a request's name and length."""

    def __init__(self, scheduler: Any, ahead: bool) -> None:
        self.scheduler, self.depth = scheduler, 2 if ahead else 1
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.got: dict[str, tuple[list[int], list[float], list[Any]]] = {}
        self.leaving: list[str] = []

    def step(self) -> Any:
        """Schedule one step, and take the tokens of the one that is due."""
        step = self.scheduler.schedule()
        if step.total_num_scheduled_tokens:
            self.in_flight.append((step, self.run(step)))
        for name in self.leaving:  # their callers, while the model runs
            self.abort(name)
        self.leaving = []
        if self.in_flight and (
            len(self.in_flight) == self.depth or not step.total_num_scheduled_tokens
        ):
            outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
            self.take(outputs)
        return step

    def run(self, step: Any) -> ModelRunnerOutput:
        names = sorted(step.num_scheduled_tokens)  # the worker has an order of its own
        requests = [self.scheduler.requests[name] for name in names]
        seeds = [f"{r.request_id}/{r.num_computed_tokens}" for r in requests]
        tokens = [random.Random(seed).randrange(40) for seed in seeds]
        scores = np.array(tokens, np.float32)[:, None] / -10
        ids = np.array(tokens, np.int32)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[
                [] if request.is_prefill_chunk else [token]
                for request, token in zip(requests, tokens, strict=True)
            ],
            logprobs=LogprobsLists(ids[:, None], scores, ids + 1),
            prompt_logprobs_dict={},
            pooler_output=[],
            num_nans_in_logits=None if self.scheduler.use_v2_model_runner else {},
        )

    def take(self, outputs: dict[int, Any]) -> None:
        for batch in outputs.values():
            for output in batch.outputs:
                tokens, logprobs, reasons = self.got.setdefault(output.request_id, ([], [], []))
                tokens += output.new_token_ids
                if output.new_logprobs is not None:
                    logprobs += output.new_logprobs.logprobs[:, 0].tolist()
                reasons += [(output.finish_reason, output.stop_reason)]

    def abort(self, name: str) -> None:
        """End a request; what was held of it goes to whoever asked."""
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        for _, outputs in _messages(getattr(self.scheduler, "ended", {}).items()):
            self.take({0: outputs})
        self.got.setdefault(name, ([], [], []))[2].append("aborted")

    def state(self) -> dict[str, Any]:
        """All that decides what happens next."""
        scheduler = self.scheduler
        (kind,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "requests": {
                name: [getattr(request, field) for field in STATE]
                for name, request in scheduler.requests.items()
            },
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "blocks": {
                name: [block.block_id for block in blocks]
                for name, blocks in kind.req_to_blocks.items()
            },
            "shared": dict(kind.num_cached_block),
            "cached": sorted(
                block.block_id for block in pool.blocks if block.block_hash is not None
            ),
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "in the last step": sorted(scheduler.prev_step_scheduled_req_ids),
        }


def request(name: int, chance: random.Random, caching: bool) -> Request:
    kind = chance.choices([RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA], [9, 1])[0]
    params = SamplingParams(
        max_tokens=chance.choice([1, 2, 7, 20, 60]),
        stop_token_ids=chance.choice([None, [2, 3]]),
        logprobs=chance.choice([0, 0, None]),
        output_kind=kind,
        detokenize=False,
    )
    params._eos_token_id = chance.choice([EOS, None])
    shared = [5] * chance.choice([0, BLOCK, 3 * BLOCK])
    prompt = shared + [chance.randrange(5, 40) for _ in range(chance.randint(1, 20))]
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    return Request(
        str(name),
        prompt,
        params,
        None,
        arrival_time=float(name),
        priority=chance.randrange(3),
        block_hasher=hasher if caching else None,
    )


def disturb(engine: Engine, chance: random.Random, names: int, caching: bool) -> int:
    """Something that happens between two steps; returns how many requests there were so far."""
    what, scheduler = chance.random(), engine.scheduler
    if what < 0.12:
        for _ in range(chance.randint(1, 4)):
            scheduler.add_request(request(names, chance, caching))
            names += 1
    elif what < 0.15 and scheduler.requests:
        engine.abort(chance.choice(sorted(scheduler.requests)))
    elif what < 0.17 and scheduler.requests:
        engine.leaving = [chance.choice(sorted(scheduler.requests))]
    elif what < 0.19:
        scheduler.reset_prefix_cache(reset_running_requests=True)
    elif what < 0.22:
        scheduler.set_pause_state(chance.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
    elif what < 0.5:
        scheduler.set_pause_state(PauseState.UNPAUSED)
    return names


def differences(ours: Any, theirs: Any) -> dict[str, Any]:
    """Fields of a step, and those of the requests in it, that are not equal."""
    return {
        field.name: (getattr(ours, field.name), getattr(theirs, field.name))
        for field in fields(ours)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    }


SETTINGS = [
    Setting(ahead=True, second_runner=True, sequences=6, blocks=200),
    Setting(ahead=True, second_runner=True, sequences=6, blocks=30),
    Setting(ahead=True, second_runner=True, sequences=8, blocks=24, policy="priority"),
    Setting(ahead=True, second_runner=False, sequences=6, blocks=30),
    Setting(ahead=False, second_runner=False, sequences=6, blocks=30),
    Setting(ahead=False, second_runner=True, sequences=4, blocks=20, caching=False),
    Setting(ahead=True, second_runner=True, sequences=4, blocks=200, caching=False),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_quick_steps_do_what_vllm_does(make: Callable[..., Any], setting: Setting) -> None:
    ours, theirs = (Engine(make(setting, quick), setting.ahead) for quick in (True, False))
    assert ours.scheduler.quick
    quick_steps = count_quick(ours.scheduler)
    chances = random.Random(7), random.Random(7)
    names = 0
    for _ in range(1500):
        counts = [
            disturb(engine, chance, names, setting.caching)
            for engine, chance in zip((ours, theirs), chances, strict=True)
        ]
        names = counts[0]
        mine, other = ours.step(), theirs.step()
        assert differences(mine, other) == {}
        assert ours.state() == theirs.state()
    finish(ours, theirs)
    assert {name: got[:2] for name, got in ours.got.items()} == {
        name: got[:2] for name, got in theirs.got.items()
    }
    assert {name: got[2][-1] for name, got in ours.got.items()} == {
        name: got[2][-1] for name, got in theirs.got.items()
    }
    assert quick_steps["schedule"] > 30
    assert quick_steps["tokens"] > 1000


def count_quick(scheduler: Any) -> dict[str, int]:
    """Counts the steps that were quick, and the tokens that vLLM did not look at."""
    counts = {"schedule": 0, "tokens": 0}
    scheduled, append = scheduler._scheduled, scheduler._append

    def counted_step(going: list[Any]) -> Any:
        counts["schedule"] += 1
        return scheduled(going)

    def counted_token(*args: Any) -> None:
        counts["tokens"] += 1
        append(*args)

    scheduler._scheduled, scheduler._append = counted_step, counted_token
    return counts


def finish(*engines: Engine) -> None:
    """No more disturbance until every request has ended, of those that were not aborted."""
    for engine in engines:
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        for _ in range(2000):
            engine.step()
            if not engine.scheduler.requests and not engine.in_flight:
                break
        assert not engine.scheduler.requests

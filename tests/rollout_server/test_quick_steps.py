"""Quick steps in a real engine that runs out of blocks: samples are those of vLLM's own steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rollout_server import vllm_engine
from rollout_server.engine import Completion
from rollout_server.settings import ServerSettings
from rollout_server.vllm_engine import VLLMEngine
from shared.protocol import PauseMode
from shared.requests import SamplingSettings
from tests.rollout_server.support import Weights, sharpened

CONTEXT = 256
BLOCK, BLOCKS = 32, 28
SEQUENCES = 12
VOCABULARY = 280
GROUPS = 60
CLOSE = 1e-4
"""Nats between two float32 computations of one log-probability, in batches of other shapes."""


@dataclass(frozen=True)
class Asked:
    """One group of samples.

    Attributes:
        after_s: it is sent so long after the first.
        gone_after_s: its caller leaves so long after it was sent, unless it has its answer.
    """

    prompt: list[int]
    sampling: SamplingSettings
    n: int
    after_s: float
    gone_after_s: float | None = None


@dataclass(frozen=True)
class Ran:
    """What an engine answered, and did: the latter by the names of ``counting_scheduler``."""

    answers: list[list[Completion] | None]
    streamed: list[list[int]]
    scored: list[tuple[list[int], Sequence[float]]]
    counts: dict[str, float]


def workload(seed: int) -> list[Asked]:
    chance = random.Random(seed)
    return [asked(chance) for _ in range(GROUPS)]


def asked(chance: random.Random) -> Asked:
    shared = [7] * chance.choice([0, 0, BLOCK, 2 * BLOCK])
    prompt = shared + [chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, 70))]
    sampling = SamplingSettings(
        max_tokens=chance.choice([1, 2, 17, 60, 120, CONTEXT - len(prompt)]),
        temperature=chance.choice([0.0, 1.0, 1.0]),
        top_p=chance.choice([1.0, 1.0, 1.0, 0.9]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.0, 0.5]),
        stop_token_ids=chance.choice([[], chance.sample(range(VOCABULARY), 4)]),
        ignore_eos=chance.choice([True, False]),
        seed=chance.randrange(1 << 30),
    )
    gone = chance.uniform(0.0, 0.3) if chance.random() < 0.25 else None
    return Asked(prompt, sampling, chance.choice([1, 1, 3]), chance.uniform(0.0, 1.0), gone)


async def answer(engine: VLLMEngine, asked: Asked) -> list[Completion] | None:
    """The group's samples; None if its caller left before."""
    await asyncio.sleep(asked.after_s)
    samples = engine.generate(asked.prompt, asked.sampling, asked.n)
    try:
        return await asyncio.wait_for(samples, asked.gone_after_s)
    except TimeoutError:
        return None


async def stream(engine: VLLMEngine, number: int) -> list[int]:
    """Tokens of one greedy sample, each sent as it is made; of every other one by a grammar."""
    await asyncio.sleep(0.2 * number)
    grammar = StructuredOutputsParams(regex="[a-f]{40}") if number % 2 else None
    params = SamplingParams(
        max_tokens=60,
        temperature=0.0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=grammar,
    )
    prompt = TokensPrompt(prompt_token_ids=[number + 1] * 9)
    outputs = engine.llm.generate(prompt, params, f"stream-{number}")
    return [token async for output in outputs for token in output.outputs[0].token_ids]


async def score(engine: VLLMEngine, number: int) -> tuple[list[int], Sequence[float]]:
    """Log-probabilities of a prompt, asked for while others sample."""
    await asyncio.sleep(0.15 * number)
    ids = [random.Random(number).randrange(VOCABULARY) for _ in range(50)]
    return ids, (await engine.score(ids)).logprobs


async def run_workload(engine: VLLMEngine, groups: Sequence[Asked]) -> Ran:
    answers, streamed, scored = await asyncio.gather(
        asyncio.gather(*(answer(engine, group) for group in groups)),
        asyncio.gather(*(stream(engine, number) for number in range(4))),
        asyncio.gather(*(score(engine, number) for number in range(6))),
    )
    return Ran(answers, streamed, scored, await counts_of(engine))


async def counts_of(engine: VLLMEngine) -> dict[str, float]:
    """Once requests whose callers have gone are out of the engine, too."""
    while True:
        counts = await engine.llm.engine_core.call_utility_async("tito_counts")
        if not counts["requests"]:
            return dict(counts)
        await asyncio.sleep(0.05)


async def publish(engine: VLLMEngine, version: int, weights: Path | None = None) -> None:
    """Give the engine's weights a version, other ones if there is a file of them."""
    await engine.pause(PauseMode.KEEP)
    if weights:
        await engine.load([weights])
    await engine.stamp(version)
    await engine.resume()


def build(model: Path, *, quick: bool) -> VLLMEngine:
    """A small engine, whose blocks do not suffice for as many sequences as it may run."""
    plain = vllm_engine._engine_args

    def with_few_blocks(*args: Any) -> Any:
        few = plain(*args)
        few.block_size, few.num_gpu_blocks_override = BLOCK, BLOCKS
        few.scheduler_cls = "tests.rollout_server.counting_scheduler.CountingScheduler"
        few.async_scheduling = True
        few.max_num_batched_tokens = 64  # so that prompts come in chunks
        return few

    settings = ServerSettings(
        model=str(model),
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=SEQUENCES,
        kv_cache_gib=0.1,
        quick_steps=quick,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "_engine_args", with_few_blocks)
        return VLLMEngine(settings)


async def run_all(model: Path, files: Sequence[Path], *, quick: bool) -> list[Ran]:
    """One run with weights as they are; then one in which each of the files is published.

    The latter have versions from 1 on. Without files there is no such run.
    """
    engine = build(model, quick=quick)
    try:
        await publish(engine, 0)
        runs = [await run_workload(engine, workload(3))]
        if files:
            working = asyncio.create_task(run_workload(engine, workload(4)))
            for version, file in enumerate(files, start=1):
                await asyncio.sleep(0.7)
                await publish(engine, version, file)
            runs.append(await working)
        return runs
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def versions(base: Weights) -> list[Weights]:
    """Weights by the versions that they are published as."""
    return [base, sharpened(base, 1), sharpened(base, 2)]


@pytest.fixture(scope="module")
def quick(
    tiny_model: Path, versions: list[Weights], tmp_path_factory: pytest.TempPathFactory
) -> list[Ran]:
    """Both runs of an engine with quick steps."""
    files = [tmp_path_factory.mktemp("weights") / f"{n}.safetensors" for n in (1, 2)]
    for file, weights in zip(files, versions[1:], strict=True):
        safetensors.torch.save_file(weights.tensors, file)
    return asyncio.run(run_all(tiny_model, files, quick=True))


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Ran:
    """The first run, of an engine with vLLM's own steps."""
    return asyncio.run(run_all(tiny_model, [], quick=False))[0]


def assert_like_reference(group: Asked, sample: Completion, versions: Sequence[Weights]) -> None:
    """Every token is as likely as transformers says, with the weights that its span names."""
    assert [span.start for span in sample.spans] == [0, *(s.end for s in sample.spans[:-1])]
    assert sample.spans[-1].end == len(sample.token_ids) == len(sample.logprobs)
    if group.sampling.top_p < 1 or group.sampling.frequency_penalty:
        return  # these change the distribution
    for span in sample.spans:
        made, weights = slice(span.start, span.end), versions[span.version]
        expected = weights.logprobs(group.prompt, sample.token_ids)[made]
        np.testing.assert_allclose(sample.logprobs[made], expected, atol=CLOSE, rtol=0)


def assert_nothing_is_left(counts: dict[str, float]) -> None:
    assert (counts["requests"], counts["held"], counts["cache"]) == (0, 0, 0)


def test_samples_are_those_of_plain_steps(quick: list[Ran], plain: Ran) -> None:
    ran = quick[0]
    assert ran.counts["quick steps"] > 50
    assert ran.counts["quick tokens"] > 1000
    assert "quick tokens" not in plain.counts
    assert min(ran.counts["preemptions"], plain.counts["preemptions"]) > 5, "blocks sufficed"
    for group, ours, theirs in zip(workload(3), ran.answers, plain.answers, strict=True):
        if group.gone_after_s is None:
            assert ours is not None
            assert theirs is not None
        for mine, other in zip(ours or (), theirs or (), strict=False):
            assert list(mine.token_ids) == list(other.token_ids)
            assert mine.finish_reason == other.finish_reason
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=CLOSE, rtol=0)
    assert ran.streamed == plain.streamed
    assert_nothing_is_left(plain.counts)


def test_samples_are_as_likely_as_the_weights_of_their_spans_say(
    quick: list[Ran], versions: list[Weights]
) -> None:
    made_by = []
    for ran, groups in zip(quick, (workload(3), workload(4)), strict=True):
        for group, answered in zip(groups, ran.answers, strict=True):
            assert group.gone_after_s is not None or answered is not None
            assert answered is None or len(answered) == group.n
            for sample in answered or ():
                assert_like_reference(group, sample, versions)
                made_by.append([span.version for span in sample.spans])
        assert_nothing_is_left(ran.counts)
    assert [0, 1] in made_by
    assert [1, 2] in made_by


def test_prompts_are_scored_beside_quick_steps(quick: list[Ran], base: Weights) -> None:
    for ids, logprobs in quick[0].scored:
        np.testing.assert_allclose(logprobs, base.logprobs(ids[:1], ids[1:]), atol=CLOSE, rtol=0)

"""Dozens of rollouts in flight through many reloads: every token was made by who its span names."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest

from shared.client import AsyncRolloutClient, RolloutClient
from shared.protocol import PauseMode, Sample
from tests.rollout_server.engines import PATIENCE_S, assert_made_by, assert_tiles
from tests.rollout_server.support import Weights, lazy, make_live, samples_run

GROUP = 2
TOKENS = 120


@dataclass
class Story:
    """What happened.

    Attributes:
        digests: of every version that was live.
        answered: for each request, the oldest version it may name and its samples.
    """

    digests: dict[int, str]
    answered: dict[int, tuple[int, list[Sample]]] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        return [sample for _, samples in self.answered.values() for sample in samples]


def prompt_of(number: int) -> list[int]:
    """A prompt that no other request has."""
    return [5, number % 250, 6, number // 250, 7]


async def run(
    url: str,
    sets: list[Weights],
    *,
    reloads: int,
    rollouts: int,
    modes: list[PauseMode],
    start: tuple[int, str],
) -> Story:
    """Keep rollouts in flight while the weight sets take turns."""
    story, numbers, done = Story(dict([start])), itertools.count(), asyncio.Event()

    async def publish(client: AsyncRolloutClient) -> None:
        turns = zip(range(reloads), itertools.cycle(sets), itertools.cycle(modes))
        for _, weights, mode in turns:
            result = await client.reload(lazy(weights.tensors), mode=mode, drain_seconds=PATIENCE_S)
            assert story.digests.setdefault(result.version, result.digest) == weights.digest
            await asyncio.sleep(0.02)
        done.set()

    async def roll(client: AsyncRolloutClient) -> None:
        while not done.is_set():
            number, live = next(numbers), max(story.digests)
            rollout = await client.rollout(
                [prompt_of(number)],
                group_size=GROUP,
                max_tokens=TOKENS,
                ignore_eos=True,
                resume_aborted=True,
            )
            assert number not in story.answered
            story.answered[number] = live, rollout.samples

    async with AsyncRolloutClient(url, timeout=PATIENCE_S) as client:
        await asyncio.gather(publish(client), *(roll(client) for _ in range(rollouts)))
    return story


def check(story: Story, sets: list[Weights]) -> None:
    """Everything was answered, once, and by the weights that it names."""
    by_digest = {weights.digest: weights for weights in sets}
    assert sorted(story.answered) == list(range(len(story.answered)))
    for number, (live, samples) in story.answered.items():
        assert len(samples) == GROUP
        for sample in samples:
            assert sample.prompt_ids.tolist() == prompt_of(number)
            assert len(sample.completion_ids) == TOKENS
            assert sample.version >= live, "older than what was live when it was asked for"
            assert_tiles(sample)
            assert all(story.digests[span.version] == span.digest for span in sample.spans)
            assert_made_by(sample, by_digest.__getitem__, sets)
    completions = [tuple(sample.completion_ids.tolist()) for sample in story.samples]
    assert len(set(completions)) == len(completions)


def through(
    client: RolloutClient, url: str, sets: list[Weights], *, reloads: int, rollouts: int
) -> None:
    """Reloads in mode ``keep``, which is the one that trainers use."""
    make_live(client, sets[1])
    info, before = client.info(), samples_run(url)
    story = asyncio.run(
        run(
            url,
            sets,
            reloads=reloads,
            rollouts=rollouts,
            modes=[PauseMode.KEEP],
            start=(info.version, info.digest),
        )
    )
    assert sorted(story.digests) == list(range(info.version, info.version + reloads + 1))
    assert len(story.samples) == samples_run(url) - before
    assert len(story.answered) >= rollouts
    mixed = [sample for sample in story.samples if len(sample.spans) > 1]
    assert len(mixed) >= reloads, "too few reloads fell inside a sample"
    check(story, sets)


def test_ten_reloads(
    client: RolloutClient, server_url: str, first: Weights, second: Weights
) -> None:
    through(client, server_url, [first, second], reloads=10, rollouts=24)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_reloads(
    client: RolloutClient, server_url: str, first: Weights, second: Weights
) -> None:
    through(client, server_url, [first, second], reloads=100, rollouts=48)


def test_reloads_in_every_mode(
    client: RolloutClient, server_url: str, first: Weights, second: Weights
) -> None:
    sets = [first, second]
    make_live(client, second)
    info = client.info()
    modes = [PauseMode.ABORT, PauseMode.KEEP, PauseMode.DRAIN, PauseMode.ABORT]
    story = asyncio.run(
        run(
            server_url,
            sets,
            reloads=8,
            rollouts=12,
            modes=modes,
            start=(info.version, info.digest),
        )
    )
    check(story, sets)


def test_a_sample_under_a_false_name_would_be_found(
    client: RolloutClient, first: Weights, second: Weights
) -> None:
    # Were the two sets too alike, the tests above could not fail.
    make_live(client, first)
    rollout = client.rollout([prompt_of(1)], group_size=4, max_tokens=TOKENS, ignore_eos=True)
    for sample in rollout.samples:
        assert_made_by(sample, lambda _: first, [first, second])
        with pytest.raises(AssertionError, match="off by"):
            assert_made_by(sample, lambda _: second)

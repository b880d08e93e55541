"""Seeds: the same request again gives the same samples, and the engine survives it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rollout_server.seeds import seeded
from shared.client import RolloutClient
from shared.protocol import Group, Rollout
from shared.requests import SamplingSettings
from shared.resume import Resumption
from tests.rollout_server.support import Weights, make_live

PROMPTS = [[(7 * number + place) % 200 for place in range(9)] for number in range(6)]
SETTINGS: dict[str, Any] = {"group_size": 3, "max_tokens": 8, "ignore_eos": True}


def bits(groups: list[Group]) -> list[tuple[bytes, bytes]]:
    """Everything of the samples that a trainer computes with."""
    return [
        (sample.completion_ids.tobytes(), sample.logprobs.tobytes())
        for group in groups
        for sample in group.samples
    ]


@pytest.fixture
def deterministic(deterministic_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(deterministic_url, timeout=120) as client:
        yield client


def test_a_seeded_rollout_has_the_same_bits_however_it_is_asked_for(
    deterministic: RolloutClient, first: Weights
) -> None:
    make_live(deterministic, first)
    whole = deterministic.rollout(PROMPTS, seed=40, **SETTINGS)
    assert whole.sampling["seed"] == 40

    def ask(index: int) -> Rollout:
        return deterministic.rollout([PROMPTS[index]], seed=40 + index, **SETTINGS)

    # One by one, in another order and side by side, with others in between.
    with ThreadPoolExecutor(8) as pool:
        noise = pool.submit(deterministic.rollout, PROMPTS, group_size=4, max_tokens=5)
        parts = dict(zip(reversed(range(6)), pool.map(ask, reversed(range(6))), strict=True))
        noise.result()
    assert bits(list(whole.groups)) == bits([parts[index].groups[0] for index in range(6)])
    assert len(set(bits(list(whole.groups)))) == 18
    other = deterministic.rollout(PROMPTS, seed=41, **SETTINGS)
    assert bits(list(whole.groups)) != bits(list(other.groups))


def test_seeds_survive_chunks_of_prompts(client: RolloutClient) -> None:
    # More prompt tokens than the engine takes in one step, so that it takes some in pieces.
    prompts = [[(number + place) % 200 for place in range(700)] for number in range(12)]
    rollout = client.rollout(prompts, seed=3, group_size=2, max_tokens=3, ignore_eos=True)
    assert all(len(sample.completion_ids) == 3 for sample in rollout.samples)
    assert client.rollout([[5, 6]], group_size=1, max_tokens=2, ignore_eos=True).samples


def test_samples_of_a_group_and_of_neighbouring_seeds_differ(client: RolloutClient) -> None:
    same = client.rollout([PROMPTS[0]] * 4, seed=7, group_size=8, max_tokens=12, ignore_eos=True)
    assert len({sample.completion_ids.tobytes() for sample in same.samples}) == 32


def test_groups_of_neighbouring_seeds_are_far_apart() -> None:
    settings = SamplingSettings(seed=5)
    seeds = sorted(seeded(settings, group).seed or 0 for group in range(1000))
    assert np.diff(seeds).min() > 10_000
    assert seeded(SamplingSettings(seed=6), 3) == seeded(settings, 4)
    assert seeded(SamplingSettings(), 3).seed is None


def test_the_rest_of_an_aborted_sample_is_not_drawn_with_the_seed_of_its_beginning(
    client: RolloutClient,
) -> None:
    rollout = client.rollout([PROMPTS[0]], group_size=1, max_tokens=4)
    (sample,) = rollout.samples
    object.__setattr__(sample, "finish_reason", "abort")
    (rest,) = Resumption([PROMPTS[0]], {"seed": 3, "max_tokens": 4}).of(rollout)
    assert rest.settings.get("seed") is None

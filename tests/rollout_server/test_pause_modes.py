"""What becomes of samples in flight when new weights are published: kept, drained or aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import Conflict
from shared.protocol import SAFETENSORS, ReloadResult, Rollout, Sample
from tests.rollout_server.engines import (
    PATIENCE_S,
    assert_made_by,
    assert_tiles,
    greedy,
    in_flight,
    requests_in_flight,
    staged_folders,
)
from tests.rollout_server.support import (
    Weights,
    eventually,
    lazy,
    make_live,
    post,
    samples_run,
    upload_of,
)

PROMPTS = [[5, 6, 7], [9] * 20, [40, 41], [77, 78, 79, 80]]
TOKENS = 900
LONG: dict[str, Any] = {"group_size": 3, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture
def old(client: RolloutClient, first: Weights) -> int:
    """The version that is live when the test begins; it has the weights ``first``."""
    make_live(client, first)
    return client.info().version


@pytest.fixture
def both(first: Weights, second: Weights) -> dict[str, Weights]:
    """The weights by their digests."""
    return {weights.digest: weights for weights in (first, second)}


def publish_amid(
    client: RolloutClient, url: str, weights: Weights, **target: Any
) -> tuple[list[Rollout], ReloadResult]:
    """What four rollouts in flight were answered, and the publish that came between."""
    with in_flight(url, PROMPTS, **LONG) as futures:
        result = client.reload(lazy(weights.tensors), **target)
        return [future.result(PATIENCE_S) for future in futures], result


def samples_of(rollouts: list[Rollout]) -> list[Sample]:
    """All samples; every rollout has its whole group, of its own prompt."""
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        assert [sample.prompt_ids.tolist() for sample in rollout.samples] == [prompt] * 3
    return [sample for rollout in rollouts for sample in rollout.samples]


def versions_of(sample: Sample) -> list[int]:
    return [span.version for span in sample.spans]


def assert_whole(samples: list[Sample], both: dict[str, Weights]) -> None:
    """Every sample has all its tokens, each as likely as the version that it names says."""
    for sample in samples:
        assert sample.finish_reason == "length"
        assert len(sample.completion_ids) == TOKENS
        assert_tiles(sample)
        assert_made_by(sample, both.__getitem__, list(both.values()))


@pytest.mark.parametrize("mode", [{}, {"mode": "keep"}])
def test_kept_samples_go_on_under_the_new_weights(
    client: RolloutClient,
    server_url: str,
    old: int,
    second: Weights,
    both: dict[str, Weights],
    mode: dict[str, str],
) -> None:
    rollouts, result = publish_amid(client, server_url, second, **mode)
    samples = samples_of(rollouts)
    assert_whole(samples, both)
    assert result.version == old + 1
    seen = {tuple(versions_of(sample)) for sample in samples}
    assert (old, old + 1) in seen, "the publish fell outside every sample"
    assert seen <= {(old,), (old, old + 1), (old + 1,)}


def test_drained_samples_finish_under_the_old_weights(
    client: RolloutClient, server_url: str, old: int, second: Weights, both: dict[str, Weights]
) -> None:
    rollouts, result = publish_amid(client, server_url, second, mode="drain", drain_seconds=600)
    samples = samples_of(rollouts)
    assert_whole(samples, both)
    assert {tuple(versions_of(sample)) for sample in samples} == {(old,)}
    assert result.version == client.info().version == old + 1
    assert greedy(client) == second.greedy([5, 6, 7, 8, 9, 10, 11, 12] * 4, 10)


def test_what_arrives_during_a_drain_gets_the_new_weights(
    client: RolloutClient, server_url: str, old: int, second: Weights
) -> None:
    with in_flight(server_url, PROMPTS, **LONG) as futures, ThreadPoolExecutor() as pool:
        publish = pool.submit(
            client.reload, lazy(second.tensors), mode="drain", drain_seconds=PATIENCE_S
        )
        eventually(lambda: states(client)[0] == "applying", seconds=60)
        assert not all(future.done() for future in futures), "nothing was left to drain"
        late = client.rollout([[5, 6]], group_size=2, max_tokens=20, ignore_eos=True)
        assert publish.result(PATIENCE_S).version == old + 1
    assert {tuple(versions_of(sample)) for sample in late.samples} == {(old + 1,)}


def states(client: RolloutClient) -> list[str]:
    """States of the recent publishes, the newest first."""
    return [publish["state"] for publish in client.policy()["history"]]


def test_a_drain_that_takes_too_long_is_given_up(
    client: RolloutClient,
    server_url: str,
    staging_dir: Path,
    old: int,
    second: Weights,
    both: dict[str, Weights],
) -> None:
    info = client.info()
    with in_flight(server_url, PROMPTS, **LONG) as futures:
        with pytest.raises(Conflict, match="did not finish"):
            client.reload(lazy(second.tensors), mode="drain", drain_seconds=0.01)
        assert not all(future.done() for future in futures), "they had finished before"
        assert client.info() == info
        samples = samples_of([future.result(PATIENCE_S) for future in futures])
    assert_whole(samples, both)
    assert {tuple(versions_of(sample)) for sample in samples} == {(old,)}
    assert states(client)[0] == "rejected"
    assert staged_folders(staging_dir) == []
    # Nothing of the attempt is left behind: the next publish of any kind goes through.
    for mode in ("drain", "keep", "abort"):
        result = client.reload(lazy(second.tensors), mode=mode)
        assert client.rollout([[5]], group_size=1, max_tokens=3).samples[0].version == (
            result.version
        )


def test_aborted_samples_are_returned_with_what_they_have(
    client: RolloutClient, server_url: str, old: int, first: Weights, second: Weights
) -> None:
    rollouts, result = publish_amid(client, server_url, second, mode="abort")
    samples = samples_of(rollouts)
    assert result.version == old + 1
    aborted = [sample for sample in samples if sample.finish_reason == "abort"]
    assert aborted, "the publish fell outside every sample"
    for sample in aborted:
        assert len(sample.completion_ids) == len(sample.logprobs) < TOKENS
        assert {(span.version, span.digest) for span in sample.spans} == {(old, first.digest)}
        assert (sample.version, sample.digest) == (old, first.digest)
        if len(sample.completion_ids):
            assert_tiles(sample)
            assert_made_by(sample, lambda _: first, [second])
    assert greedy(client) == second.greedy([5, 6, 7, 8, 9, 10, 11, 12] * 4, 10)


def test_what_still_waits_for_its_turn_is_aborted_without_tokens(
    client: RolloutClient, server_url: str, old: int, second: Weights
) -> None:
    # More samples than run at once, so that many have not begun.
    many = {"group_size": 100, "max_tokens": TOKENS, "ignore_eos": True}
    with in_flight(server_url, PROMPTS, **many) as futures:
        client.reload(lazy(second.tensors), mode="abort")
        rollouts = [future.result(PATIENCE_S) for future in futures]
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    assert len(samples) == 400
    empty = [sample for sample in samples if not len(sample.completion_ids)]
    assert empty, "all of them had begun"
    for sample in empty:
        assert sample.finish_reason == "abort"
        assert len(sample.logprobs) == 0
        assert sample.version in (old, old + 1)


def test_resumed_samples_are_whole(
    client: RolloutClient, server_url: str, old: int, second: Weights, both: dict[str, Weights]
) -> None:
    with in_flight(server_url, PROMPTS, resume_aborted=True, **LONG) as futures:
        result = client.reload(lazy(second.tensors), mode="abort")
        samples = samples_of([future.result(PATIENCE_S) for future in futures])
    assert_whole(samples, both)
    assert any(versions_of(sample) == [old, result.version] for sample in samples)
    for sample in samples:
        assert set(versions_of(sample)) <= {old, result.version}


def test_samples_are_resumed_as_often_as_they_are_aborted(
    client: RolloutClient, server_url: str, old: int, first: Weights, both: dict[str, Weights]
) -> None:
    second = next(weights for weights in both.values() if weights is not first)
    with in_flight(server_url, PROMPTS, resume_aborted=True, **LONG) as futures:
        for weights in (second, first, second):
            client.reload(lazy(weights.tensors), mode="abort")
            eventually(lambda: begun_again(server_url, futures), seconds=60)
        samples = samples_of([future.result(PATIENCE_S) for future in futures])
    assert_whole(samples, both)
    assert max(len(sample.spans) for sample in samples) > 2
    assert all(set(versions_of(sample)) <= set(range(old, old + 4)) for sample in samples)


def begun_again(url: str, futures: list[Future[Rollout]]) -> bool:
    """Whether the continuations of aborted samples have reached the server, or all is done."""
    return requests_in_flight(url) > 1 or all(future.done() for future in futures)


def test_the_asynchronous_client_resumes_too(
    client: RolloutClient, server_url: str, old: int, second: Weights, both: dict[str, Weights]
) -> None:
    async def roll() -> list[Rollout]:
        async with AsyncRolloutClient(server_url, timeout=PATIENCE_S) as policy:
            rolling = [
                asyncio.create_task(policy.rollout([prompt], resume_aborted=True, **LONG))
                for prompt in PROMPTS
            ]
            # Sent from a thread: the rollouts need the loop to get going.
            await asyncio.to_thread(
                eventually, lambda: requests_in_flight(server_url) > len(PROMPTS), 60
            )
            await policy.reload(lazy(second.tensors), mode="abort")
            return await asyncio.gather(*rolling)

    samples = samples_of(asyncio.run(roll()))
    assert_whole(samples, both)
    assert any(versions_of(sample) == [old, old + 1] for sample in samples)
    assert client.info().version == old + 1


def test_the_text_of_resumed_samples_is_that_of_their_ids(
    client: RolloutClient, server_url: str, old: int, second: Weights, tokenizer: Any
) -> None:
    with in_flight(server_url, PROMPTS, resume_aborted=True, **LONG) as futures:
        client.reload(lazy(second.tensors), mode="abort")
        samples = samples_of([future.result(PATIENCE_S) for future in futures])
    mixed = [sample for sample in samples if len(sample.spans) > 1]
    assert mixed
    assert old < client.info().version
    for sample in samples:
        # Its bytes are random, so that many a split falls inside a character.
        assert sample.text == tokenizer.decode(sample.completion_ids, skip_special_tokens=True)


def test_samples_of_an_exact_version_are_resumed_under_the_next(
    client: RolloutClient, server_url: str, old: int, first: Weights, second: Weights
) -> None:
    exact: dict[str, Any] = {"version": old, "digest": first.digest, "resume_aborted": True}
    with in_flight(server_url, PROMPTS, **exact, **LONG) as futures:
        result = client.reload(lazy(second.tensors), mode="abort")
        samples = samples_of([future.result(PATIENCE_S) for future in futures])
    assert any(versions_of(sample) == [old, result.version] for sample in samples)
    assert all(len(sample.completion_ids) == TOKENS for sample in samples)


@pytest.fixture
def counted(server_url: str) -> Iterator[None]:
    """Every sample that the test's one rollout asked for is counted once."""
    before = samples_run(server_url)
    yield
    assert samples_run(server_url) - before == len(PROMPTS) * 3


@pytest.mark.usefixtures("counted", "old")
@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
def test_nothing_is_lost_or_run_twice(
    client: RolloutClient, server_url: str, second: Weights, mode: str
) -> None:
    rollouts, _ = publish_amid(client, server_url, second, mode=mode, drain_seconds=600)
    samples = samples_of(rollouts)
    assert len({tuple(sample.completion_ids.tolist()) for sample in samples}) == len(samples)


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    "query",
    ["mode=stop", "mode=", "drain_seconds=0", "drain_seconds=-1", "drain_seconds=nan", "modes=x"],
)
def test_a_query_that_makes_no_sense(
    client: RolloutClient, server_url: str, second: Weights, query: str
) -> None:
    info = client.info()
    response = post(
        server_url,
        raw=upload_of(second.tensors),
        path=f"/reload?{query}",
        content_type=SAFETENSORS,
    )
    assert response.status_code == 422
    assert client.info() == info

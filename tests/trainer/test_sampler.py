"""What is asked when, without servers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from shared.codec import decode, encode
from shared.errors import EngineFailure
from shared.protocol import MSGPACK, Rollout, Sample
from tests.rollout_server.support import eventually
from trainer.agreement import NEUTRAL_SAMPLING
from trainer.config import Config
from trainer.errors import CheckpointError, MismatchError
from trainer.prompts import training_prompts
from trainer.sampler import Sampler


@dataclass
class Pool:
    """Answers each prompt with a group that names it, once the gate is open.

    Attributes:
        asked: what was asked, in the order in which threads came.
    """

    rollout_of: Callable[..., Rollout]
    sample_of: Callable[..., Sample]
    size: int = 1
    vocab_size: int = 288
    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[list[Any], dict[str, Any]]] = field(default_factory=list)
    error: Exception | None = None

    def ensure(self) -> None:
        pass

    def rollout(self, prompts: list[Any], *, group_size: int, **settings: Any) -> Rollout:
        self.asked.append((prompts, settings))
        assert self.gate.wait(30)
        if self.error:
            raise self.error
        groups = [
            [self.sample_of(index, text=str(prompt)) for _ in range(group_size)]
            for index, prompt in enumerate(prompts)
        ]
        sampling = {"temperature": settings["temperature"]} | NEUTRAL_SAMPLING
        return self.rollout_of(groups, sampling=sampling)

    def has_asked(self, count: int) -> bool:
        """Whether that many prompts were asked for, all in all."""
        return sum(len(prompts) for prompts, _ in self.asked) == count


@pytest.fixture
def pool(make_rollout: Callable[..., Rollout], make_sample: Callable[..., Sample]) -> Pool:
    pool = Pool(make_rollout, make_sample)
    pool.gate.set()
    return pool


@pytest.fixture
def config_of(make_config: Callable[..., Config]) -> Callable[..., Config]:
    def build(max_staleness: int = 0, **rollout: Any) -> Config:
        return make_config(
            rollout={"prompts_per_step": 6, "group_size": 2} | rollout,
            train={"max_staleness": max_staleness, "steps": 9},
        )

    return build


def sampler_of(pool: Any, config: Config, **begins: Any) -> Sampler:
    known: dict[str, Any] = {"fingerprint": "t", "step": 0, "position": 0} | begins
    return Sampler(pool, training_prompts(config), config, **known)


def prompts_of(config: Config, position: int, count: int) -> list[Any]:
    return [task.prompt for task in training_prompts(config).take(position, count)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_admission_bounds_how_far_sampling_runs_ahead(
    pool: Pool, config_of: Callable[..., Config], max_staleness: int
) -> None:
    sampler = sampler_of(pool, config_of(max_staleness))
    for finished in range(9):
        sampler.admit(finished)
        sampler.admit(finished)
        steps = min(finished + 1 + max_staleness, 9)
        assert sampler.position == 6 * steps
        eventually(partial(pool.has_asked, 6 * steps))
        tasks, rollout = sampler.take(finished + 1)
        expected = prompts_of(config_of(), 6 * finished, 6)
        assert [task.prompt for task in tasks] == expected
        # Each task has the groups that were sampled for it, whatever came first.
        assert [group.samples[0].text for group in rollout.groups] == list(map(str, expected))
    assert sampler.queued() == []


def test_several_servers_share_a_step_and_it_is_joined_in_order(
    pool: Pool, config_of: Callable[..., Config]
) -> None:
    pool.size = 2
    config = config_of(prompts_per_step=20)
    sampler = sampler_of(pool, config)
    sampler.admit(0)
    _, rollout = sampler.take(1)
    assert sorted(len(prompts) for prompts, _ in pool.asked) == [2, 3, 3, 3, 3, 3, 3]
    assert [group.group_id for group in rollout.groups] == list(range(20))
    assert [sample.group_id for sample in rollout.samples] == [i // 2 for i in range(40)]
    texts = [group.samples[0].text for group in rollout.groups]
    assert texts == list(map(str, prompts_of(config, 0, 20)))


def test_more_comes_after_everything_that_was_asked_for(
    pool: Pool, config_of: Callable[..., Config]
) -> None:
    config = config_of(1)
    sampler = sampler_of(pool, config)
    sampler.admit(0)
    sampler.take(1)
    tasks, _ = sampler.more(2)
    assert [task.prompt for task in tasks] == prompts_of(config, 12, 2)
    sampler.admit(1)
    sampler.take(2)
    tasks, _ = sampler.take(3)
    assert [task.prompt for task in tasks] == prompts_of(config, 14, 6)


def test_seeds_follow_from_the_position_however_a_step_is_divided(
    pool: Pool, config_of: Callable[..., Config]
) -> None:
    def seeds(size: int, config: Config) -> dict[str, int]:
        pool.size, pool.asked = size, []
        sampler = sampler_of(pool, config)
        sampler.admit(0)
        sampler.take(1)
        # The server adds a group's place in its request.
        return {
            str(prompt): settings["seed"] + index
            for prompts, settings in pool.asked
            for index, prompt in enumerate(prompts)
        }

    config = config_of(seeded=True)
    whole = seeds(1, config)
    assert seeds(3, config) == whole
    assert len(set(whole.values())) == 6
    changed = config.train.model_copy(update={"seed": 1})
    assert set(seeds(1, config.model_copy(update={"train": changed})).values()).isdisjoint(
        whole.values()
    )
    pool.asked = []
    sampler_of(pool, config_of()).admit(0)
    eventually(lambda: pool.asked)
    assert "seed" not in pool.asked[0][1]


def test_a_queue_survives_a_checkpoint(pool: Pool, config_of: Callable[..., Config]) -> None:
    config = config_of(2)
    sampler = sampler_of(pool, config)
    sampler.admit(0)
    sampler.take(1)
    eventually(lambda: len(sampler.waiting()) == 2 * 6 * 2)
    pool.gate.clear()
    sampler.admit(1)
    eventually(lambda: pool.has_asked(24))
    # Steps 2 and 3 have been answered, step 4 has not.
    queue = decode(encode(sampler.queued(), MSGPACK), MSGPACK)
    assert [order["step"] for order in queue] == [2, 3, 4]
    pool.gate.set()

    pool.asked = []
    resumed = sampler_of(pool, config, step=1, position=sampler.position, queued=queue)
    resumed.admit(1)
    eventually(lambda: pool.has_asked(6))
    for step in (2, 3, 4):
        tasks, rollout = resumed.take(step)
        expected = prompts_of(config, 6 * (step - 1), 6)
        assert [task.prompt for task in tasks] == expected
        assert [group.samples[0].text for group in rollout.groups] == list(map(str, expected))
    assert [prompts for prompts, _ in pool.asked] == [prompts_of(config, 18, 6)]
    resumed.admit(2)
    assert resumed.position == 30


def test_answers_that_do_not_fit_any_more_are_asked_for_again(
    pool: Pool, config_of: Callable[..., Config]
) -> None:
    sampler = sampler_of(pool, config_of(1))
    sampler.admit(0)
    eventually(lambda: len(sampler.waiting()) == 2 * 6 * 2)
    queue = sampler.queued()
    for changed in (config_of(1, group_size=3), config_of(1, temperature=0.5)):
        pool.asked = []
        resumed = sampler_of(pool, changed, position=12, queued=queue)
        resumed.admit(0)
        _, rollout = resumed.take(1)
        assert prompts_of(changed, 0, 6) in [prompts for prompts, _ in pool.asked]
        assert {len(group.samples) for group in rollout.groups} == {changed.rollout.group_size}


def test_a_damaged_queue_is_told(pool: Pool, config_of: Callable[..., Config]) -> None:
    sampler = sampler_of(pool, config_of(1), queued=[{"step": 1, "portions": [{"position": 0}]}])
    with pytest.raises(CheckpointError, match="queue is damaged"):
        sampler.admit(0)


def test_an_answer_that_cannot_come_ends_the_wait(
    pool: Pool, config_of: Callable[..., Config]
) -> None:
    pool.size, pool.error = 2, EngineFailure("no")
    sampler = sampler_of(pool, config_of())
    sampler.admit(0)
    with pytest.raises(EngineFailure, match="no"):
        sampler.take(1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sampling": {"temperature": 0.5} | NEUTRAL_SAMPLING}, "temperature is 0.5"),
        ({"tokenizer": "another"}, "tokenizer"),
        ({"groups": ()}, "0 groups for 6 prompts"),
    ],
)
def test_what_must_not_be_trained_on_is_refused(
    pool: Pool,
    config_of: Callable[..., Config],
    make_rollout: Callable[..., Rollout],
    change: dict[str, Any],
    says: str,
) -> None:
    def otherwise(groups: Any, **fields: Any) -> Rollout:
        return replace(make_rollout(groups, **fields), **change)

    pool.rollout_of = otherwise
    sampler = sampler_of(pool, config_of())
    sampler.admit(0)
    with pytest.raises(MismatchError, match=says):
        sampler.take(1)

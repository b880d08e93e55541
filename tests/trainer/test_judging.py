"""What becomes of the samples of a step, and of groups that teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shared.protocol import Rollout, Sample
from trainer.judging import Judged, judge, punished, refilled
from trainer.ledger import Fate
from trainer.objective import Objective
from trainer.prompts import Task
from trainer.rewards import Failed, Outcome, Score

MakeJudged = Callable[..., Judged]


@pytest.fixture
def judged(make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]) -> MakeJudged:
    """Groups of two; of each, the rewards."""

    def build(rewards: Sequence[Sequence[float]], objective: Objective | None = None) -> Judged:
        groups = [[make_sample(g) for _ in group] for g, group in enumerate(rewards)]
        outcomes: list[list[Outcome]] = [[Score(r, (r,)) for r in group] for group in rewards]
        tasks = [Task(f"task {g}", None) for g in range(len(rewards))]
        return judge(
            objective or Objective(),
            tasks,
            make_rollout(groups),
            outcomes,
            is_stale=lambda _: False,
        )

    return build


def test_nothing_is_asked_when_every_group_teaches(judged: MakeJudged) -> None:
    first = judged([[0, 1], [1, 0]])
    assert refilled(first, lambda _: pytest.fail("asked"), budget=10) is first


def test_useless_groups_are_replaced_and_kept_in_the_books(judged: MakeJudged) -> None:
    asked: list[int] = []

    def more(count: int) -> Judged:
        asked.append(count)
        # Every other group of them is useful.
        return judged([[0, g % 2] for g in range(count)])

    first = judged([[0, 1], [0, 0], [1, 1], [0, 1]])
    found = refilled(first, more, budget=100)
    # Half were useful, so twice as many as are missing are asked for.
    assert asked == [4]
    assert found.useful == 4
    assert len(found.tasks) == len(found.rollout.groups) == len(found.fates) == 8
    assert [group.group_id for group in found.rollout.groups] == list(range(8))
    assert [sample.group_id for sample in found.rollout.samples] == [
        g for g in range(8) for _ in "ab"
    ]


def test_the_budget_ends_it_and_training_goes_on(judged: MakeJudged) -> None:
    asked: list[int] = []

    def nothing(count: int) -> Judged:
        asked.append(count)
        return judged([[1, 1]] * count)

    found = refilled(judged([[0, 1], [0, 0]]), nothing, budget=5)
    assert sum(asked) == 5
    assert found.useful == 1
    assert len(found.tasks) == 7


def test_without_a_budget_there_is_no_refill(judged: MakeJudged) -> None:
    first = judged([[0, 0]])
    assert refilled(first, lambda _: pytest.fail("asked"), budget=0) is first


def cut(make_sample: Callable[..., Sample], *reasons: str) -> list[Sample]:
    return [make_sample(finish_reason=reason) for reason in reasons]


@pytest.mark.parametrize(
    ("truncated", "rewards", "fates"),
    [
        ("keep", [1, 0, 0], [Fate.TRAINED] * 3),
        ("mask", [1, 0, 0], [Fate.TRAINED, Fate.TRAINED, Fate.TRUNCATED]),
        # The one that was cut off is a peer: without it the others would be all alike.
        ("mask", [1, 1, 0], [Fate.TRAINED, Fate.TRAINED, Fate.TRUNCATED]),
        ("mask", [1, 1, 1], [Fate.ZERO_VARIANCE] * 3),
    ],
)
def test_samples_that_were_cut_off(
    make_sample: Callable[..., Sample],
    make_rollout: Callable[..., Rollout],
    truncated: Any,
    rewards: list[float],
    fates: list[Fate],
) -> None:
    rollout = make_rollout([cut(make_sample, "stop", "stop", "length")])
    outcomes: list[list[Outcome]] = [[Score(reward) for reward in rewards]]
    objective = Objective(truncated=truncated)
    found = judge(objective, [Task("q", None)], rollout, outcomes, is_stale=lambda _: False)
    assert found.fates == [fates]


def test_a_group_of_nothing_but_cut_off_samples(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    rollout = make_rollout([cut(make_sample, "length", "length")])
    outcomes: list[list[Outcome]] = [[Score(1.0), Score(0.0)]]
    found = judge(
        Objective(truncated="mask"), [Task("q", None)], rollout, outcomes, is_stale=lambda _: False
    )
    assert found.fates == [[Fate.TRUNCATED] * 2]
    assert found.useful == 0


def test_soft_punishment_by_length(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    samples = [make_sample(completion=range(n)) for n in (6, 8, 10, 10)]
    rollout = make_rollout([samples])
    outcomes: list[list[Outcome]] = [[*[Score(1.0, (1.0,))] * 3, Failed("x")]]
    (found,) = punished(rollout, outcomes, (10, 4, 2.0))
    assert found == [Score(1.0), Score(0.0), Score(-1.0), Failed("x")]
    assert all(o.parts == (1.0,) for o in found if isinstance(o, Score))
    objective = Objective(truncated="punish", overlong=(10, 4, 2.0))
    judged = judge(objective, [Task("q", None)], rollout, outcomes, is_stale=lambda _: False)
    # Equal rewards of unequal lengths now differ.
    assert judged.fates == [[*[Fate.TRAINED] * 3, Fate.REWARD_ERROR]]


def test_rewards_that_cancel_out_differ_by_part(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    rollout = make_rollout([[make_sample(), make_sample()]])
    outcomes: list[list[Outcome]] = [[Score(1.0, (1.0, 0.0)), Score(1.0, (0.0, 1.0))]]
    rewards = (("a", 1.0), ("b", 1.0))
    for normalise, fate in (("sum", Fate.ZERO_VARIANCE), ("each", Fate.TRAINED)):
        objective = Objective(normalise=normalise, rewards=rewards)  # type: ignore[arg-type]
        found = judge(objective, [Task("q", None)], rollout, outcomes, is_stale=lambda _: False)
        assert found.fates == [[fate, fate]]

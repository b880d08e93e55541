"""Problems and judges that we did not write: reasoning-gym's, asked and scored through /rollout."""

from __future__ import annotations

from typing import Any

import pytest

from shared.client import RolloutClient

GROUP = 4


@pytest.mark.parametrize("name", ["chain_sum", "simple_equations", "letter_counting"])
def test_reasoning_gym_scores_what_rollout_returns(client: RolloutClient, name: str) -> None:
    gym: Any = pytest.importorskip("reasoning_gym")
    problems = gym.create_dataset(name, size=6, seed=1)
    prompts = [[{"role": "user", "content": problem["question"]}] for problem in problems]
    rollout = client.rollout(prompts, group_size=GROUP, max_tokens=16)
    assert [group.group_id for group in rollout.groups] == list(range(len(prompts)))
    for problem, group in zip(problems, rollout.groups, strict=True):
        texts = [sample.text or "" for sample in group.samples]
        scores = [problems.score_answer(text, problem) for text in [*texts, problem["answer"]]]
        assert len(texts) == GROUP
        assert all(0.0 <= score <= 1.0 for score in scores)
        assert scores[-1] == 1.0
        solved = [text.strip() == problem["answer"] for text in texts]
        assert [score == 1.0 for score in scores[:-1]] == solved

"""What makes a rollout worth training on: the measures of ``trainer check`` and the viewer.

1. Records: every id and logprob came through intact.
2. Variety: answers within a group differ, or there is nothing to compare.
3. Room: few answers hit max_tokens, or the policy is taught to be brief instead of right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.protocol import Group, Sample

MAX_TRUNCATED_SHARE = 0.15
"""Above this, max_tokens cuts off answers that might have been right, and teaches brevity."""

MIN_VARIED_SHARE = 0.5
"""With fewer varied groups than this, most of a rollout's work teaches nothing."""

RECORDS_ADVICE = (
    "Something between sampler and trainer changes, drops or re-encodes token ids. Compare the "
    "first group's prompt_ids with what you sent, and look for a proxy or a tokenizer step."
)
VARIETY_ADVICE = (
    "Sample at temperature 1 without a seed. If that is so, the policy has settled on one "
    "answer: take harder prompts, or stop."
)
ROOM_ADVICE = (
    "Raise max_tokens, ask for shorter answers in the prompt, or make sure the chat template's "
    "end-of-turn token is among the stop tokens."
)

_ROUNDING = 1e-4


def sample_problems(sample: Sample, vocab_size: int) -> list[str]:
    """What is wrong with a record; nothing, if it is intact.

    Args:
        vocab_size: ids must be below it.
    """
    problems = []
    ids, logprobs = sample.completion_ids, sample.logprobs
    if len(ids) != len(logprobs):
        problems.append(f"{len(ids)} completion ids with {len(logprobs)} logprobs")
    if not np.isfinite(logprobs).all() or (logprobs > _ROUNDING).any():
        problems.append("a logprob is above 0 or not finite")
    everything = np.concatenate([sample.prompt_ids, ids])
    if ((everything < 0) | (everything >= vocab_size)).any():
        problems.append(f"an id lies outside the vocabulary of {vocab_size}")
    return [f"group {sample.group_id}: {problem}" for problem in problems]


def distinct_answers(group: Group) -> int:
    """How many different completions a group has, compared by their ids."""
    return len({sample.completion_ids.tobytes() for sample in group.samples})


def is_varied(group: Group) -> bool:
    """Whether there are two different answers to compare."""
    return distinct_answers(group) > 1


def truncated_share(samples: Sequence[Sample]) -> float:
    """Share of samples that ended because they had to, not because the model was done."""
    return sum(sample.finish_reason == "length" for sample in samples) / max(len(samples), 1)

"""Rollouts of several turns, in which a tool or an environment answers the policy.

    tool = lambda episode: None if episode.turns[-1].strip() == "19" else "no, try again"
    episodes = play(client, prompts, tool, wrap=chat_turn(tokenizer), turns=3, group_size=8)
    batch = collate([sample for group in episodes for sample in group.samples], pad_id)

An episode is one list of token ids that only grows. What the policy sampled is appended as the ids
that it sampled. What the tool says is new text, so it is encoded, once and by itself, and its ids
are appended behind; before them the end of the turn, where the policy has not sampled one. The
whole is the prompt of the next turn, as ids; nothing that was decoded is ever encoded again. Tokens
that the policy has not sampled bear no loss: the batch's ``completion_mask`` is false there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shared.client import RolloutClient
from shared.protocol import Group, Sample, Span

if (
    TYPE_CHECKING
):  # the types of inherited fields, which a tool that makes documentation looks for here
    from shared.arrays import IdArray, LogprobArray  # noqa: F401
    from shared.protocol import FinishReason  # noqa: F401


@dataclass(frozen=True, slots=True, eq=False)
class Episode(Sample):
    """A sample of several turns: everything behind the first prompt is its completion.

    ``completion_ids`` has the tokens of the policy and of the tool in the order in which they came.
    ``logprobs`` is 0 at those of the tool. ``spans`` cover the policy's tokens alone. ``text`` is
    that of the last turn, which is what a reward judges.

    Attributes:
        sampled: bool ``[completion_len]``, true at the tokens that the policy sampled.
        turns: text of each turn of the policy.
    """

    sampled: NDArray[np.bool_] = field(kw_only=True)
    turns: tuple[str, ...] = field(kw_only=True)

    @property
    def ids(self) -> list[int]:
        """All of it: the prompt of the next turn."""
        return [*self.prompt_ids.tolist(), *self.completion_ids.tolist()]


Tool = Callable[[Episode], str | None]
"""What the policy is answered; None ends the episode."""

Wrap = Callable[[Sequence[int], str], list[int]]
"""From an episode's ids and a tool's answer to the ids that follow: all that stands between two
turns of the policy, the end of the first among them if the policy has not sampled it."""


def chat_turn(tokenizer: Any, role: str = "user") -> Wrap:
    """Answers as messages of a chat: the template's own words around them.

    The ids are those by which a conversation becomes longer, when a finished turn of the assistant
    is followed by a message: what the template renders for both, less what it renders for one.

    Args:
        tokenizer: with a chat template.
        role: of the message, e.g. ``tool``.
    """

    def wrap(ids: Sequence[int], answer: str) -> list[int]:
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        options: dict[str, Any] = {"tokenize": False}
        before = tokenizer.apply_chat_template(said, **options)
        message = {"role": role, "content": answer}
        after = tokenizer.apply_chat_template(
            [*said, message], add_generation_prompt=True, **options
        )
        end = before.rfind(tokenizer.eos_token)
        if end < 0 or not after.startswith(before.rstrip()):
            raise ValueError("turns of this chat template are not ended by the stop token, or are "
                             "rewritten by later ones, so ids cannot be appended")  # fmt: skip
        between = list(
            tokenizer.encode(after[end + len(tokenizer.eos_token) :], add_special_tokens=False)
        )
        # The policy itself has sampled the stop token, unless a stop string ended its turn.
        stop = int(tokenizer.eos_token_id)
        return between if ids[-1] == stop else [stop, *between]

    return wrap


def play(
    client: RolloutClient,
    prompts: Sequence[Any],
    tool: Tool,
    *,
    wrap: Wrap,
    turns: int,
    group_size: int,
    **settings: Any,
) -> list[Group]:
    """Groups of episodes, one group for each prompt.

    An episode that has no room in the context for what it is answered ends with its last turn, as
    ``length``.

    Args:
        client: of the server that samples.
        prompts: as :meth:`RolloutClient.rollout` takes them.
        tool: asked after each turn that ended by itself, but the last.
        wrap: makes token ids of what it answers.
        turns: that an episode may have.
        group_size: episodes of each prompt.
        settings: of every turn, e.g. ``max_tokens``, ``temperature``.
    """
    # A prompt must leave room for a token.
    longest = client.info().limits["max_model_len"] - 1
    first = client.rollout(prompts, group_size=group_size, **settings)
    episodes = [_begin(sample) for sample in first.samples]
    active = list(range(len(episodes)))
    for _ in range(turns - 1):
        going_on: dict[int, Episode] = {}
        for index in active:
            answered = _answered(episodes[index], tool, wrap)
            if answered is not None and len(answered.ids) > longest:
                episodes[index] = replace(episodes[index], finish_reason="length")
            elif answered is not None:
                going_on[index] = answered
        if not going_on:
            break
        # Contexts differ from here on, so each is a prompt of its own.
        ids = [episode.ids for episode in going_on.values()]
        answers = client.rollout(ids, group_size=1, **settings).samples
        for (index, episode), answer in zip(going_on.items(), answers, strict=True):
            episodes[index] = _went_on(episode, answer)
        active = list(going_on)
    return [
        replace(group, samples=tuple(e for e in episodes if e.group_id == group.group_id))
        for group in first.groups
    ]


def _begin(sample: Sample) -> Episode:
    fields = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    sampled = np.ones(len(sample.completion_ids), bool)
    return Episode(**fields, sampled=sampled, turns=(sample.text or "",))


def _answered(episode: Episode, tool: Tool, wrap: Wrap) -> Episode | None:
    """The episode with what the tool says behind it, or None if it is over."""
    if episode.finish_reason != "stop" or (answer := tool(episode)) is None:
        return None
    ids = np.array(wrap(episode.ids, answer), np.int32)
    return replace(
        episode,
        completion_ids=np.concatenate([episode.completion_ids, ids]),
        logprobs=np.concatenate([episode.logprobs, np.zeros(len(ids), np.float32)]),
        sampled=np.concatenate([episode.sampled, np.zeros(len(ids), bool)]),
    )


def _went_on(episode: Episode, answer: Sample) -> Episode:
    start = len(episode.completion_ids)
    spans = [Span(s.version, s.digest, s.start + start, s.end + start) for s in answer.spans]
    text = answer.text or ""
    return replace(
        episode,
        completion_ids=np.concatenate([episode.completion_ids, answer.completion_ids]),
        logprobs=np.concatenate([episode.logprobs, answer.logprobs]),
        sampled=np.concatenate([episode.sampled, np.ones(len(answer.completion_ids), bool)]),
        spans=(*episode.spans, *spans),
        finish_reason=answer.finish_reason,
        turns=(*episode.turns, text),
        text=text,
    )

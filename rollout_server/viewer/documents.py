"""What the page is told, as plain data. Texts are decoded here, so call these in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollout_server.policies import Policies
from rollout_server.prompts import PromptEncoder
from rollout_server.recent import RecentGroup, RecentRollout
from rollout_server.viewer.facts import FactBook, Facts, GroupsQuery, reward_facts, select
from rollout_server.viewer.tokens import pieces
from shared.protocol import Sample, Span

_PREVIEW_CHARS = 240
_PREVIEW_TOKENS = 512
_SHOWN_RUNNING = 8
MAX_TOKENS_SHOWN = 2048
_PUBLISHES = 256
_BARS = 16


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads groups for people.

    Attributes:
        encoder: decodes ids.
        book: of facts.
    """

    encoder: PromptEncoder
    book: FactBook

    def groups(self, newest_first: Sequence[RecentGroup], query: GroupsQuery) -> dict[str, Any]:
        """One page of groups."""
        shown, matching = select(newest_first, query, self.book)
        prompts = self._previews([group.group.prompt_ids.tolist() for group in shown])
        return {
            "matching": matching,
            "groups": [
                {**self.summary(group), "prompt": prompt}
                for group, prompt in zip(shown, prompts, strict=True)
            ],
        }

    def summary(self, group: RecentGroup) -> dict[str, Any]:
        """A group in a line."""
        facts, rewards, rollout = self.book.of(group), reward_facts(group), group.rollout
        return {
            "id": group.group.id,
            "group_id": group.group.group_id,
            "seq": group.seq,
            "policy": rollout.policy,
            "purpose": rollout.purpose.value,
            "caller": rollout.caller,
            "max_tokens": rollout.max_tokens,
            "temperature": rollout.temperature,
            "finished_at": group.finished_at,
            "seconds": group.seconds,
            "staleness": group.staleness,
            "samples": len(facts.lengths),
            "distinct": facts.distinct,
            "truncated": facts.truncated,
            "mean_length": _mean(facts.lengths),
            "mean_logprob": _mean([x for x in facts.logprobs if x is not None]),
            "versions": facts.versions,
            "problem": facts.problem,
            "rewards": None if rewards is None else asdict(rewards),
            "bars": _bars(group, facts),
        }

    def whole(self, group: RecentGroup) -> dict[str, Any]:
        """A group with its prompt and all its samples."""
        samples = group.group.samples
        missing = [s.completion_ids.tolist() for s in samples if s.text is None]
        decoded = iter(self._decoded(missing))
        prompt_ids = group.group.prompt_ids.tolist()
        return {
            **self.summary(group),
            "prompt": self.encoder.decode_with_special(prompt_ids),
            "prompt_tokens": len(prompt_ids),
            "samples": [
                self._sample(group, index, next(decoded) if sample.text is None else sample.text)
                for index, sample in enumerate(samples)
            ],
        }

    def _sample(self, group: RecentGroup, index: int, text: str) -> dict[str, Any]:
        sample, facts, told = group.group.samples[index], self.book.of(group), group.rewards
        return {
            "text": text,
            "length": facts.lengths[index],
            "finish_reason": sample.finish_reason,
            "version": sample.version,
            "digest": sample.digest,
            "spans": [asdict(span) for span in sample.spans],
            "mean_logprob": facts.logprobs[index],
            "reward": None if told is None else told.rewards[index],
            "components": told.components[index] if told and told.components else {},
        }

    def tokens(self, sample: Sample, start: int) -> dict[str, Any]:
        """Token texts and logprobs of a sample from ``start`` on, so many at a time."""
        end = min(start + MAX_TOKENS_SHOWN, len(sample.completion_ids))
        ids = sample.completion_ids[start:end].tolist()
        logprobs = sample.logprobs[start:end].tolist()
        return {
            "next": end if end < len(sample.completion_ids) else None,
            "tokens": [
                {
                    "at": start + piece.start,
                    "text": piece.text,
                    "ids": ids[piece.start : piece.end],
                    "logprob": sum(logprobs[piece.start : piece.end]),
                    "version": _version_at(sample.spans, start + piece.start),
                }
                for piece in pieces(ids, self.encoder.decode_with_special)
            ],
        }

    def running(self, rollouts: Sequence[RecentRollout]) -> list[dict[str, Any]]:
        """Rollouts under way, the newest first, each with a prompt that it works on."""
        newest = rollouts[::-1][:_SHOWN_RUNNING]
        prompts = self._previews([rollout.next_prompt for rollout in newest])
        return [
            {
                "policy": rollout.policy,
                "purpose": rollout.purpose.value,
                "caller": rollout.caller,
                "began_at": rollout.began_at,
                "done": rollout.done,
                "total": rollout.total,
                "group_size": rollout.group_size,
                "prompt": prompt,
            }
            for rollout, prompt in zip(newest, prompts, strict=True)
        ]

    def _previews(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        texts = self._decoded([ids[:_PREVIEW_TOKENS] for ids in prompts])
        return [text.strip()[:_PREVIEW_CHARS] for text in texts]

    def _decoded(self, completions: Sequence[Sequence[int]]) -> list[str]:
        # The tokenizer takes no completions for one that is empty.
        return self.encoder.decode(completions) if completions else []


def publishes(policies: Policies) -> list[dict[str, Any]]:
    """The newest publishes of all policies that ended, oldest first, with how long each took."""
    ended = [
        {
            "at": publish.started_at,
            "policy": policy.name,
            "version": publish.version,
            "state": publish.state.value,
            "seconds": sum(publish.timings.values()),
            "timings": dict(publish.timings),
        }
        for policy in policies
        for publish in list(policy.history)
        if publish.timings
    ]
    return sorted(ended, key=lambda publish: float(publish["at"]))[-_PUBLISHES:]  # type: ignore[arg-type]


def _bars(group: RecentGroup, facts: Facts) -> list[tuple[int, bool, float | None]]:
    """Length, whether it was cut off, and reward of the first samples."""
    samples = group.group.samples[:_BARS]
    told = [None] * len(samples) if group.rewards is None else group.rewards.rewards
    return [
        (length, sample.finish_reason == "length", reward)
        for sample, length, reward in zip(samples, facts.lengths, told, strict=False)
    ]


def _version_at(spans: Sequence[Span], token: int) -> int | None:
    return next((span.version for span in spans if span.start <= token < span.end), None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

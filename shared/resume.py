"""Going on with samples that a publish in mode ``abort`` has cut off.

The tokens so far become the beginning of the completion that is asked for next, as ids: nothing is
tokenized again, and the server decodes text and looks for stop strings over all of it. The joined
sample names the version of each span, and its logprobs are those of the policies that sampled them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.errors import DeadlineExceeded, InvalidRequest, Problem
from shared.protocol import DEFAULT_MAX_TOKENS, Rollout, Sample, Span

# They hold when sampling starts, and a publish has come since.
_EXACT = ("version", "digest")
# What cannot be true of a sample that is made in parts, and what it would have to be.
_INDIVISIBLE = {"presence_penalty": 0, "frequency_penalty": 0, "partial": False}


@dataclass(frozen=True, slots=True)
class Continuation:
    """What has to be asked to finish one sample.

    Attributes:
        sample: as it was aborted.
        prompt: ids of its prompt and of what it has so far, and where the latter begins.
        settings: of the rollout, for one sample with the tokens that are left.
    """

    sample: Sample
    prompt: dict[str, Any]
    settings: dict[str, Any]


class Resumption:
    """What is left of a rollout that is to be whole.

    Args:
        prompts: of the rollout.
        settings: of the rollout. Its deadline counts from now.

    Raises:
        InvalidRequest: with these settings no sample can be continued.
    """

    def __init__(self, prompts: Sequence[Any], settings: Mapping[str, Any]) -> None:
        self._prompts = prompts
        self._settings = {k: v for k, v in settings.items() if k not in _EXACT}
        self._begun_at = time.monotonic()
        problems = [
            Problem(name, str(settings[name]), f"{only} with resume_aborted")
            for name, only in _INDIVISIBLE.items()
            if settings.get(name, only) != only
        ]
        if problems:
            raise InvalidRequest("aborted samples could not be continued", problems=problems)

    def of(self, rollout: Rollout) -> list[Continuation]:
        """The requests that finish a rollout's aborted samples; empty when there are none.

        Raises:
            DeadlineExceeded: there is no time left for them.
        """
        return [
            self._continuation(sample)
            for sample in rollout.samples
            if sample.finish_reason == "abort"
        ]

    def _continuation(self, sample: Sample) -> Continuation:
        original = self._prompts[sample.group_id]
        begins = len(sample.prompt_ids)
        if isinstance(original, Mapping):  # it was begun before this rollout
            begins = original["completion_from"]
        limit = self._settings.get("max_tokens", DEFAULT_MAX_TOKENS)
        settings = {
            **self._settings,
            **self._deadline(),
            "group_size": 1,
            "max_tokens": limit - len(sample.completion_ids),
            # The same seed would draw the noise of the first tokens a second time.
            "seed": None,
        }
        ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
        return Continuation(sample, {"token_ids": ids, "completion_from": begins}, settings)

    def _deadline(self) -> dict[str, float]:
        """What is left of the time."""
        seconds = self._settings.get("deadline_seconds")
        if seconds is None:
            return {}
        left = seconds - (time.monotonic() - self._begun_at)
        if left <= 0:
            raise DeadlineExceeded(f"samples were aborted, and {seconds:g} s have passed")
        return {"deadline_seconds": left}


def joined(rollout: Rollout, finished: Mapping[int, Sample]) -> Rollout:
    """The rollout with its aborted samples replaced.

    Args:
        finished: the continuation's sample, by ``id`` of the aborted one.
    """

    def whole(sample: Sample) -> Sample:
        rest = finished.get(id(sample))
        return sample if rest is None else _join(sample, rest)

    groups = tuple(
        replace(group, samples=tuple(whole(sample) for sample in group.samples))
        for group in rollout.groups
    )
    return replace(rollout, groups=groups)


def _join(first: Sample, rest: Sample) -> Sample:
    import numpy as np

    offset = len(first.completion_ids)
    moved = [Span(s.version, s.digest, s.start + offset, s.end + offset) for s in rest.spans]
    spans = [span for span in (*first.spans, *moved) if span.end > span.start]
    oldest = spans[0] if spans else rest.spans[0]
    return replace(
        first,
        completion_ids=np.concatenate([first.completion_ids, rest.completion_ids]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        finish_reason=rest.finish_reason,
        version=oldest.version,
        digest=oldest.digest,
        spans=tuple(_merged(spans)) or rest.spans,
        text=rest.text,
    )


def _merged(spans: list[Span]) -> list[Span]:
    """Neighbours of one version as one span."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = replace(merged[-1], end=span.end)
        else:
            merged.append(span)
    return merged

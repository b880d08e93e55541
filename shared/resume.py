"""Going on with samples that a publish in mode ``abort`` has cut off.

The tokens so far become part of the next prompt, as ids, so nothing is tokenized again. The joined
sample names the version of each span, and its logprobs are those of the policies that sampled them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shared.protocol import Group, Rollout, Sample, SamplingSettings, Span

_DEFAULT_MAX_TOKENS = SamplingSettings.model_fields["max_tokens"].default


@dataclass(frozen=True, slots=True)
class Continuation:
    """What has to be asked to finish one sample.

    Attributes:
        sample: as it was aborted.
        prompt: ids of its prompt and of what it has so far.
        settings: of the rollout, for one sample with the tokens that are left.
    """

    sample: Sample
    prompt: list[int]
    settings: dict[str, Any]


def continuations(rollout: Rollout, settings: Mapping[str, Any]) -> list[Continuation]:
    """The requests that finish a rollout's aborted samples; empty when there are none."""
    limit = settings.get("max_tokens", _DEFAULT_MAX_TOKENS)
    return [
        Continuation(
            sample,
            [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()],
            {
                **settings,
                "group_size": 1,
                "max_tokens": limit - len(sample.completion_ids),
                # The same seed would draw the noise of the first tokens a second time.
                "seed": None,
            },
        )
        for sample in rollout.samples
        if sample.finish_reason == "abort"
    ]


def joined(rollout: Rollout, finished: Mapping[int, Sample]) -> Rollout:
    """The rollout with its aborted samples replaced.

    Args:
        finished: the continuation's sample, by ``id`` of the aborted one.
    """

    def whole(sample: Sample) -> Sample:
        rest = finished.get(id(sample))
        return sample if rest is None else _join(sample, rest)

    groups = tuple(
        Group(group.group_id, group.prompt_ids, tuple(whole(sample) for sample in group.samples))
        for group in rollout.groups
    )
    return replace(rollout, groups=groups)


def _join(first: Sample, rest: Sample) -> Sample:
    offset = len(first.completion_ids)
    moved = [Span(s.version, s.digest, s.start + offset, s.end + offset) for s in rest.spans]
    spans = [span for span in (*first.spans, *moved) if span.end > span.start]
    # Text is decoded in two parts: a character split between them shows as two marks.
    text = None if first.text is None else first.text + (rest.text or "")
    oldest = spans[0] if spans else rest.spans[0]
    return replace(
        first,
        completion_ids=np.concatenate([first.completion_ids, rest.completion_ids]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        finish_reason=rest.finish_reason,
        version=oldest.version,
        digest=oldest.digest,
        spans=tuple(_merged(spans)) or rest.spans,
        text=text,
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

"""What is asked for when a publish has cut samples off, and what becomes of the parts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from shared.errors import DeadlineExceeded, InvalidRequest
from shared.protocol import FinishReason, Group, Rollout, Sample, Span
from shared.resume import Resumption, joined


def sample(
    prompt: list[int],
    completion: list[int],
    finish_reason: FinishReason,
    version: int = 3,
    text: str | None = "text",
) -> Sample:
    spans = (Span(version, f"d{version}", 0, len(completion)),)
    return Sample(
        group_id=0,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=-np.array(completion, np.float32),
        finish_reason=finish_reason,
        version=version,
        digest=f"d{version}",
        spans=spans,
        text=text,
    )


def rollout_of(*samples: Sample) -> Rollout:
    return Rollout("m", "t", "default", {}, (Group(0, samples[0].prompt_ids, samples),))


ABORTED = sample([1, 2], [7, 8, 9], "abort")


def test_only_aborted_samples_are_gone_on_with() -> None:
    whole = rollout_of(sample([1], [2], "stop"), sample([1], [2], "length"))
    assert Resumption([[1]], {}).of(whole) == []
    mixed = rollout_of(sample([1, 2], [2], "stop"), ABORTED)
    (only,) = Resumption([[1, 2]], {}).of(mixed)
    assert only.sample is ABORTED


def test_the_completion_begins_where_the_prompt_ends() -> None:
    (only,) = Resumption(["hi"], {"max_tokens": 10, "stop": ["x"]}).of(rollout_of(ABORTED))
    assert only.prompt == {"token_ids": [1, 2, 7, 8, 9], "completion_from": 2}
    assert only.settings["max_tokens"] == 7
    assert (only.settings["group_size"], only.settings["stop"]) == (1, ["x"])


def test_a_completion_that_was_begun_before_begins_there() -> None:
    prompt = {"token_ids": [1, 2], "completion_from": 1}
    (only,) = Resumption([prompt], {}).of(rollout_of(ABORTED))
    assert only.prompt == {"token_ids": [1, 2, 7, 8, 9], "completion_from": 1}
    assert only.settings["max_tokens"] == 512 - 3


def test_exact_conditions_are_not_asked_for_again() -> None:
    settings = {"version": 3, "digest": "0" * 32, "min_version": 2, "policy": "default"}
    (only,) = Resumption(["hi"], settings).of(rollout_of(ABORTED))
    assert not {"version", "digest"} & only.settings.keys()
    assert (only.settings["min_version"], only.settings["policy"]) == (2, "default")


def test_the_deadline_is_that_of_all_parts() -> None:
    resumption = Resumption(["hi"], {"deadline_seconds": 60.0})
    (first,) = resumption.of(rollout_of(ABORTED))
    assert 0 < first.settings["deadline_seconds"] < 60
    late = Resumption(["hi"], {"deadline_seconds": 1e-6})
    time.sleep(0.001)
    with pytest.raises(DeadlineExceeded):
        late.of(rollout_of(ABORTED))
    assert late.of(rollout_of(sample([1], [2], "stop"))) == []


@pytest.mark.parametrize(
    "settings", [{"presence_penalty": 0.5}, {"frequency_penalty": -1}, {"partial": True}]
)
def test_what_cannot_be_gone_on_with_is_refused_first(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Resumption(["hi"], settings)
    assert [problem.where for problem in refusal.value.problems] == list(settings)


def test_parts_are_joined_and_the_last_has_the_text() -> None:
    rest = sample([1, 2, 7, 8, 9], [4, 5], "stop", version=4, text="whole")
    (group,) = joined(rollout_of(ABORTED), {id(ABORTED): rest}).groups
    (whole,) = group.samples
    assert whole.prompt_ids.tolist() == [1, 2]
    assert whole.completion_ids.tolist() == [7, 8, 9, 4, 5]
    assert whole.logprobs.tolist() == [-7, -8, -9, -4, -5]
    assert whole.spans == (Span(3, "d3", 0, 3), Span(4, "d4", 3, 5))
    assert (whole.version, whole.finish_reason, whole.text) == (3, "stop", "whole")

"""Samples cut off at every place and continued: the whole is what it would have been uncut.

The engine is a script that says one text, and is aborted where the test wants it to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_server.app import create_app
from rollout_server.engine import Completion, VersionSpan
from rollout_server.settings import ServerSettings
from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import InvalidRequest, PreconditionFailed
from shared.protocol import Sample
from shared.requests import SamplingSettings
from tests.rollout_server.support import FakeEngine, serving

PROMPT = [5, 6, 7]
TEXT = "so \u20ac1 and \U0001f600, then </end> and more"


class Script(FakeEngine):
    """Says one text, a byte a token, and is aborted after the tokens that it is told.

    Attributes:
        ids: of the whole text.
        aborts: lengths of the completion at which it is aborted, in order.
        settings: what it was asked with, each time.
    """

    ids: list[int]
    aborts: list[int]
    settings: list[SamplingSettings]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSettings, n: int, *_: Any
    ) -> list[Completion]:
        if list(prompt_ids[: len(PROMPT)]) != PROMPT:  # the server tries whether it works
            return [Completion([0], [-1.0], "length", (VersionSpan(self.version, 0, 1),))] * n
        start = len(prompt_ids) - len(PROMPT)
        assert list(prompt_ids[len(PROMPT) :]) == self.ids[:start]
        self.settings.append(sampling)
        end = min(len(self.ids), start + sampling.max_tokens)
        aborted = bool(self.aborts) and start <= self.aborts[0] < end
        end = self.aborts.pop(0) if aborted else end
        ids = self.ids[start:end]
        spans = (VersionSpan(self.version, 0, len(ids)),) if ids else ()
        reason = "abort" if aborted else "length"
        return [Completion(ids, [-1.0] * len(ids), reason, spans)] * n  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def url(
    script: Script, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any
) -> Iterator[str]:
    script.ids, script.aborts, script.settings = tokenizer.encode(TEXT), [], []
    staging = tmp_path_factory.mktemp("staging")
    settings = ServerSettings(model=str(tiny_model), staging_dir=staging)
    with serving(create_app(settings, build_engine=lambda _: script)) as url:
        with RolloutClient(url, timeout=60) as client:
            client.wait_ready(60)
        yield url


def resumed(url: str, **settings: Any) -> Sample:
    """The one sample of the prompt, made whole."""
    with RolloutClient(url, timeout=60) as client:
        rollout = client.rollout([PROMPT], group_size=1, resume_aborted=True, **settings)
    return rollout.samples[0]


def test_text_is_whole_wherever_it_was_cut(url: str, script: Script) -> None:
    assert len(script.ids) == len(TEXT.encode()), "a token is not a byte"
    for cut in range(len(script.ids)):
        script.aborts = [cut]
        sample = resumed(url)
        assert sample.completion_ids.tolist() == script.ids
        assert sample.text == TEXT
        assert (sample.finish_reason, len(sample.logprobs)) == ("length", len(script.ids))
        assert not script.aborts


def test_a_stop_string_is_seen_wherever_it_was_cut(url: str, script: Script) -> None:
    """The script itself knows nothing of stop strings, so only those across a cut are seen."""
    before = TEXT.encode().index(b"</end>")
    for cut in range(before + 1, before + len("</end>")):
        script.aborts = [cut]
        sample = resumed(url, stop=["</end>", "never"])
        assert sample.text == TEXT[: TEXT.index("</end>") + len("</end>")]
        assert sample.finish_reason == "stop"
        assert len(sample.completion_ids) == len(sample.logprobs) == before + len("</end>")
        assert sample.spans[-1].end == len(sample.completion_ids)


def test_two_cuts_inside_one_character(url: str, script: Script) -> None:
    start = TEXT.encode().index("\U0001f600".encode())
    script.aborts = [start + 1, start + 3]
    assert resumed(url).text == TEXT
    script.aborts = [start + 1, start + 3]
    assert resumed(url, stop=["\U0001f600"]).text == TEXT[: TEXT.index("\U0001f600") + 1]


def test_the_asynchronous_client_resumes_the_same_way(url: str, script: Script) -> None:
    async def run() -> Sample:
        async with AsyncRolloutClient(url, timeout=60) as client:
            rollout = await client.rollout([PROMPT], group_size=1, resume_aborted=True, retries=2)
            return rollout.samples[0]

    script.aborts = [4, 5, 12]
    sample = asyncio.run(run())
    assert (sample.text, sample.completion_ids.tolist()) == (TEXT, script.ids)


def test_max_tokens_are_those_of_the_whole(url: str, script: Script) -> None:
    script.aborts, script.settings = [7], []
    sample = resumed(url, max_tokens=11)
    assert len(sample.completion_ids) == 11
    assert [asked.max_tokens for asked in script.settings] == [11, 4]


def test_an_exact_version_holds_for_the_first_part(url: str, script: Script) -> None:
    with RolloutClient(url, timeout=60) as client:
        info = client.info()
        exact: dict[str, Any] = {"version": info.version, "digest": info.digest}
        script.aborts = [3]
        assert resumed(url, **exact).text == TEXT
        with pytest.raises(PreconditionFailed):
            resumed(url, version=info.version + 1)


def test_what_cannot_be_resumed_is_refused_before_it_runs(url: str, script: Script) -> None:
    script.settings = []
    with pytest.raises(InvalidRequest, match="presence_penalty"):
        resumed(url, presence_penalty=0.5, purpose="eval")
    assert script.settings == []


def test_a_begun_completion_is_resumed_from_where_it_began(url: str, script: Script) -> None:
    start = TEXT.encode().index("\u20ac".encode()) + 1  # inside a character
    prompt = {"token_ids": [*PROMPT, *script.ids[:start]], "completion_from": len(PROMPT)}
    script.aborts = [start + 1]
    with RolloutClient(url, timeout=60) as client:
        rollout = client.rollout([prompt], group_size=1, resume_aborted=True)
    (sample,) = rollout.samples
    assert sample.prompt_ids.tolist() == prompt["token_ids"]
    assert sample.completion_ids.tolist() == script.ids[start:]
    assert sample.text == TEXT

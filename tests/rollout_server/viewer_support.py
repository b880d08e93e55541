"""An engine that says what a script has, with logprobs, so that there is something to look at."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from rollout_server.app import create_app
from rollout_server.engine import Completion, VersionSpan
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.requests import SamplingSettings
from tests.rollout_server.engines import Running
from tests.rollout_server.support import FakeEngine, serving
from trainer.tiny_policy import build_model, build_tokenizer

HOSTILE = (
    "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"
    "<b onclick='window.stolen = 3'>bold</b> \x1b[31mred\x1b[0m \u202etxt.exe\u202c "
    "zero\u200bwidth \U000e0041 &amp; ${window.stolen = 4} \x07"
)
"""What a page or a terminal must show, and never do."""

Script = Callable[[str], Iterable[str]]
"""Answers to a prompt, again and again if there are fewer than the group needs."""


@dataclass
class ScriptedEngine(FakeEngine):
    """Says what it is told to."""

    script: Script = lambda _: ["4", "5"]
    tokenizer: PreTrainedTokenizerFast = field(default_factory=build_tokenizer)
    served: int = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSettings, n: int, *rest: Any
    ) -> list[Completion]:
        await super().generate(prompt_ids, sampling, n, *rest)
        if sampling.max_tokens == 1:  # the server's own first question, when it comes up
            return [self._completion("4", 1, 0)] * n
        answers = itertools.cycle(self.script(str(self.tokenizer.decode(list(prompt_ids)))))
        self.served += 1
        return [self._completion(next(answers), sampling.max_tokens, i) for i in range(n)]

    def _completion(self, text: str, most: int, number: int) -> Completion:
        ids = [*self.tokenizer.encode(text), int(self.tokenizer.eos_token_id)]
        kept = ids[:most]
        noise = random.Random(f"{text} {number} {self.served}")
        logprobs = [-(noise.expovariate(1.5) ** 2) for _ in kept]
        spans = (VersionSpan(self.version, 0, len(kept)),)
        return Completion(kept, logprobs, "stop" if len(ids) <= most else "length", spans)


@contextmanager
def scripted(
    model: Path, tmp_path: Path, script: Script, *, token: str | None = None, **settings: Any
) -> Iterator[tuple[Running, ScriptedEngine]]:
    """A whole server on a socket, but for vLLM; its client has the token."""
    engine = ScriptedEngine(script=script)
    known = ServerSettings(
        model=str(model), staging_dir=tmp_path / "staging", openai_routes=False, **settings
    )
    app = create_app(known, build_engine=lambda _: engine)
    with serving(app) as url, RolloutClient(url, token=token) as client:
        client.wait_ready(60)
        yield Running(url, client), engine


def untrained(folder: Path) -> Path:
    """A model that nobody trained, with its tokenizer: all that a scripted engine needs."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

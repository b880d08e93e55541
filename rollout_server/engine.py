"""The inference engine behind one small protocol; :mod:`rollout_server.vllm_engine` implements it.

The engine knows token ids and integer versions; prompts, text, digests and HTTP are other modules'
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared.protocol import FinishReason, PauseMode
from shared.requests import SamplingSettings


class EngineDied(Exception):
    """The engine's processes are gone; only a new engine can go on."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One immutable version of a LoRA policy.

    Attributes:
        name: never used for other weights, since cached keys and values are filed under it.
        serial: positive, and never used for other weights either.
        folder: a PEFT adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.
    """

    name: str
    serial: int
    folder: Path


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``[start, end)`` were sampled by weights ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Given tokens as the engine's weights see them.

    Attributes:
        logprobs: ``[len(ids) - 1]``; entry i is that of ``ids[i + 1]`` after all before it.
        version: of the weights; None if they were never stamped.
    """

    logprobs: Sequence[float]
    version: int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled sequence as the engine produced it.

    Attributes:
        token_ids: ``[completion_len]``, stop token included when the model produced one.
        logprobs: ``[completion_len]`` of the sampled distribution; one for each token.
        finish_reason: why it ended.
        spans: which weights sampled which tokens; empty when there are no tokens.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]


class Engine(Protocol):
    """What the service needs of an inference engine. Every method may raise EngineDied.

    Attributes:
        held: somebody has paused it for longer than a publish: resume has no effect.
    """

    held: bool

    @property
    def vocab_size(self) -> int:
        """Ids below this are meaningful to the model."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine can no longer generate, or None while it can."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        n: int,
        adapter: Adapter | None = None,
    ) -> list[Completion]:
        """Sample n completions of one prompt; cancelling the call cancels the work."""
        ...

    async def score(self, ids: Sequence[int], adapter: Adapter | None = None) -> Scored:
        """Log-probabilities of given tokens, at temperature 1; nothing is kept of the sampled."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, with what is in flight kept, finished or aborted; clear the caches."""
        ...

    async def resume(self) -> None:
        """Go on; kept samples recompute their caches under the weights that are loaded now."""
        ...

    async def load(self, paths: Sequence[Path]) -> None:
        """Write a complete checkpoint into every worker and check it. Only while paused.

        Raises:
            EngineFailure: the workers refused; their weights may be torn.
        """
        ...

    async def stamp(self, version: int) -> None:
        """Label tokens sampled from now on. Only while paused, after a load."""
        ...

    async def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter beside the base weights, while generation goes on.

        Raises:
            EngineFailure: it does not fit.
        """
        ...

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter that no request uses any more."""
        ...

    def shutdown(self) -> None:
        """Stop the engine's processes."""
        ...

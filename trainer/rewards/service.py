"""Scores from a service over HTTP: one POST for a batch of samples.

Request::

    POST url    content-type: application/json
    {"prompts": [text or chat messages, ...], "texts": [str, ...], "references": [str or null, ...],
     "options": {...}}

Answer, in the same order, where null is "no verdict" and ``errors`` may say why::

    200 {"scores": [1.0, 0.0, null], "errors": [null, null, "judge unavailable"]}

``options`` are those of the configuration other than ``url`` and ``headers``. A connection that is
refused or lost, and a 503, are tried again within the deadline; nothing else is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.errors import RewardError
from trainer.rewards.outcome import Failed, Outcome, TimedOut, failure, verdict

if TYPE_CHECKING:
    from trainer.reward_parts import Item

RETRY_S = 0.2
"""Wait before the first repetition; doubled after each."""


@dataclass(frozen=True, slots=True)
class Service:
    """Where to ask, and what goes with every request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Service:
        """From the options of a configuration.

        Raises:
            RewardError: there is no ``url``.
        """
        url = options.get("url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise RewardError(
                f"reward 'http' needs options.url, http://... or https://..., not {url!r}"
            )
        rest = {name: value for name, value in options.items() if name not in ("url", "headers")}
        return cls(url, dict(options.get("headers", {})), rest)

    async def score(self, items: Sequence[Item], timeout_s: float) -> list[Outcome]:
        """One outcome for each item; a deadline or a broken answer is one for all of them."""
        import httpx

        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._post(items, time.monotonic() + timeout_s)
            return _outcomes(answer, len(items))
        except (TimeoutError, httpx.TimeoutException):
            return [TimedOut(f"{self.url} did not answer within {timeout_s:g} s")] * len(items)
        except Exception as error:
            return [failure(error)] * len(items)

    async def _post(self, items: Sequence[Item], deadline: float) -> Any:
        import httpx

        body = {
            "prompts": [item.prompt for item in items],
            "texts": [item.text for item in items],
            "references": [item.reference for item in items],
            "options": dict(self.options),
        }
        wait = RETRY_S
        async with httpx.AsyncClient(timeout=None, headers=dict(self.headers)) as client:
            while True:
                try:
                    answer = await client.post(self.url, json=body)
                    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                        answer.raise_for_status()
                        return answer.json()
                    problem: Exception = httpx.HTTPStatusError(
                        f"503 from {self.url}", request=answer.request, response=answer
                    )
                except httpx.TransportError as error:
                    problem = error
                if time.monotonic() + wait >= deadline:
                    raise problem
                await asyncio.sleep(wait)
                wait *= 2


def _outcomes(answer: Any, count: int) -> list[Outcome]:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        raise ValueError(f"the answer has no list of {count} scores: {answer!s:.120}")
    errors = answer.get("errors") or [None] * count
    return [
        verdict(score)
        if score is not None
        else Failed(f"no verdict: {reason or 'no reason given'}")
        for score, reason in zip(scores, errors, strict=True)
    ]

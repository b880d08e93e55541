"""Log-probabilities of given token ids under a policy: for reference models and parity checks."""

from __future__ import annotations

import asyncio

import numpy as np

from rollout_server.adapters import AdapterPublisher
from rollout_server.admission import Admission, Slot
from rollout_server.auth import Caller
from rollout_server.policies import Policy
from rollout_server.prompts import unknown_id
from rollout_server.quotas import Cost
from rollout_server.supervisor import Supervisor
from shared.errors import EngineUnavailable, InvalidRequest, Problem
from shared.protocol import Score
from shared.requests import BegunCompletion, ScoreRequest

_ATTEMPTS = 16
_PROBLEMS_SHOWN = 20


class ScoreService:
    """Scores sequences on the engine, in the queue that rollouts wait in.

    Args:
        supervisor: runs the engine.
        adapters: keeps a LoRA adapter loaded while it scores.
        admission: says which sequence runs next.
        max_model_len: context in tokens; the engine always samples one more than it is given.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        adapters: AdapterPublisher,
        admission: Admission,
        *,
        max_model_len: int,
    ) -> None:
        self._supervisor = supervisor
        self._adapters = adapters
        self._admission = admission
        self._max_ids = max_model_len - 1

    async def score(self, caller: Caller, request: ScoreRequest, policy: Policy) -> list[Score]:
        """Every sequence, in order; all of them or an error.

        Raises:
            InvalidRequest: a sequence cannot be scored; nothing was run.
            Overloaded: there is no room in the queue.
            EngineUnavailable, EngineFailure: the engine could not finish.
        """
        await asyncio.to_thread(self._check, request)
        sequences, scores = request.sequences, dict[int, Score]()

        async def one(slot: Slot) -> None:
            with slot:
                scores[slot.index] = await self._sequence(sequences[slot.index], policy)

        costs = [Cost(1, len(sequence.token_ids)) for sequence in sequences]
        with self._admission.admit(caller, costs) as reservation:
            await reservation.run_each(one)
        return [scores[index] for index in range(len(sequences))]

    async def _sequence(self, sequence: BegunCompletion, policy: Policy) -> Score:
        # Entry i of what the engine gives belongs to token i + 1.
        first = sequence.completion_from - 1
        for _ in range(_ATTEMPTS):
            version, adapter = policy.version, policy.adapter
            with self._adapters.using(adapter):
                scored = await self._supervisor.score(sequence.token_ids, adapter)
            made_by = version if scored.version is None else scored.version
            # An adapter cannot change. Full weights may have: then the number that the policy bore
            # before or after need not be theirs.
            if adapter is not None or made_by == version == policy.version:
                logprobs = np.array(scored.logprobs[first:], np.float32)
                return Score(logprobs, version, policy.digests[version])
        raise EngineUnavailable(
            f"the weights changed under a sequence {_ATTEMPTS} times", retry_after=1.0
        )

    def _check(self, request: ScoreRequest) -> None:
        found = (self._problem(i, s.token_ids) for i, s in enumerate(request.sequences))
        problems = [problem for problem in found if problem]
        if problems:
            raise InvalidRequest(
                f"{len(problems)} of {len(request.sequences)} sequences cannot be scored",
                problems=problems[:_PROBLEMS_SHOWN],
            )

    def _problem(self, index: int, ids: list[int]) -> Problem | None:
        where, vocab_size = f"sequences[{index}].token_ids", self._supervisor.vocab_size
        if not 2 <= len(ids) <= self._max_ids:
            return Problem(where, f"{len(ids)} tokens", f"2 to {self._max_ids} tokens")
        return unknown_id(where, ids, vocab_size)

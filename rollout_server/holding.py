"""Inside the engine's process: a sample's tokens leave it when the sample ends, not one by one.

vLLM sends every token of every running sequence to the server as it is made, with three arrays of
one element for its log-probability: with a thousand sequences that takes longer than the model's
step. A rollout has no use for half a sample, so here the scheduler keeps what vLLM would send and
sends it whole. Who streams, or looks for stop strings while text is made, gets tokens as ever.

What is kept is handed over before weights get another version, since a message from the engine
names one version for all its tokens, and when samples are aborted: their tokens so far are of use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Held:
    """Tokens of one sample that have not left the engine.

    Attributes:
        client: to whom they go.
        scored: its log-probabilities are wanted.
        token_ids, logprobs, ranks: one for each token; the latter two are empty unless ``scored``.
        events: what the scheduler did to it meanwhile, for statistics: preemptions, above all.
        request, ends, most: vLLM's own, the tokens that end it, and how many of them it may have;
            ``most`` is 0 if anything else could end it.
    """

    client: int
    scored: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    request: Any = None
    ends: frozenset[int | None] = frozenset()
    most: int = 0

    def add_score(self, sampled: Sampled, row: int) -> None:
        """Keep the log-probability and the rank of one row of a step."""
        self.logprobs.append(sampled.logprobs[row])
        self.ranks.append(sampled.ranks[row])

    def fill(self, output: Any) -> None:
        """Move everything into a message of the engine's, an ``EngineCoreOutput``."""
        from vllm.v1.outputs import LogprobsLists

        output.new_token_ids, output.new_logprobs = self.token_ids, None
        output.events = self.events or None
        if self.scored and self.token_ids:
            output.new_logprobs = LogprobsLists(
                np.array(self.token_ids, np.int32)[:, None],
                np.array(self.logprobs, np.float32)[:, None],
                np.array(self.ranks, np.int32),
            )
        self.token_ids, self.logprobs, self.ranks, self.events = [], [], [], []


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens as the model's distribution has them; R is how many.

    Attributes:
        rows: of each request.
        logprobs, ranks: ``[R]``.
    """

    rows: dict[str, int]
    logprobs: list[float]
    ranks: list[int]


class Holding:
    """What holds outputs back, to be mixed into vLLM's scheduler class before it.

    Attributes:
        held: by request, for every request that may be held.
        ended: the same for requests that the latest call of ``finish_requests`` ended.
    """

    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[str, Held] = {}
        self.ended: dict[str, Held] = {}

    def add_request(self, request: Any) -> None:
        """Look at a new request: may its tokens be held?"""
        if _may_be_held(request):
            scored = request.sampling_params.num_logprobs is not None
            self.held[request.request_id] = Held(request.client_index, scored)
        super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        """End requests from outside; their tokens so far are in ``ended`` until the next call."""
        finished: list[Any] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        ids = (request.request_id for request in finished)
        self.ended = {id_: self.held.pop(id_) for id_ in ids if id_ in self.held}
        return finished

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """One step's tokens: those of samples that go on are kept, all others leave."""
        sampled = self._take_logprobs(model_runner_output)
        left = self._go_on(scheduler_output, model_runner_output, sampled)
        outputs: dict[int, Any] = super().update_from_output(left, model_runner_output)  # type: ignore[misc]
        for batch in outputs.values():
            batch.outputs = [output for output in batch.outputs if self._leaves(output, sampled)]
        return outputs

    def _go_on(self, scheduled: Any, _made: Any, _sampled: Sampled | None) -> Any:
        """Deal with requests that vLLM need not look at; returns the step without them."""
        return scheduled

    def _take_logprobs(self, step: Any) -> Sampled | None:
        """The log-probabilities of a step's tokens; None if there are none, or several a request.

        They are taken away from vLLM, which makes three arrays of them for each request, unless
        some request is not held.
        """
        logprobs = step.logprobs
        if logprobs is None or logprobs.cu_num_generated_tokens is not None:
            return None
        if len(self.held) == len(self.requests):
            step.logprobs = None
        return Sampled(
            step.req_id_to_index,
            logprobs.logprobs[:, 0].tolist(),
            logprobs.sampled_token_ranks.tolist(),
        )

    def _leaves(self, output: Any, sampled: Sampled | None) -> bool:
        held = self.held.get(output.request_id)
        if held is None:
            return True
        _keep(held, output, sampled)
        # The first message says that the prompt is through, and may bring its log-probabilities.
        if output.finish_reason is None and output.prefill_stats is None:
            return False
        held.fill(output)
        if output.finish_reason is not None:
            del self.held[output.request_id]
        return True


def _may_be_held(request: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and not params.num_logprobs  # none, or that of the sampled token alone
        and not params.logprob_token_ids
    )


def _keep(held: Held, output: Any, sampled: Sampled | None) -> None:
    held.token_ids += output.new_token_ids
    held.events += output.events or ()
    if not held.scored:
        return
    if (made := output.new_logprobs) is not None:
        held.logprobs += made.logprobs[:, 0].tolist()
        held.ranks += made.sampled_token_ranks.tolist()
    elif sampled is not None and output.new_token_ids:
        held.add_score(sampled, sampled.rows[output.request_id])


def hold_outputs(mixin: type[Holding]) -> None:
    """Make the scheduler of this process hold, and its engine send what is held when it is due."""
    from vllm.config import SchedulerConfig
    from vllm.v1.engine.core import EngineCoreProc

    scheduler_class = SchedulerConfig.get_scheduler_cls
    send_aborted, set_version = (
        EngineCoreProc._send_abort_outputs,
        EngineCoreProc.set_weight_version,
    )

    def get_scheduler_cls(self: Any) -> type:
        plain = scheduler_class(self)
        return type(f"Holding{plain.__name__}", (mixin, plain), {})

    def send_abort_outputs(self: Any, aborted: Any) -> None:
        _send(self, self.scheduler.ended.items())
        send_aborted(self, aborted)

    def set_weight_version(self: Any, weight_version: str) -> None:
        _send(self, self.scheduler.held.items())
        set_version(self, weight_version)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    EngineCoreProc._send_abort_outputs = send_abort_outputs
    EngineCoreProc.set_weight_version = set_weight_version


def _send(engine: Any, held: Iterable[tuple[str, Held]]) -> None:
    """Send what is held of some requests, which go on or not, as made by the present version."""
    for client, outputs in _messages(held):
        outputs.weight_version = engine._weight_version
        engine.output_queue.put_nowait((client, outputs))


def _messages(held: Iterable[tuple[str, Held]]) -> Iterator[tuple[int, Any]]:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    by_client = defaultdict[int, list[Any]](list)
    for request_id, sample in held:
        if sample.token_ids:
            by_client[sample.client].append(output := EngineCoreOutput(request_id, []))
            sample.fill(output)
    for client, outputs in by_client.items():
        yield client, EngineCoreOutputs(outputs=outputs)

"""Inside the engine's process: steps in which samples go on by a token each, in few operations.

vLLM looks at every request of a step as if anything could have happened to it, in about a hundred
calls. With a thousand sequences that takes longer than a small model's step, and nearly always one
and the same thing has happened: a token was added. That is done here in two short loops. Whatever
else happens to a request (its first token, its end, a preemption) is left to vLLM's own code, in
the same step or in this one, so that its rules are written down once.

All numbers that vLLM keeps are true after each call, so any call may follow any other.
"""

from __future__ import annotations

import logging
from copy import copy
from typing import TYPE_CHECKING, Any

from rollout_server.cache_slots import QuickSlots, has_one_plain_cache
from rollout_server.holding import Holding, Sampled

if TYPE_CHECKING:
    from rollout_server.holding import Held

log = logging.getLogger("tito.engine")

KNOWN_VERSION = "0.32.0"
"""The vLLM whose bookkeeping is followed here."""


class DecodeSteps(Holding):
    """Holding, and quick steps; to be mixed into vLLM's scheduler class before it.

    Attributes:
        quick: the bookkeeping that these settings need is the one that is known here.
    """

    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    max_model_len: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    num_waiting_for_streaming_input: int
    prev_step_scheduled_req_ids: set[str]
    use_v2_model_runner: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        super().__init__(*args, **kwargs)
        self.quick = _is_known(self)
        self._ahead = isinstance(self, AsyncScheduler)
        self._unpaused, self._status_running = PauseState.UNPAUSED, RequestStatus.RUNNING
        if self.quick:
            self._slots = QuickSlots(self)
        else:
            log.info("steps are vLLM's own: its version, or this setting, is not known")

    def add_request(self, request: Any) -> None:
        """Note what ends a request, if its tokens are held."""
        super().add_request(request)
        held = self.held.get(request.request_id)
        if held is not None and self.quick:
            _note_ends(held, request, self.max_model_len)

    # A step's tokens.

    def _go_on(self, scheduled: Any, made: Any, sampled: Sampled | None) -> Any:
        """Add the tokens of samples that go on; returns what of the step is left to vLLM."""
        if not self.quick or made.num_nans_in_logits or not made.sampled_token_ids:
            return scheduled
        left = copy(scheduled)
        left.num_scheduled_tokens = {
            request_id: count
            for request_id, count in scheduled.num_scheduled_tokens.items()
            if not self._goes_on(request_id, count, made, sampled)
        }
        return left

    def _goes_on(self, request_id: str, count: int, made: Any, sampled: Sampled | None) -> bool:
        """Add the one token of a request, if that is all there is to do."""
        held = self.held.get(request_id)
        if held is None or not held.most or request_id in made.prompt_logprobs_dict:
            return False
        row = made.req_id_to_index[request_id]
        tokens, request = made.sampled_token_ids[row], held.request
        if (
            len(tokens) != 1
            or (token := tokens[0]) in held.ends
            or len(request._output_token_ids) + 1 >= held.most
            or request.status is not self._status_running
            or request.prefill_stats is not None
            or request.num_stale_output_tokens
            or request.events
            or (sampled is None and held.scored)
        ):
            return False
        self._append(request, token, count)
        held.token_ids.append(token)
        if sampled is not None and held.scored:
            held.add_score(sampled, row)
        return True

    def _append(self, request: Any, token: int, count: int) -> None:
        request.num_in_flight_tokens -= count
        request._output_token_ids.append(token)
        request._all_token_ids.append(token)
        if len(request._all_token_ids) % self._slots.block_size == 0:
            request.update_block_hashes()
        if self._ahead:
            request.num_output_placeholders -= 1
            self._slots.computed(
                request, request.num_computed_tokens - request.num_output_placeholders
            )

    # The next step.

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """One token for each running request; vLLM's own choice where it could be another."""
        if not throttle_prefills and self.quick and self._nobody_can_join():
            going = self._all_by_one_token()
            if going is not None and self._slots.suffice(going):
                return self._scheduled(going)
        return super().schedule(throttle_prefills)  # type: ignore[misc]

    def _nobody_can_join(self) -> bool:
        slots = len(self.running) + self.num_waiting_for_streaming_input
        return (
            self._pause_state is self._unpaused  # type: ignore[attr-defined]
            and 0 < len(self.running) <= self.max_num_scheduled_tokens
            and (slots >= self.max_num_active_reqs or not (self.waiting or self.kv_holding_waiting))
        )

    def _all_by_one_token(self) -> list[Any] | None:
        """Requests that take a token; None if some would take more, or need anything else."""
        going = []
        for request in self.running:
            computed, coming = request.num_computed_tokens, request.num_output_placeholders
            if coming and computed + 2 - coming >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is on the way
            if (
                len(request._all_token_ids) + coming - computed != 1
                or computed + 2 > self.max_model_len
                or request.is_prefill_chunk
                or request.spec_token_ids
                or request.structured_output_request is not None
                or not self._worker_knows(request)
            ):
                return None
            going.append(request)
        return going

    def _worker_knows(self, request: Any) -> bool:
        """The first model runner has to be sent all tokens of who was not in the last step."""
        return self.use_v2_model_runner or request.request_id in self.prev_step_scheduled_req_ids

    def _scheduled(self, going: list[Any]) -> Any:
        from vllm.v1.core.sched.output import CachedRequestData

        ids = [request.request_id for request in going]
        blocks = [self._slots.take(request) for request in going]
        step = self._empty_step()
        step.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=blocks,
            num_computed_tokens=[request.num_computed_tokens for request in going],
            num_output_tokens=[
                len(request._output_token_ids) + request.num_output_placeholders
                for request in going
            ],
        )
        step.num_scheduled_tokens = dict.fromkeys(ids, 1)
        step.total_num_scheduled_tokens = len(ids)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(ids)
        for request in going:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            if self._ahead:
                request.num_output_placeholders += 1
        return step

    def _empty_step(self) -> Any:
        """A step of vLLM's in which nobody runs, for all in it that is not about who runs."""
        running, active = self.running, self.max_num_active_reqs
        self.running, self.max_num_active_reqs = [], 0
        try:
            return super().schedule()  # type: ignore[misc]
        finally:
            self.running, self.max_num_active_reqs = running, active


def _is_known(scheduler: Any) -> bool:
    import vllm
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs = [kind for kind in type(scheduler).__mro__ if kind.__module__.startswith("vllm.")]
    return (
        vllm.__version__.split("+")[0] == KNOWN_VERSION
        and theirs[0] in (Scheduler, AsyncScheduler)
        and scheduler.connector is None
        and scheduler.ec_connector is None
        and scheduler.aux_output_connector is None
        and scheduler.perf_metrics is None
        and not scheduler.return_sampling_mask
        and not scheduler.use_pp
        and scheduler.num_spec_tokens == 0
        and scheduler.num_sampled_tokens_per_step == 1
        and scheduler.max_num_encoder_input_tokens == 0
        and has_one_plain_cache(scheduler)
    )


def _note_ends(held: Held, request: Any, context: int) -> None:
    """For requests that nothing else can end, or change, than a token or a length."""
    params = request.sampling_params
    if request.resumable or request.use_structured_output or params.repetition_detection:
        return
    held.request = request
    held.ends = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])
    held.most = min(request.max_tokens, context - request.num_prompt_tokens)

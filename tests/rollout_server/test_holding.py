"""Outputs that the engine's process holds back: what leaves it, when, and with which numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.outputs import LogprobsLists

from rollout_server.holding import Held, Holding, _messages

STOP = FinishReason.STOP
EVENTS = EngineCoreEventType.PREEMPTED, EngineCoreEventType.SCHEDULED


class PlainScheduler:
    """What vLLM's scheduler does with outputs, and nothing else of it."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: Any, _: Any) -> list[Any]:
        return [self.requests.pop(id_) for id_ in request_ids if id_ in self.requests]

    def update_from_output(self, ends: dict[str, FinishReason], step: Any) -> dict[int, Any]:
        outputs: dict[int, list[EngineCoreOutput]] = {}
        for row, id_ in enumerate(step.req_ids):
            sliced = step.logprobs.slice_request(row, 1) if step.logprobs else None
            output = EngineCoreOutput(
                id_, [step.tokens[row]], new_logprobs=sliced, finish_reason=ends.get(id_)
            )
            output.events, self.requests[id_].events = self.requests[id_].events or None, []
            outputs.setdefault(self.requests[id_].client_index, []).append(output)
        for id_ in ends:
            del self.requests[id_]
        return {client: EngineCoreOutputs(outputs=made) for client, made in outputs.items()}


class Scheduler(Holding, PlainScheduler):
    """As it is mixed in the engine's process."""


def request(name: str, client: int = 0, **params: Any) -> Any:
    params = {"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 0} | params
    sampling = SamplingParams(**params)
    return SimpleNamespace(
        request_id=name, client_index=client, sampling_params=sampling, events=[]
    )


def step(**tokens: int) -> Any:
    """One token for each request; its log-probability is the hundredth part, negated."""
    ids = np.array(list(tokens.values()), np.int32)
    return SimpleNamespace(
        req_ids=list(tokens),
        req_id_to_index={name: row for row, name in enumerate(tokens)},
        tokens=ids.tolist(),
        logprobs=LogprobsLists(ids[:, None], (-ids / 100).astype(np.float32)[:, None], ids + 1),
    )


def sent(outputs: dict[int, Any]) -> dict[str, list[int]]:
    return {o.request_id: list(o.new_token_ids) for eco in outputs.values() for o in eco.outputs}


def scheduler(*requests: Any) -> Scheduler:
    made = Scheduler()
    for one in requests:
        made.add_request(one)
    return made


def test_a_sample_leaves_whole_when_it_ends() -> None:
    of = scheduler(request("a"), request("b"))
    assert sent(of.update_from_output({}, step(a=3, b=4))) == {}
    assert sent(of.update_from_output({}, step(a=5, b=6))) == {}
    ended = of.update_from_output({"a": STOP}, step(a=7, b=8))
    assert sent(ended) == {"a": [3, 5, 7]}
    output = ended[0].outputs[0]
    assert output.finish_reason is STOP
    assert (
        output.new_logprobs.logprobs.ravel().tolist()
        == np.array([-0.03, -0.05, -0.07], np.float32).tolist()
    )
    assert output.new_logprobs.logprob_token_ids.ravel().tolist() == [3, 5, 7]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [4, 6, 8]
    assert list(of.held) == ["b"]


def test_what_befell_a_sample_leaves_with_it() -> None:
    of = scheduler(request("a"))
    preempted, scheduled = (EngineCoreEvent.new_event(kind, 1.0) for kind in EVENTS)
    of.requests["a"].events += [preempted]
    assert sent(of.update_from_output({}, step(a=3))) == {}
    of.requests["a"].events += [scheduled]
    assert sent(of.update_from_output({}, step(a=4))) == {}
    ended = of.update_from_output({"a": STOP}, step(a=5))
    assert ended[0].outputs[0].events == [preempted, scheduled]


def test_whoever_streams_gets_each_token_and_nobody_else_is_disturbed() -> None:
    streamed = request("s", output_kind=RequestOutputKind.DELTA)
    of = scheduler(request("a"), streamed)
    first = of.update_from_output({}, step(a=3, s=4))
    assert sent(first) == {"s": [4]}
    assert first[0].outputs[0].new_logprobs.logprobs.shape == (1, 1)
    both = of.update_from_output({"a": STOP, "s": STOP}, step(a=5, s=6))
    assert sent(both) == {"a": [3, 5], "s": [6]}
    (whole,) = (o for o in both[0].outputs if o.request_id == "a")
    assert (
        whole.new_logprobs.logprobs.ravel().tolist()
        == np.array([-0.03, -0.05], np.float32).tolist()
    )


def test_stop_strings_and_several_logprobs_are_not_held() -> None:
    of = scheduler(
        request("stop", stop=["x"], detokenize=True), request("top", logprobs=3), request("held")
    )
    assert list(of.held) == ["held"]


def test_nobody_gets_logprobs_who_did_not_ask() -> None:
    of = scheduler(request("a"), request("b", logprobs=None))
    of.update_from_output({}, step(a=3, b=4))
    ended = of.update_from_output({"a": STOP, "b": STOP}, step(a=5, b=6))
    made = {o.request_id: o.new_logprobs for o in ended[0].outputs}
    assert made["b"] is None
    assert made["a"].logprobs.shape == (2, 1)


def test_what_was_held_of_aborted_requests_is_there_once() -> None:
    of = scheduler(request("a"), request("b"))
    of.update_from_output({}, step(a=3, b=4))
    of.finish_requests(["a"], None)
    assert [(id_, held.token_ids) for id_, held in of.ended.items()] == [("a", [3])]
    of.finish_requests(["nobody"], None)
    assert of.ended == {}
    assert list(of.held) == ["b"]


def test_messages_go_to_each_client_and_leave_nothing_held() -> None:
    held = {"a": Held(0, True, [3], [-0.5], [1]), "b": Held(1, False, [4, 5]), "c": Held(0, True)}
    messages = dict(_messages(held.items()))
    assert sent(messages) == {"a": [3], "b": [4, 5]}
    assert {client: [o.request_id for o in eco.outputs] for client, eco in messages.items()} == {
        0: ["a"],
        1: ["b"],
    }
    assert all(not sample.token_ids for sample in held.values())
    assert dict(_messages(held.items())) == {}

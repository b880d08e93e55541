"""Rollouts: prompts in, groups of samples out, each labelled with the policy that made it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

import numpy as np

from rollout_server.adapters import AdapterPublisher
from rollout_server.admission import Admission, Reservation, Slot
from rollout_server.auth import Caller
from rollout_server.engine import Completion
from rollout_server.policies import Policy
from rollout_server.prompts import PromptEncoder
from rollout_server.quotas import Cost
from rollout_server.seam import cut_at_stop
from rollout_server.seeds import seeded
from rollout_server.supervisor import Supervisor
from shared.arrays import IdArray
from shared.errors import InvalidRequest, Problem
from shared.protocol import Group, Purpose, Rollout, Sample, Span
from shared.requests import BegunCompletion, Prompt, RolloutRequest, SamplingSettings

# What would make the sampler's distribution differ from the one that the trainer computes (law 3).
_TRAINING_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x > 0, "above 0: a group of equal answers has no gradient"),
    "top_p": (lambda x: x == 1, "1.0: the trainer sees the whole distribution"),
    "top_k": (lambda x: x == 0, "0: the trainer sees the whole distribution"),
    "min_p": (lambda x: x == 0, "0.0: the trainer sees the whole distribution"),
    "presence_penalty": (lambda x: x == 0, "0.0: the trainer applies no penalties"),
    "frequency_penalty": (lambda x: x == 0, "0.0: the trainer applies no penalties"),
    "repetition_penalty": (lambda x: x == 1, "1.0: the trainer applies no penalties"),
}


class RolloutService:
    """Runs rollouts on the engine.

    Args:
        supervisor: runs the engine, which samples token ids.
        encoder: renders prompts and decodes completions.
        adapters: keeps a LoRA adapter loaded while groups are sampled from it.
        admission: says which group runs next.
        model: name echoed in answers.
        max_model_len: context in tokens.
        max_samples: samples that one request may ask for.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        encoder: PromptEncoder,
        adapters: AdapterPublisher,
        admission: Admission,
        *,
        model: str,
        max_model_len: int,
        max_samples: int,
    ) -> None:
        self._supervisor = supervisor
        self._encoder = encoder
        self._adapters = adapters
        self._admission = admission
        self._model = model
        self._max_model_len = max_model_len
        self._max_samples = max_samples

    def heading(self, request: RolloutRequest, policy: Policy) -> Rollout:
        """The answer to a request as far as it is known before there are groups."""
        return Rollout(
            model=self._model,
            tokenizer=self._encoder.fingerprint,
            policy=policy.name,
            sampling=request.sampling().model_dump() | {"purpose": request.purpose.value},
            groups=(),
        )

    async def prepare(self, request: RolloutRequest) -> list[list[int]]:
        """Ids of each prompt of a checked request.

        Raises:
            InvalidRequest: a prompt cannot be used.
        """
        prompts = [
            prompt.token_ids if isinstance(prompt, BegunCompletion) else prompt
            for prompt in request.prompts
        ]
        return await asyncio.to_thread(self._encoder.encode, prompts, request.chat_template_kwargs)

    def admit(
        self, caller: Caller, request: RolloutRequest, prompts: Sequence[list[int]]
    ) -> Reservation:
        """Queue every prompt that is not among the groups that the caller has.

        Raises:
            InvalidRequest, Overloaded: there is no room for them, ever or now.
        """
        size = request.group_size
        return self._admission.admit(
            caller,
            [
                Cost(size, size * (len(prompts[index]) + request.max_tokens))
                for index in _wanted(request)
            ],
        )

    async def run(
        self,
        request: RolloutRequest,
        policy: Policy,
        prompts: Sequence[list[int]],
        reservation: Reservation,
        finished: Callable[[Group], None],
    ) -> None:
        """Sample every prompt that was queued, each group when its turn comes.

        Args:
            request: checked.
            prompts: ids of each of its prompts.
            reservation: what :meth:`admit` gave for them.
            finished: told each group as soon as its last sample has ended.

        Raises:
            EngineUnavailable, EngineFailure: the engine could not finish; the rest was cancelled.
        """
        sampling, wanted = request.sampling(), _wanted(request)

        async def group(slot: Slot) -> None:
            index = wanted[slot.index]
            finished(await self._group(index, prompts[index], sampling, request, policy, slot))

        await reservation.run_each(group)

    def check(self, caller: Caller, request: RolloutRequest) -> None:
        """Refuse what can be refused without looking at prompts.

        Raises:
            InvalidRequest: a setting cannot be used.
            Overloaded: there is no room in the queue, however short the prompts.
        """
        problems = _training_problems(request) if request.purpose is Purpose.TRAIN else []
        if request.max_tokens >= self._max_model_len:
            allowed = f"1 to {self._max_model_len - 1}, the context less one prompt token"
            problems.append(Problem("max_tokens", str(request.max_tokens), allowed))
        vocab_size = self._supervisor.vocab_size
        problems += [
            Problem(f"stop_token_ids[{index}]", str(token), f"ids below {vocab_size}")
            for index, token in enumerate(request.stop_token_ids)
            if token >= vocab_size
        ]
        problems += _seam_problems(request)
        samples = len(request.prompts) * request.group_size
        if samples > self._max_samples:
            got = f"{len(request.prompts)} prompts x {request.group_size} = {samples} samples"
            problems.append(Problem("group_size", got, f"{self._max_samples} samples a request"))
        if problems:
            raise InvalidRequest("the request cannot be run", problems=problems)
        size = request.group_size
        self._admission.check(
            caller, [Cost(size, size * request.max_tokens)] * len(_wanted(request))
        )

    async def _group(
        self,
        group_id: int,
        ids: list[int],
        sampling: SamplingSettings,
        request: RolloutRequest,
        policy: Policy,
        slot: Slot,
    ) -> Group:
        adapter, version = policy.adapter, policy.version
        with slot, self._adapters.using(adapter):
            completions = await self._supervisor.generate(
                ids, seeded(sampling, group_id), request.group_size, adapter
            )

        def group() -> Group:
            prompt_ids = np.array(ids, np.int32)
            begun = _begun(request.prompts[group_id])
            samples = tuple(
                _sample(group_id, prompt_ids, made, text, _spans(made, policy, version))
                for made, text in self._read(completions, begun, request)
            )
            return Group(group_id, prompt_ids, samples, id=secrets.token_hex(8))

        # Off the loop: decoding and copying a large group takes a while.
        return await asyncio.to_thread(group)

    def _read(
        self, completions: list[Completion], begun: list[int], request: RolloutRequest
    ) -> list[tuple[Completion, str | None]]:
        """Each completion, up to its stop string, and its text."""
        if begun and request.stop:
            completions = [
                cut_at_stop(begun, made, request.stop, self._encoder.decode_with_special)
                for made in completions
            ]
        texts: list[str] | list[None] = [None] * len(completions)
        if request.text:
            texts = self._encoder.decode([[*begun, *made.token_ids] for made in completions])
        return list(zip(completions, texts, strict=True))


def _wanted(request: RolloutRequest) -> list[int]:
    """Indices of the prompts whose groups the caller does not have yet."""
    had = frozenset(request.have)
    return [index for index in range(len(request.prompts)) if index not in had]


def _begun(prompt: Prompt) -> list[int]:
    """The ids of a prompt that are the beginning of its completions."""
    if isinstance(prompt, BegunCompletion):
        return prompt.token_ids[prompt.completion_from :]
    return []


def _spans(completion: Completion, policy: Policy, version: int) -> tuple[Span, ...]:
    """Which version made which tokens.

    The engine labels tokens with the full weights that sampled them. A LoRA policy's version is
    the one that the group began with, since its adapter cannot change under it.
    """
    end = len(completion.token_ids)
    if policy.adapter is not None or not completion.spans:
        return (Span(version, policy.digests[version], 0, end),)
    return tuple(
        Span(span.version, policy.digests[span.version], span.start, span.end)
        for span in completion.spans
    )


def _sample(
    group_id: int,
    prompt_ids: IdArray,
    completion: Completion,
    text: str | None,
    spans: tuple[Span, ...],
) -> Sample:
    return Sample(
        group_id=group_id,
        prompt_ids=prompt_ids,
        completion_ids=np.array(completion.token_ids, np.int32),
        logprobs=np.array(completion.logprobs, np.float32),
        finish_reason=completion.finish_reason,
        version=spans[0].version,
        digest=spans[0].digest,
        spans=spans,
        text=text,
    )


def _training_problems(request: RolloutRequest) -> list[Problem]:
    return [
        Problem(name, str(value), f'{allowed} (or purpose "eval")')
        for name, (accepts, allowed) in _TRAINING_RULES.items()
        if not accepts(value := getattr(request, name))
    ]


def _seam_problems(request: RolloutRequest) -> list[Problem]:
    """The engine penalises what it has sampled itself, which leaves out what was begun before."""
    if not any(isinstance(prompt, BegunCompletion) for prompt in request.prompts):
        return []
    return [
        Problem(name, str(value), "0.0 where a completion is continued")
        for name in ("presence_penalty", "frequency_penalty")
        if (value := getattr(request, name))
    ]

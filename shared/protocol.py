"""What travels between a caller and the rollout server, and its limits.

Answers are frozen dataclasses over numpy arrays, because a trainer wants arrays and a packed
answer can be viewed without a copy. Requests are in :mod:`shared.requests`, which a client does not
need. ``PROTOCOL.md`` beside this file describes both for other languages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shared.arrays import IdArray, LogprobArray

PROTOCOL_VERSION = 1

MSGPACK = "application/msgpack"
JSON = "application/json"
SAFETENSORS = "application/x-safetensors"
OCTETS = "application/octet-stream"
DELTA = "application/x-tito-delta"
FRAMES = "application/x-tito-frames"
"""A stream of msgpack maps, each behind its length."""
NDJSON = "application/x-ndjson"
"""A stream of JSON objects, one a line."""

DIGEST_HEADER = "x-tito-digest"
DIGEST_TRAILER = "trailer"
"""Value of the digest header when the digest follows the last byte of the safetensors file."""
FENCE_HEADER = "x-tito-fence"
"""Carries the fencing number of the lease under which weights are published."""
IDEMPOTENCY_HEADER = "idempotency-key"
"""Names a rollout, so that a request that is sent again attaches to it."""
IDEMPOTENCY_KEY = r"^[A-Za-z0-9._:-]{8,128}$"

DEFAULT_POLICY = "default"
POLICY_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""What a policy may be called: it becomes part of URLs, scopes and file names."""

ADAPTER_CONFIG_KEY = "adapter_config"
"""Key in a safetensors header's metadata under which a streamed LoRA adapter has PEFT's config."""

DEFAULT_MAX_TOKENS = 512
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
MAX_GROUP_SIZE = 1024
MAX_PROMPTS = 16384
MAX_DEADLINE_S = 86400.0
MAX_FRAME_BYTES = 1 << 29
"""Longest frame of a stream, without its length: 512 MiB."""


class Purpose(StrEnum):
    """What the samples are for; it decides which sampling settings are accepted."""

    TRAIN = "train"
    """Sampler and trainer must see one distribution: temperature > 0, no truncation of it."""
    EVAL = "eval"
    """Anything goes, greedy decoding included; such samples must not be trained on."""


class PauseMode(StrEnum):
    """What becomes of samples in flight while new weights are loaded."""

    KEEP = "keep"
    """They go on under the new weights, their caches recomputed; spans tell which made what."""
    DRAIN = "drain"
    """They finish first, within a deadline."""
    ABORT = "abort"
    """They are returned as they are, with finish_reason ``abort``."""


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a completion were sampled by policy ``version``.

    Attributes:
        digest: content digest of that version, 32 hex characters.
    """

    version: int
    digest: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion of one prompt: the record that a trainer trains on.

    Attributes:
        group_id: which prompt of the request; advantages are computed by group.
        prompt_ids: int32 ``[prompt_len]``, as the engine saw them. Shared within the group.
        completion_ids: int32 ``[completion_len]``, with the stop token when the model produced one.
        logprobs: float32 ``[completion_len]``, natural log, of the distribution sampled from
            (temperature applied); entry i belongs to completion token i.
        finish_reason: ``length`` means truncated by max_tokens or the context.
        version: version of the policy that sampled the first token (the oldest involved).
        digest: content digest of that version.
        spans: every version involved, in token order; one span unless a reload fell inside.
        text: decoded completion without special tokens, or None when it was not asked for.
    """

    group_id: int
    prompt_ids: IdArray
    completion_ids: IdArray
    logprobs: LogprobArray
    finish_reason: FinishReason
    version: int
    digest: str
    spans: tuple[Span, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All samples of one prompt, in the order in which the engine numbered them.

    Attributes:
        group_id: which prompt of its rollout.
        prompt_ids: int32 ``[prompt_len]``.
        id: name that the server gave it, and no other group ever; empty if none did.
    """

    group_id: int
    prompt_ids: IdArray
    samples: tuple[Sample, ...]
    id: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Answer of ``POST /rollout``: groups in prompt order.

    Attributes:
        model: as the server was started with it.
        tokenizer: fingerprint, see :func:`shared.tokens.tokenizer_fingerprint`.
        policy: which one sampled.
        sampling: fields of :class:`shared.requests.SamplingSettings` as they were applied.
        missing: group ids of the prompts that were not finished by the deadline.
    """

    model: str
    tokenizer: str
    policy: str
    sampling: dict[str, Any]
    groups: tuple[Group, ...]
    missing: tuple[int, ...] = ()

    @property
    def samples(self) -> list[Sample]:
        """The prompts x group_size records, group by group."""
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """A given completion as a policy sees it.

    Attributes:
        logprobs: float32 ``[completion_len]``, natural log, at temperature 1.
        version: of the policy that scored it.
        digest: content digest of that version.
    """

    logprobs: LogprobArray
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Totals:
    """How much a stream has brought.

    Attributes:
        groups, samples: whole ones.
        completion_tokens: of all samples.
        prompt_tokens: of each group's prompt once.
        finish_reasons: number of samples that ended for each reason.
    """

    groups: int = 0
    samples: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def with_group(self, group: Group) -> Totals:
        """These, and one group more."""
        reasons = Counter(self.finish_reasons)
        reasons.update(sample.finish_reason for sample in group.samples)
        return Totals(
            self.groups + 1,
            self.samples + len(group.samples),
            self.prompt_tokens + len(group.prompt_ids),
            self.completion_tokens + sum(len(s.completion_ids) for s in group.samples),
            dict(reasons),
        )


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What closes a streamed rollout.

    Attributes:
        model, tokenizer, policy, sampling: as of :class:`Rollout`.
        totals: of the groups that the stream brought.
        missing: group ids of the prompts that were not finished by the deadline.
    """

    model: str
    tokenizer: str
    policy: str
    sampling: dict[str, Any]
    totals: Totals
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """Answer of ``POST /reload``.

    Attributes:
        version: the number that the live policy has from now on.
        digest: digest of the weights as served (after the cast to the server's dtype).
        timings: seconds of each stage that there was: upload or transfer, verify, stage, pause,
            load, commit, resume, copy; PROTOCOL.md says which there are when.
        durable: there is a copy of them, from which they survive the engine's death.
    """

    version: int
    digest: str
    timings: dict[str, float] = field(default_factory=dict)
    durable: bool = True


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Answer of ``GET /info``.

    Attributes:
        protocol: version of the wire that the server speaks.
        model: name or path that it was started with.
        tokenizer: fingerprint; a trainer's must be the same.
        vocab_size: token ids are below it.
        dtype: that weights are served in.
        policy, version, digest: the default policy, as it is live now.
        limits: the largest that is taken, by name: ``max_model_len`` (tokens), ``max_samples``,
            ``max_body_bytes`` and others.
    """

    protocol: int
    model: str
    tokenizer: str
    vocab_size: int
    dtype: str
    policy: str
    version: int
    digest: str
    limits: dict[str, int]

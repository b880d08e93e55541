"""What would go wrong with a run, found before an hour of anybody's GPU is spent.

    python -m trainer doctor CONFIG.toml [section.key=value ...]

Talks to the real server, loads the real model and samples real prompts, a few of them. Each line
is ok, a warning or a failure, and says what to do. Nothing is trained. The model is published, so
that sampler and trainer can be compared; afterwards the server gets back what it served. Weights
that could not be given back, because somebody else published them, are left alone and the
comparison is left out. Versions count on; the lease is returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import transformers
from rich.console import Console
from rich.text import Text
from torch import Tensor

from shared.client import RolloutClient
from shared.errors import TitoError
from shared.lesson import truncated_share
from shared.protocol import ReloadResult, Rollout, ServerInfo
from trainer.agreement import refuse_other_sampling, refuse_other_tokenizer
from trainer.batch import Batch, collate
from trainer.checks import check_records
from trainer.config import Config
from trainer.errors import MismatchError
from trainer.learner import Learner, build_learner
from trainer.ledger import Fate, fate_of, fates_of_group
from trainer.memory import Memory, estimate, gibibytes, room
from trainer.packing import use_packing
from trainer.prompts import Task, training_prompts
from trainer.publish import publish, tensors_digest
from trainer.rewards import Failed, Score, open_reward, score_rollout
from trainer.run import connect
from trainer.update import policy_logprobs

OK, WARNING, FAILURE = "ok", "warning", "failure"

PROMPTS, GROUP = 8, 8
"""At most so many prompts and answers each; enough to see, and done within a minute."""

MAX_TRUNCATED, MANY_TRUNCATED = 0.15, 0.5
LOGPROB_RMS = {"float32": (0.005, 0.02), "half": (0.06, 0.15)}
"""Root mean square of log pi - log sampler in nats: what is usual, and what is too much. Measured
elsewhere: 0.002 when both compute in float32, 0.03 to 0.04 when one or both use bfloat16."""
PACKED_GAP = {"float32": 1e-4, "half": 0.15}


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        verdict: ``ok``, ``warning`` or ``failure``.
        found: what was seen, in numbers.
        advice: what to do about it; shown unless it is ok.
    """

    name: str
    verdict: str
    found: str
    advice: str = ""


def print_finding(console: Console, finding: Finding) -> None:
    """One line, and what to do below it."""
    style = {OK: "green", WARNING: "yellow", FAILURE: "red"}[finding.verdict]
    head = Text.assemble((f"{finding.verdict:<8}", style), f"{finding.name}: {finding.found}")
    console.print(head)
    if finding.verdict != OK:
        console.print(Text(f"        what to do: {finding.advice}"))


def diagnose(config: Config) -> Iterator[Finding]:
    """Find what is wrong, one thing after the other; those that need what failed are left out."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        learner = build_learner(config, None)
    except TitoError as error:
        yield Finding("model", FAILURE, str(error), "Mend model.path, or the settings in [model].")
        return
    yield _packing(learner)
    yield from _servers(config, learner)
    with ExitStack() as stack:
        client = stack.enter_context(connect(config))
        try:
            info = client.wait_ready(0.0)
            refuse_other_tokenizer(info.tokenizer, learner.fingerprint)
        except TitoError:
            pass  # said above
        else:
            yield from _exchange(config, learner, client, info)
    yield _memory(config, learner)


def _packing(learner: Learner) -> Finding:
    if not learner.unpacked:
        return Finding("model", OK, "loaded; dropout is off, sequences are packed")
    return Finding(
        "model", WARNING, f"loaded; sequences are padded: {learner.unpacked}",
        "Nothing, if you want it so. Padding costs time where answers differ in length.",
    )  # fmt: skip


def _servers(config: Config, learner: Learner) -> Iterator[Finding]:
    for url in config.server.every_url():
        with connect(config, url, 10.0) as client:
            try:
                info = client.wait_ready(config.server.ready_timeout)
            except TitoError as error:
                yield Finding("server", FAILURE, f"{url}: {error}",
                              "Start it (python -m rollout_server --model PATH), or mend "
                              "server.url and the token.")  # fmt: skip
                continue
            yield Finding("server", OK, f"{url} serves {info.model} at version {info.version}")
            try:
                refuse_other_tokenizer(info.tokenizer, learner.fingerprint)
                yield Finding("tokenizer", OK, f"the same on both sides ({info.tokenizer[:12]})")
            except MismatchError as error:
                yield Finding("tokenizer", FAILURE, str(error),
                              "Start the server with the files of model.path, chat template "
                              "included.")  # fmt: skip


def _exchange(
    config: Config, learner: Learner, client: RolloutClient, info: ServerInfo
) -> Iterator[Finding]:
    """Everything that needs the server: publish, sample, score, and give back."""
    tasks = training_prompts(config).take(0, min(PROMPTS, config.rollout.prompts_per_step))
    group_size = min(GROUP, config.rollout.group_size)
    try:
        with _lent(config, learner, client, info) as handshake:
            yield handshake.finding
            rollout = client.rollout(
                [task.prompt for task in tasks],
                group_size=group_size,
                purpose="train",
                **config.rollout.sampling(),
            )
        if handshake.given_back:
            yield handshake.given_back
    except TitoError as error:
        yield Finding("rollout", FAILURE, str(error), "Mend what the server says.")
        return
    yield _records(config, rollout, len(tasks), group_size, info.vocab_size)
    batch = collate(rollout.samples, learner.pad_id).to(learner.device)
    logprobs = _logprobs(config, learner, batch)
    half = "bfloat16" in (config.model.dtype, info.dtype) or "16" in config.server.publish_dtype
    precision = "half" if half or config.model.dtype == "float16" else "float32"
    if handshake.served:
        yield _agreement(batch, logprobs, precision, config, info)
    yield _repeatable(config, learner, batch, logprobs)
    if not learner.unpacked:
        yield _packed(config, learner, batch, logprobs)
    yield from _rewards(config, tasks, rollout)
    yield _room(rollout)


@dataclass
class _Handshake:
    finding: Finding
    served: bool
    given_back: Finding | None = None


@contextmanager
def _lent(
    config: Config, learner: Learner, client: RolloutClient, info: ServerInfo
) -> Iterator[_Handshake]:
    """The server with this run's weights, if what it serves can be given back."""
    dtypes = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
    digests = {name: tensors_digest(learner.model, dtype) for name, dtype in dtypes.items()}
    with client.lease(holder="doctor") as lease:
        if info.version > 0 and info.digest not in digests.values():
            yield _Handshake(_left_alone(info), served=False)
            return
        dtype = dtypes[config.server.publish_dtype]
        result = publish(client, learner.model, dtype, fence=lease.fence)
        handshake = _Handshake(
            _published(result, digests[config.server.publish_dtype]), served=True
        )
        yield handshake
        if result.digest != info.digest:
            back = client.reset(fence=lease.fence)
            handshake.given_back = _given_back(info, back)


def _left_alone(info: ServerInfo) -> Finding:
    return Finding(
        "reload", WARNING,
        f"the server serves weights that somebody published (version {info.version}, "
        f"{info.digest[:12]}) and model.path has others; nothing was published, and "
        "log-probabilities were not compared",
        "POST /policies/default/reset brings the server's own checkpoint back; then ask again.",
    )  # fmt: skip


def _published(result: ReloadResult, ours: str) -> Finding:
    if result.digest != ours:
        return Finding("reload", FAILURE, f"sent {ours[:12]}, the server verified "
                       f"{result.digest[:12]}", "Something between changes the bytes: look for a "
                       "proxy.")  # fmt: skip
    return Finding("reload", OK, f"published and verified: version {result.version}, digest "
                   f"{result.digest[:12]} on both sides")  # fmt: skip


def _given_back(info: ServerInfo, back: ReloadResult) -> Finding:
    if back.digest == info.digest:
        return Finding("given back", OK, f"the server serves {info.digest[:12]} again, as version "
                       f"{back.version}")  # fmt: skip
    return Finding(
        "given back",
        WARNING,
        f"the server serves its checkpoint as {back.digest[:12]}, not {info.digest[:12]} as before",
        "Restart it if that matters; a run publishes its own weights first.",
    )


def _records(
    config: Config, rollout: Rollout, prompts: int, group_size: int, vocab_size: int
) -> Finding:
    check = check_records(rollout, prompts=prompts, group_size=group_size, vocab_size=vocab_size)
    if not check.passed:
        return Finding("records", FAILURE, check.found, check.advice)
    try:
        refuse_other_sampling(rollout.sampling, temperature=config.rollout.temperature)
    except MismatchError as error:
        return Finding("records", FAILURE, str(error), "Look for a proxy that changes settings.")
    return Finding("records", OK, check.found)


@torch.no_grad()
def _logprobs(config: Config, learner: Learner, batch: Batch) -> Tensor:
    """Of the completion tokens, ``[K]``, row by row in portions of the run's size."""
    parts = []
    for row in range(len(batch.rows)):
        part = batch.select(torch.tensor([row], device=batch.rows.device))
        if part.completion_mask.any():
            parts.append(policy_logprobs(learner.model, part, config)[part.completion_mask])
    return torch.cat(parts) if parts else batch.sampler_logprobs.new_zeros(0)


def _agreement(
    batch: Batch, logprobs: Tensor, precision: str, config: Config, info: ServerInfo
) -> Finding:
    gap = logprobs - batch.sampler_logprobs[batch.completion_mask]
    rms, worst = gap.square().mean().sqrt().item(), gap.abs().max().item()
    usual, too_much = LOGPROB_RMS[precision]
    found = (
        f"server ({info.dtype}) and trainer ({config.model.dtype}) differ by {rms:.4f} nats rms, "
        f"{worst:.3f} at most, over {len(gap)} tokens; usual in {precision} precision: {usual}"
    )
    advice = (
        "Check that temperature, chat template and weights are the same on both sides; when they "
        "are, a float32 head (model.head_dtype) and a correction in [objective] help."
    )
    if rms <= usual:
        return Finding("log-probabilities", OK, found)
    return Finding("log-probabilities", WARNING if rms <= too_much else FAILURE, found, advice)


def _repeatable(config: Config, learner: Learner, batch: Batch, logprobs: Tensor) -> Finding:
    """What the ratio would be if nothing was learned in between: dropout would show here."""
    again = _logprobs(config, learner, batch)
    worst = (again - logprobs).abs().max().item() if len(logprobs) else 0.0
    found = f"the ratio of two passes is 1 to within {worst:.1g}"
    if worst <= 1e-5:
        return Finding("ratio at step 0", OK, found)
    return Finding("ratio at step 0", FAILURE, found, "Something in the model draws at random: "
                   "look for dropout in its code.")  # fmt: skip


def _packed(config: Config, learner: Learner, batch: Batch, logprobs: Tensor) -> Finding:
    """Rows one by one against all of them together in one packed row."""
    with torch.no_grad():
        together = policy_logprobs(learner.model, batch, config)[batch.completion_mask]
        learner.model.set_attn_implementation("sdpa")
        padded = policy_logprobs(learner.model, batch, config)[batch.completion_mask]
        use_packing(learner.model)
    worst = max((x - logprobs).abs().max().item() for x in (together, padded))
    allowed = PACKED_GAP["float32" if learner.model.dtype == torch.float32 else "half"]
    found = f"packed, padded and single sequences differ by {worst:.1g} nats; allowed: {allowed}"
    if worst <= allowed:
        return Finding("packing", OK, found)
    return Finding("packing", FAILURE, found, "Set model.packing to off, and report the model.")


def _rewards(config: Config, tasks: list[Task], rollout: Rollout) -> Iterator[Finding]:
    try:
        with open_reward(config.reward) as reward:
            outcomes = score_rollout(reward, tasks, rollout)
    except TitoError as error:
        yield Finding("reward", FAILURE, str(error), "Mend [reward].")
        return
    flat = [outcome for group in outcomes for outcome in group]
    failed = [outcome for outcome in flat if isinstance(outcome, Failed)]
    scores = torch.tensor([o.value for o in flat if isinstance(o, Score)])
    if failed:
        yield Finding("reward", FAILURE if not len(scores) else WARNING,
                      f"no verdict on {len(failed)} of {len(flat)} answers: {failed[0].reason}",
                      "Mend the reward function; such answers are not trained.")  # fmt: skip
    else:
        yield Finding("reward", OK, f"{len(flat)} answers scored, mean {scores.mean():.3f}, "
                      f"from {scores.min():g} to {scores.max():g}")  # fmt: skip
    fates = [fates_of_group(g.samples, o) for g, o in zip(rollout.groups, outcomes, strict=True)]
    yield _variance([fate_of(group) for group in fates])


def _variance(groups: list[Fate]) -> Finding:
    useful, total = groups.count(Fate.TRAINED), len(groups)
    found = f"rewards differ within {useful} of {total} groups"
    if useful * 2 >= total:
        return Finding("variance", OK, found)
    return Finding("variance", WARNING if useful else FAILURE, found,
                   "Nothing is learned from the others. Take prompts that are neither too hard nor "
                   "too easy, a larger rollout.group_size, or a finer reward.")  # fmt: skip


def _room(rollout: Rollout) -> Finding:
    share = truncated_share(rollout.samples)
    longest = max(len(sample.completion_ids) for sample in rollout.samples)
    found = f"{share:.0%} of answers hit max_tokens (the longest has {longest}); below 15% is well"
    if share <= MAX_TRUNCATED:
        return Finding("truncation", OK, found)
    return Finding("truncation", WARNING if share <= MANY_TRUNCATED else FAILURE, found,
                   "Raise rollout.max_tokens, ask for shorter answers, or check that the chat "
                   "template's end of turn is a stop token.")  # fmt: skip


def _memory(config: Config, learner: Learner) -> Finding:
    needed: Memory = estimate(learner.model, config)
    available = room(learner.device)
    found = f"about {needed}; {gibibytes(available)} are free on {learner.device}"
    if needed.total <= 0.9 * available:
        return Finding("memory", OK, found)
    return Finding("memory", WARNING if needed.total <= available else FAILURE, found,
                   "Lower train.micro_batch_tokens, set model.activation_checkpointing, or use "
                   "bfloat16.")  # fmt: skip

"""What the doctor looks at: each function finds one thing, and says what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from shared.errors import TitoError
from shared.lesson import truncated_share
from shared.protocol import Rollout, ServerInfo
from trainer.agreement import refuse_other_sampling
from trainer.batch import Batch, micro_batches
from trainer.checks import check_records
from trainer.config import Config
from trainer.errors import MismatchError
from trainer.learner import Learner
from trainer.ledger import Fate, fate_of, fates_of_group
from trainer.memory import Memory, estimate, gibibytes, room
from trainer.packing import use_packing
from trainer.prompts import Task
from trainer.rewards import Failed, Score, open_reward, score_rollout
from trainer.update import policy_logprobs

OK, WARNING, FAILURE = "ok", "warning", "failure"

MAX_TRUNCATED, MANY_TRUNCATED = 0.15, 0.5
LOGPROB_RMS = {"float32": (0.005, 0.02), "half": (0.06, 0.15)}
"""Root mean square of log pi - log sampler in nats: what is usual, and what is too much. Measured
elsewhere: 0.002 when both compute in float32, 0.03 to 0.04 when one or both use bfloat16."""
MAX_UNMOVED = 0.05
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


def find_damage(
    config: Config, rollout: Rollout, prompts: int, group_size: int, vocab_size: int
) -> Finding:
    """Whether records have come as they were asked for, sampled as they were asked for."""
    check = check_records(rollout, prompts=prompts, group_size=group_size, vocab_size=vocab_size)
    if not check.passed:
        return Finding("records", FAILURE, check.found, check.advice)
    try:
        refuse_other_sampling(rollout.sampling, temperature=config.rollout.temperature)
    except MismatchError as error:
        return Finding("records", FAILURE, str(error), "Look for a proxy that changes settings.")
    return Finding("records", OK, check.found)


@torch.no_grad()
def completion_logprobs(config: Config, learner: Learner, batch: Batch) -> Tensor:
    """Of the completion tokens, ``[K]``, row by row in portions of the run's size."""
    parts = []
    for row in range(len(batch.rows)):
        part = batch.select(torch.tensor([row], device=batch.rows.device))
        if part.completion_mask.any():
            parts.append(policy_logprobs(learner.model, part, config)[part.completion_mask])
    return torch.cat(parts) if parts else batch.sampler_logprobs.new_zeros(0)


def find_disagreement(
    batch: Batch, logprobs: Tensor, precision: str, config: Config, info: ServerInfo
) -> Finding:
    """How far the trainer's log-probabilities are from the sampler's."""
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


def find_randomness(config: Config, learner: Learner, batch: Batch, logprobs: Tensor) -> Finding:
    """What the ratio would be if nothing was learned in between: dropout would show here."""
    again = completion_logprobs(config, learner, batch)
    worst = (again - logprobs).abs().max().item() if len(logprobs) else 0.0
    found = f"the ratio of two passes is 1 to within {worst:.1g}"
    if worst <= 1e-5:
        return Finding("ratio at step 0", OK, found)
    return Finding("ratio at step 0", FAILURE, found, "Something in the model draws at random: "
                   "look for dropout in its code.")  # fmt: skip


def find_packing(config: Config, learner: Learner, batch: Batch) -> Finding:
    """Rows one by one against a micro-batch of them in one packed row, and padded."""
    limit = max(config.train.micro_batch_tokens, int(batch.lengths.max()))
    part = micro_batches(batch, limit, packed=True)[0]
    alone = completion_logprobs(config, learner, part)
    with torch.no_grad():
        together = policy_logprobs(learner.model, part, config)[part.completion_mask]
        learner.model.set_attn_implementation("sdpa")
        padded = policy_logprobs(learner.model, part, config)[part.completion_mask]
        use_packing(learner.model)
    worst = max((x - alone).abs().max().item() for x in (together, padded))
    allowed = PACKED_GAP["float32" if learner.model.dtype == torch.float32 else "half"]
    found = f"packed, padded and single sequences differ by {worst:.1g} nats; allowed: {allowed}"
    if worst <= allowed:
        return Finding("packing", OK, found)
    return Finding("packing", FAILURE, found, "Set model.packing to off, and report the model.")


def find_rewards(config: Config, tasks: list[Task], rollout: Rollout) -> Iterator[Finding]:
    """Whether the reward scores real answers, and whether its scores differ."""
    try:
        with open_reward(config.reward) as reward:
            outcomes = score_rollout(reward, tasks, rollout)
    except TitoError as error:
        yield Finding("reward", FAILURE, str(error), "Fix [reward].")
        return
    flat = [outcome for group in outcomes for outcome in group]
    failed = [outcome for outcome in flat if isinstance(outcome, Failed)]
    scores = torch.tensor([o.value for o in flat if isinstance(o, Score)])
    if failed:
        yield Finding("reward", FAILURE if not len(scores) else WARNING,
                      f"no verdict on {len(failed)} of {len(flat)} answers: {failed[0].reason}",
                      "Fix the reward function; such answers are not trained.")  # fmt: skip
    else:
        yield Finding("reward", OK, f"{len(flat)} answers scored, mean {scores.mean():.3f}, "
                      f"from {scores.min():g} to {scores.max():g}")  # fmt: skip
    fates = [fates_of_group(g.samples, o) for g, o in zip(rollout.groups, outcomes, strict=True)]
    yield find_variance([fate_of(group) for group in fates])


def find_variance(groups: list[Fate]) -> Finding:
    """In how many groups there is something to learn."""
    useful, total = groups.count(Fate.TRAINED), len(groups)
    found = f"rewards differ within {useful} of {total} groups"
    if useful * 2 >= total:
        return Finding("variance", OK, found)
    return Finding("variance", WARNING if useful else FAILURE, found,
                   "Nothing is learned from the others. Take prompts that are neither too hard nor "
                   "too easy, a larger rollout.group_size, or a finer reward.")  # fmt: skip


def find_truncation(rollout: Rollout) -> Finding:
    """How many answers are cut off."""
    share = truncated_share(rollout.samples)
    longest = max(len(sample.completion_ids) for sample in rollout.samples)
    found = f"{share:.0%} of answers hit max_tokens (the longest has {longest}); below 15% is well"
    if share <= MAX_TRUNCATED:
        return Finding("truncation", OK, found)
    return Finding("truncation", WARNING if share <= MANY_TRUNCATED else FAILURE, found,
                   "Raise rollout.max_tokens, ask for shorter answers, or check that the chat "
                   "template's end of turn is a stop token.")  # fmt: skip


@torch.no_grad()
def find_rounding(config: Config, learner: Learner) -> Iterator[Finding]:
    """Whether weights in half precision, when they have no masters, can be moved by a step."""
    if config.model.dtype == "float32" or config.model.master_weights:
        return
    weights = [p for p in learner.model.parameters() if p.requires_grad]
    stay = sum(int((w.float() + config.optimizer.lr).to(w.dtype).eq(w).sum()) for w in weights)
    share = stay / sum(weight.numel() for weight in weights)
    yield Finding(
        "updates",
        OK if share <= MAX_UNMOVED else WARNING,
        f"adding optimizer.lr leaves {share:.0%} of the {config.model.dtype} weights as they are",
        "Set model.master_weights = true: steps of AdamW are about as long as the learning rate.",
    )


def find_memory(config: Config, learner: Learner) -> Finding:
    """Whether a step fits into the device's memory."""
    needed: Memory = estimate(learner.model, config)
    available = room(learner.device)
    found = f"about {needed}; {gibibytes(available)} are free on {learner.device}"
    if needed.total <= 0.9 * available:
        return Finding("memory", OK, found)
    return Finding("memory", WARNING if needed.total <= available else FAILURE, found,
                   "Lower train.micro_batch_tokens, set model.activation_checkpointing, or use "
                   "bfloat16.")  # fmt: skip

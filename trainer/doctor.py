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

from shared.client import RolloutClient
from shared.errors import TitoError
from shared.protocol import ReloadResult, ServerInfo
from trainer.agreement import refuse_other_tokenizer, refuse_sleepless
from trainer.batch import collate
from trainer.config import Config
from trainer.errors import ConfigError, MismatchError
from trainer.findings import (
    FAILURE,
    OK,
    WARNING,
    Finding,
    completion_logprobs,
    find_damage,
    find_disagreement,
    find_memory,
    find_packing,
    find_randomness,
    find_rewards,
    find_rounding,
    find_truncation,
)
from trainer.learner import Learner, build_learner
from trainer.prompts import training_prompts
from trainer.publish import publish, tensors_digest
from trainer.run import connect

PROMPTS, GROUP = 8, 8
"""At most so many prompts and answers each; enough to see, and done within a minute."""


def diagnose(config: Config) -> Iterator[Finding]:
    """Find what is wrong, one thing after the other; those that need what failed are left out."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        learner = build_learner(config, None)
    except TitoError as error:
        yield Finding("model", FAILURE, str(error), "Fix model.path, or the settings in [model].")
        return
    yield _packing(learner)
    yield _layers(learner)
    yield from find_rounding(config, learner)
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
    yield find_memory(config, learner)


def _packing(learner: Learner) -> Finding:
    if not learner.unpacked:
        return Finding("model", OK, "loaded; dropout is off, sequences are packed")
    return Finding(
        "model", WARNING, f"loaded; sequences are padded: {learner.unpacked}",
        "Nothing, if you want it so. Padding costs time where answers differ in length.",
    )  # fmt: skip


def _layers(learner: Learner) -> Finding:
    how = f"not fused: {learner.unfused}" if learner.unfused else "fused, and say what they did"
    return Finding("layers", OK, f"the decoder's are {how}")


def _servers(config: Config, learner: Learner) -> Iterator[Finding]:
    for url in config.server.every_url():
        with connect(config, url, 10.0) as client:
            try:
                info = client.wait_ready(config.server.ready_timeout)
            except TitoError as error:
                yield Finding("server", FAILURE, f"{url}: {error}",
                              "Start it (python -m rollout_server --model PATH), or fix "
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
            try:
                refuse_sleepless(info, config.server.sleep)
            except ConfigError as error:
                yield Finding("sleep", FAILURE, str(error), error.advice)


def _exchange(
    config: Config, learner: Learner, client: RolloutClient, info: ServerInfo
) -> Iterator[Finding]:
    """Everything that needs the server: publish, sample, score, and give back."""
    tasks = training_prompts(config).take(0, min(PROMPTS, config.rollout.prompts_per_step))
    group_size = min(GROUP, config.rollout.group_size)
    at = "reload"
    try:
        with _lent(config, learner, client, info) as handshake:
            at = "rollout"
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
        yield Finding(at, FAILURE, str(error), "Fix what the server says.")
        return
    yield find_damage(config, rollout, len(tasks), group_size, info.vocab_size)
    batch = collate(rollout.samples, learner.pad_id).to(learner.device)
    logprobs = completion_logprobs(config, learner, batch)
    half = "bfloat16" in (config.model.dtype, info.dtype) or "16" in config.server.publish_dtype
    precision = "half" if half or config.model.dtype == "float16" else "float32"
    if handshake.served:
        yield find_disagreement(batch, logprobs, precision, config, info)
    yield find_randomness(config, learner, batch, logprobs)
    if not learner.unpacked:
        yield find_packing(config, learner, batch)
    yield from find_rewards(config, tasks, rollout)
    yield find_truncation(rollout)


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
    sent, served = (
        getattr(torch, name.removeprefix("torch."))
        for name in (config.server.publish_dtype, info.dtype)
    )
    ours = tensors_digest(learner.model, sent, served)
    with client.lease(holder="doctor") as lease:
        same = info.digest in (ours, tensors_digest(learner.model, served, served))
        if info.version > 0 and not same:
            yield _Handshake(_left_alone(info), served=False)
            return
        result = publish(client, learner.model, sent, fence=lease.fence)
        handshake = _Handshake(_published(result, ours), served=True)
        try:
            yield handshake
        finally:
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

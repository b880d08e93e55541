"""Checkpoints are examined one after the other, and the server gets back what it served before.

Nothing is published before it is known how to give that back: from the server's own start, or from
a checkpoint whose weights have the digest of what is live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel

from shared.client import RolloutClient
from shared.tokens import tokenizer_fingerprint
from trainer.agreement import refuse_other_tokenizer
from trainer.checkpoint import latest_checkpoint
from trainer.config import Config
from trainer.errors import CheckpointError
from trainer.exam import Exam, examine
from trainer.masters import finer_values, keep_masters
from trainer.policy import load_policy
from trainer.prompts import Task
from trainer.publish import publish, tensors_digest
from trainer.rewards import Reward


def examine_checkpoints(
    client: RolloutClient,
    config: Config,
    tasks: Sequence[Task],
    reward: Reward,
    *,
    checkpoints: Sequence[str],
) -> Iterator[Exam]:
    """Publish one checkpoint after the other and examine each; then what was live before, again.

    Args:
        checkpoints: ``base`` (the configuration's ``model.path``), ``latest`` (of ``train.output``)
            or a directory.

    Raises:
        CheckpointError: there is no such checkpoint, or what is live could not be given back;
            nothing was published.
        Conflict: a run holds the server's lease; its weights are not to be displaced.
    """
    # Its bars would tear the table.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    paths = [checkpoint_path(config, name) for name in checkpoints]
    dtype = getattr(torch, config.server.publish_dtype)
    with client.lease(holder="eval") as lease, ExitStack() as afterwards:
        give_back = _way_back(client, config, paths, lease.fence)
        for name, path in zip(checkpoints, paths, strict=True):
            tokenizer = AutoTokenizer.from_pretrained(path)
            refuse_other_tokenizer(client.info().tokenizer, tokenizer_fingerprint(tokenizer))
            afterwards.pop_all()
            afterwards.callback(give_back)
            publish(client, _load(config, path), dtype, fence=lease.fence)
            yield examine(client, config, tasks, reward, name=name)


def _load(config: Config, path: str) -> PreTrainedModel:
    model = load_policy(path, dtype=getattr(torch, config.model.dtype))
    if config.model.keeps_masters():
        keep_masters(model, finer_values(model, path))  # they are what a run publishes
    return model


def _way_back(
    client: RolloutClient, config: Config, paths: Sequence[str], fence: int
) -> Callable[[], object]:
    """What makes the server serve again what it serves now."""
    info = client.info()
    if info.version == 0:
        return partial(client.reset, fence=fence)
    known = [*paths, config.model.path]
    with suppress(CheckpointError):
        known.append(checkpoint_path(config, "latest"))
    served = getattr(torch, info.dtype.removeprefix("torch."))
    for path in dict.fromkeys(known):
        model = _load(config, path)
        # As a run publishes it, and as the server itself loads it.
        for sent in (getattr(torch, config.server.publish_dtype), served):
            if tensors_digest(model, sent, served) == info.digest:
                return lambda: publish(client, _load(config, path), sent, fence=fence)
    raise CheckpointError(
        f"the server serves weights that somebody published (version {info.version}, "
        f"{info.digest[:12]}), and could not get them back: they are none of {', '.join(known)}",
        advice="name their checkpoint with --checkpoint too, or let POST /policies/default/reset "
        "bring the server's own back first",
    )


def checkpoint_path(config: Config, name: str) -> str:
    """The directory of a model that a person named."""
    if name == "base":
        return config.model.path
    path = (
        latest_checkpoint(Path(config.train.output) / "checkpoints")
        if name == "latest"
        else Path(name)
    )
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; allowed: base, latest or a checkpoint's")
    return str(path / "model" if (path / "model").is_dir() else path)

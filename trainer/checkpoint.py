"""Checkpoints from which a run goes on as if it had never stopped.

    step-000040/
      model/        safetensors and tokenizer, readable by transformers; float32 of what has masters
      trainer.pt    optimizer, scheduler, loss scale and random states
      state.json    step, data position, version and digest
      queue.msgpack what was asked for later steps, with the answers that had come

A checkpoint is written into a hidden directory, flushed to the disk and renamed, so one that can be
seen is whole: a crash at any moment leaves the one before.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler

from shared.codec import decode, encode
from shared.errors import TitoError
from shared.protocol import MSGPACK
from trainer.errors import CheckpointError
from trainer.files import flush, step_path, step_paths
from trainer.masters import has_masters
from trainer.sharding import spread_optimizer, whole_model, whole_optimizer

_UNFINISHED = ".unfinished-"
_QUEUE = "queue.msgpack"
_SET_ASIDE = "move that checkpoint away: --resume then goes on from the one before it"


@dataclass(frozen=True)
class RunState:
    """How far a run has come.

    Attributes:
        step: finished steps.
        position: prompts consumed; where the data goes on.
        version, digest: of the policy that the server had after that step, to find its samples by.
            A resumed run gets a new version, since it publishes again.
        published: steps of the weights, by digest, that made the answers in the queue.
    """

    step: int = 0
    position: int = 0
    version: int = 0
    digest: str = ""
    published: dict[str, int] = field(default_factory=dict)


def save_checkpoint(
    root: Path,
    reached: RunState,
    *,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: GradScaler,
    keep: int,
    queue: Sequence[dict[str, Any]] = (),
) -> Path:
    """Write ``root/step-NNNNNN`` atomically, then delete all but the newest ``keep``.

    Does nothing if it is there already: a run that stops may just have saved.

    Args:
        model, tokenizer: have ``save_pretrained``.
        queue: see :meth:`trainer.sampler.Sampler.queued`.
    """
    target = step_path(root, reached.step)
    if target.exists():
        return target
    unfinished = root / f"{_UNFINISHED}{target.name}"
    _clean(root)
    (unfinished / "model").mkdir(parents=True)
    _save_model(model, unfinished / "model")
    tokenizer.save_pretrained(unfinished / "model")
    state = {
        "optimizer": whole_optimizer(optimizer),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "random": random_states(),
    }
    torch.save(state, unfinished / "trainer.pt")
    (unfinished / _QUEUE).write_bytes(encode(list(queue), MSGPACK))
    (unfinished / "state.json").write_text(json.dumps(asdict(reached)), encoding="utf-8")
    _install(unfinished, target)
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return target


def _save_model(model: Any, directory: Path) -> None:
    """Write the weights as the optimizer has them, and say in which dtype they are."""
    model.save_pretrained(directory, state_dict=whole_model(model))
    if (directory / "config.json").exists() and has_masters(model):
        config = copy.deepcopy(model.config)  # it says what the model computes in
        config.dtype = torch.float32
        config.save_pretrained(directory)


def latest_checkpoint(root: Path) -> Path:
    """The newest complete checkpoint under ``root``.

    Raises:
        CheckpointError: there is none.
    """
    finished = checkpoints(root)
    if not finished:
        raise CheckpointError(
            f"there is no checkpoint under {root} to resume from",
            advice="start without --resume, or set train.output to the run's directory",
        )
    return finished[-1]


def read_state(checkpoint: Path) -> RunState:
    """How far the run had come.

    Raises:
        CheckpointError: ``state.json`` is missing or malformed.
    """
    try:
        return RunState(**json.loads((checkpoint / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint: {error}", advice=_SET_ASIDE
        ) from error


def read_queue(checkpoint: Path) -> list[dict[str, Any]]:
    """What was saved as ``queue``; nothing in checkpoints that have none.

    Raises:
        CheckpointError: it is damaged.
    """
    path = checkpoint / _QUEUE
    if not path.exists():
        return []
    try:
        queue: list[dict[str, Any]] = decode(path.read_bytes(), MSGPACK)
        return queue
    except (OSError, TitoError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", advice=_SET_ASIDE) from error


def restore_trainer(
    checkpoint: Path,
    *,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: GradScaler,
) -> None:
    """Bring all but the model back, which is loaded from ``model/``.

    A loss scale begins anew where the run had none.

    Raises:
        CheckpointError: the file is unreadable, or the optimizer has other parameters.
    """
    try:
        # weights_only: a checkpoint from elsewhere must not be able to run code.
        state = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(spread_optimizer(state["optimizer"], optimizer))
        scheduler.load_state_dict(state["scheduler"])
        if scale := state.get("scaler"):
            scaler.load_state_dict(scale)
        restore_random_states(state["random"])
    except torch.OutOfMemoryError:  # a RuntimeError, and no fault of the checkpoint
        raise
    except (
        OSError, EOFError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"{checkpoint} does not fit this run: {error}",
            advice="go on with the model and optimizer that the run was started with",
        ) from error


def random_states() -> dict[str, Any]:
    """States of every generator a step may draw from: Python, numpy, torch and its GPUs."""
    numpy = np.random.get_state(legacy=False)
    key = numpy["state"]["key"].tolist()  # plain integers, which torch.load takes without pickle
    return {
        "python": random.getstate(),
        "numpy": numpy | {"state": numpy["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Inverse of :func:`random_states`."""
    random.setstate(states["python"])
    numpy = states["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy | {"state": numpy["state"] | {"key": key}})
    torch.set_rng_state(states["torch"])
    # A run may move to a machine with another number of GPUs; none of their states fits then.
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return list(step_paths(root).values())


def _clean(root: Path) -> None:
    for leftover in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)


def _install(unfinished: Path, target: Path) -> None:
    """Flush everything, then give it its name in one step."""
    for path in _tree(unfinished):
        flush(path)
    unfinished.rename(target)
    for directory in (target.parent, target.parent.parent):  # the second is new with the first
        flush(directory)


def _tree(root: Path) -> Iterator[Path]:
    """Every file and directory under ``root``, and ``root`` itself, contents before containers."""
    for directory, _, files in os.walk(root, topdown=False):
        yield from (Path(directory) / name for name in files)
        yield Path(directory)

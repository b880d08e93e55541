"""The frame of a run under ``torchrun``: how its processes meet, and how they end together."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.errors import TitoError
from trainer.errors import ConfigError, TrainerError
from trainer.ranks import ALONE, OTHER_FAILED, OTHER_LOST, Ranks


@contextmanager
def ranks_of(device: str) -> Iterator[Ranks]:
    """This process's place among those that torchrun started with it, until the block ends.

    Whatever ends the block on one rank ends all of them. Only rank 0 tells why.

    Args:
        device: that the model is trained on, as in the configuration.

    Raises:
        ConfigError: there are too few GPUs, or all ranks would share one.
        TrainerError: on rank 0, another rank has failed.
        SystemExit: on other ranks, any has.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    ranks = Ranks(*(int(os.environ.get(x, "0")) for x in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    ranks.join(cuda=_uses_gpus(device))
    try:
        yield ranks
        ranks.leave()
    except BaseException as error:
        _end(ranks, error)
        raise


def _uses_gpus(device: str) -> bool:
    """Whether each rank has a GPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"model.device = {device!r} with several ranks: each takes a GPU of its own",
            advice="model.device may be auto, cuda or cpu",
        )
    wanted, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if device == "cuda" or (device == "auto" and there):
        if wanted > there:
            raise ConfigError(
                f"{wanted} ranks on a machine with {there} GPUs",
                advice="lower --nproc-per-node, or set model.device = cpu",
            )
        return True
    return False


def _end(ranks: Ranks, error: BaseException) -> None:
    """Decide what a rank does about an error: rank 0 tells of the first, the others are silent."""
    first, own = ranks.failed(error), f"rank {ranks.rank}: "
    if ranks.rank == 0:
        ranks.told()
        if not first.startswith(own):
            raise TrainerError(f"{OTHER_FAILED}: {first}") from error
        if _is_lost_peer(error):
            raise TrainerError(
                f"{OTHER_LOST}: {str(error).splitlines()[0]}",
                advice="what torchrun and the kernel's log say of it: was it out of memory?",
            ) from error
        return
    if first.startswith(own) and not _is_lost_peer(error):
        if not isinstance(error, TitoError):  # a bug, which only this rank can show
            traceback.print_exception(error)
            sys.stderr.flush()
        ranks.hang_up()
    raise SystemExit(1) from error


def _is_lost_peer(error: BaseException) -> bool:
    signs = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)

"""What ranks other than 0 do: build the same model, then whatever rank 0 orders."""

from __future__ import annotations

import signal
from pathlib import Path

import torch
import transformers

from trainer.config import Config
from trainer.learner import Learner, build_learner
from trainer.memory import lack_told
from trainer.ranks import BEGIN, END, Order, Ranks
from trainer.sharding import GATHER, put_together
from trainer.shares import LEARN, Share
from trainer.update import learn_share


def follow(config: Config, ranks: Ranks) -> None:
    """Take part in a run until rank 0 ends it."""
    # Rank 0 gets them too. It decides when all stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    begin = ranks.hear()
    assert begin.name == BEGIN
    checkpoint = begin.details["checkpoint"]
    with lack_told(config):
        learner = build_learner(config, Path(checkpoint) if checkpoint else None, ranks)
        while (order := ranks.hear()).name != END:
            _obey(order, learner, config)


def _obey(order: Order, learner: Learner, config: Config) -> None:
    if order.name == LEARN:
        learn_share(learner, Share.from_order(order), config)
        if config.server.sleep and learner.device.type == "cuda":
            torch.cuda.empty_cache()  # the server may have slept on this rank's GPU too
    elif order.name == GATHER:
        index, slot = order.details["index"], order.details["slot"]
        parameter = list(learner.model.parameters())[index]
        put_together(parameter if slot is None else learner.optimizer.state[parameter][slot])
    else:
        raise ValueError(f"no rank knows how to {order.name}")

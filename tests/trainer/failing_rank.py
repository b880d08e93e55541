"""Two ranks without a model, of which one fails, or which talk to each other.

torchrun --nproc-per-node 2 tests/trainer/failing_rank.py waits|sleeps|vanishes|tells
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from shared.errors import TitoError
from trainer.ranks import Order, Ranks
from trainer.torchrun import ranks_of


def break_down() -> None:
    raise ValueError("broken here")


def fail(ranks: Ranks, how: str) -> None:
    if ranks.rank == 1 and how == "vanishes":
        os._exit(0)  # which torchrun takes for a good end
    if ranks.rank == 1:
        break_down()
    if how == "waits":
        ranks.reduced(torch.tensor(1.0))
    time.sleep(600)
    print("ended all the same")


def talk(ranks: Ranks) -> None:
    if ranks.rank == 0:
        tensors = {
            "mask": torch.tensor([[True, False]]),
            "number": torch.tensor(2.5, dtype=torch.float64),
            "none": torch.empty(0, 3),
        }
        ranks.tell([Order("work", {"n": 1}, tensors)])
        ranks.reduced(torch.tensor(1.0))
        return
    order = ranks.hear()
    x = order.tensors
    total = float(ranks.reduced(torch.tensor(2.0)))
    said = [
        order.name,
        order.details,
        x["mask"].tolist(),
        float(x["number"]),
        len(x["none"]),
        total,
    ]
    print(json.dumps(said), flush=True)
    assert ranks.hear().name == "end"


def main(how: str) -> None:
    with ranks_of("cpu") as ranks:
        if how == "tells":
            talk(ranks)
        else:
            fail(ranks, how)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except TitoError as error:
        sys.exit(f"error: {error}")

"""A step's samples, spread over ranks.

Every rank gets rows of about as many tokens, with weights whose denominator is that of the whole
step, and then does as many forward passes as the others, since each gathers the model's weights
from all. One that has no row left runs a row without a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.batch import Batch, micro_batches
from trainer.grpo import LossSums
from trainer.ranks import Order, Ranks

LEARN = "learn"


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank trains of a step.

    Attributes:
        batch: its rows.
        advantages_N: float32 ``[N]``.
        weights_NT: float64 ``[N, T]``, see :func:`trainer.grpo.token_weights`.
        limit: tokens of a micro-batch; on all ranks the same.
    """

    batch: Batch
    advantages_N: Tensor
    weights_NT: Tensor
    limit: int

    def micro_batches(self, ranks: Ranks, *, packed: bool) -> list[Batch]:
        """As many on every rank; see :func:`trainer.batch.micro_batches`."""
        parts = micro_batches(self.batch, self.limit, packed=packed)
        return parts + [_nothing(self.batch)] * (ranks.most(len(parts)) - len(parts))

    def to_order(self) -> Order:
        """For another rank."""
        tensors = {field.name: getattr(self.batch, field.name) for field in fields(self.batch)}
        rest = {"advantages_N": self.advantages_N, "weights_NT": self.weights_NT}
        return Order(LEARN, {"limit": self.limit}, tensors | rest)

    @staticmethod
    def from_order(order: Order) -> Share:
        """Inverse of ``to_order``."""
        tensors = dict(order.tensors)
        advantages_N, weights_NT = tensors.pop("advantages_N"), tensors.pop("weights_NT")
        return Share(Batch(**tensors), advantages_N, weights_NT, order.details["limit"])


def hand_out(whole: Share, ranks: Ranks) -> Share:
    """Give every other rank its share of a step; returns that of rank 0."""
    if ranks.size == 1:
        return whole
    own, *others = split(whole, ranks.size)
    ranks.tell([share.to_order() for share in others])
    return own


def split(whole: Share, count: int) -> list[Share]:
    """Shares of about as many tokens: the longest row left goes to who has the fewest."""
    lengths = whole.batch.lengths.tolist()
    rows: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        least = tokens.index(min(tokens))
        rows[least].append(row)
        tokens[least] += lengths[row]
    return [_select(whole, sorted(part)) for part in rows]


def _select(whole: Share, rows: list[int]) -> Share:
    if not rows:  # fewer samples than ranks
        rows, batch = [0], _nothing(whole.batch)
    else:
        batch = whole.batch.select(torch.tensor(rows))
    return Share(
        replace(batch, rows=torch.arange(len(rows))),
        whole.advantages_N[rows],
        whole.weights_NT[rows, : batch.input_ids.shape[1]],
        whole.limit,
    )


def _nothing(batch: Batch) -> Batch:
    """The first row, none of whose tokens bears loss, cut to the two that every row has."""
    cut = {field.name: getattr(batch, field.name)[:1] for field in fields(batch)}
    short = Batch(**{name: x if x.ndim == 1 else x[:, :2] for name, x in cut.items()})
    return replace(
        short,
        completion_mask=torch.zeros_like(short.completion_mask),
        rows=torch.zeros_like(short.rows),
    )


def over_ranks(sums: LossSums, ranks: Ranks) -> LossSums:
    """The same over the tokens of all ranks."""
    if ranks.size == 1:
        return sums
    added = {x.name: getattr(sums, x.name) for x in fields(sums) if x.name != "max_log_ratio"}
    flat = ranks.reduced(torch.cat([x.double().flatten() for x in added.values()]))
    parts = torch.split(flat, [x.numel() for x in added.values()])
    joined = {n: part.view(x.shape) for (n, x), part in zip(added.items(), parts, strict=True)}
    largest = ranks.reduced(sums.max_log_ratio, dist.ReduceOp.MAX)
    return LossSums(**joined, max_log_ratio=largest)

"""What the updates of one rollout came to: sums while they are made, then the figures of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.grpo import LossSums
from trainer.learner import Learner
from trainer.shares import over_ranks


@dataclass(frozen=True)
class Update:
    """What the optimizer did with one rollout; figures are means over its updates.

    Attributes:
        updates: 0 when nothing was worth training on; every other figure is then NaN or 0.
        skipped: updates left out because their gradient did not fit into float16. The other figures
            but the gradient's norm and the learning rate are of these too.
        loss_scale: that the next loss is multiplied by; NaN when the model computes in another
            precision than float16.
        loss_tokens: tokens that bore loss, counted from the batch's mask; 0 without an update.
        loss: value of the objective.
        kl_sampler: KL(sampler || policy), nats per token, estimator k3.
        kl_reference: KL(policy || reference), nats per token; NaN without a reference.
        ratio: policy / old, mean over tokens; old is the sampler's unless mismatch is corrected.
        clipped: share of tokens whose ratio was clipped.
        masked_tokens: of ``loss_tokens``, those that the mismatch correction left without a
            gradient in one update. They count in the denominator.
        masked_by_length: their share by the length of their sample, such as ``65-128``.
        gradient_norm: before clipping.
        learning_rate: that the last update was made with.
    """

    updates: int = 0
    skipped: int = 0
    loss_scale: float = math.nan
    loss_tokens: int = 0
    loss: float = math.nan
    kl_sampler: float = math.nan
    kl_reference: float = math.nan
    ratio: float = math.nan
    clipped: float = math.nan
    gradient_norm: float = math.nan
    learning_rate: float = math.nan
    masked_tokens: int = 0
    masked_by_length: dict[str, float] = field(default_factory=dict)


class Tally:
    """Sums over the micro-batches of all updates of one rollout."""

    def __init__(self) -> None:
        self.sums: LossSums | None = None
        self.drift = torch.tensor(0.0)
        self.passes = 0
        self.norms: list[float] = []
        self.learning_rate = math.nan

    @property
    def loss(self) -> Tensor:
        """Of all updates so far; this rank's part."""
        assert self.sums is not None
        return self.sums.loss

    def add(self, sums: LossSums, drift: Tensor) -> None:
        """A micro-batch is over; ``drift`` is its KL(sampler || policy), summed over tokens."""
        self.sums = sums if self.sums is None else self.sums + sums
        self.drift = self.drift + drift

    def stepped(self, norm: float, learning_rate: float) -> None:
        """A pass is over. It has made an update if the gradient's norm is finite."""
        self.passes += 1
        if math.isfinite(norm):
            self.norms.append(norm)
            self.learning_rate = learning_rate

    def summary(self, learner: Learner) -> Update:
        """What the updates came to, on all ranks."""
        assert self.sums is not None
        sums = over_ranks(self.sums, learner.ranks)
        means, passes, scaler = sums.metrics(), self.passes, learner.scaler
        made = self.norms
        return Update(
            updates=len(made),
            skipped=passes - len(made),
            loss_scale=scaler.get_scale() if scaler.is_enabled() else math.nan,
            loss_tokens=int(means["tokens"]) // passes if made else 0,
            loss=means["loss"] / passes,
            kl_sampler=float(learner.ranks.reduced(self.drift)) / max(means["tokens"], 1.0),
            kl_reference=means["kl"] if learner.objective.beta > 0 else math.nan,
            ratio=means["ratio"],
            clipped=means["clipped_low"] + means["clipped_high"],
            masked_tokens=int(sums.dropped) // passes if made else 0,
            masked_by_length=sums.dropped_shares(),
            gradient_norm=sum(made) / len(made) if made else math.nan,
            learning_rate=self.learning_rate,
        )

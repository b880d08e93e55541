"""How much better each sample did than the others of its prompt.

Everything is keyed by group id, never by position, so samples may arrive in any order and some
may already have been dropped. Compute advantages before dropping any sample for its length or
staleness: the baseline belongs to all that were scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group_std", "batch_std", "none"]
Normalise = Literal["sum", "each"]
"""Whether several rewards are added first, or each made an advantage of its own first."""

STD_EPS = 1e-4
"""Added to the standard deviation, as in TRL; verl adds 1e-6."""


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group_std",
    eps: float = STD_EPS,
) -> Tensor:
    """Advantage of each sample over its group.

    A group of one, or one whose rewards are all equal, gets exactly zero: nothing in it says which
    behaviour is better.

    Args:
        rewards: float ``[N]``, finite.
        group_ids: integer ``[N]``; equal ids are completions of one prompt.
        baseline: ``mean`` subtracts the group's mean (GRPO); ``leave_one_out`` the mean of the
            other samples, which is independent of the sample's own reward (RLOO).
        scale: ``group_std`` divides by the group's standard deviation (GRPO), ``batch_std`` by
            that of all rewards given (TRL ``scale_rewards="batch"``), both with Bessel's
            correction; ``none`` does not divide (Dr. GRPO).
        eps: added to the standard deviation.

    Returns:
        ``[N]``, dtype of ``rewards``.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)} "
                         "must both be [N]")  # fmt: skip
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is NaN or infinite; drop the sample or score it again")
    _, index_N = torch.unique(group_ids, return_inverse=True)
    count_N = _group_sum(torch.ones_like(rewards), index_N)
    centred_N = rewards - _group_sum(rewards, index_N) / count_N
    advantages_N = centred_N
    if baseline == "leave_one_out":
        # r - mean of the others = (r - mean of all) * n / (n - 1)
        advantages_N = centred_N * count_N / (count_N - 1).clamp(min=1)
    if scale == "group_std":
        advantages_N = advantages_N / (_sample_std(rewards, index_N) + eps)
    elif scale == "batch_std":
        advantages_N = advantages_N / (_sample_std(rewards, torch.zeros_like(index_N)) + eps)
    # Rounding in the mean of equal rewards would otherwise be divided by eps and leave a residue.
    return torch.where(_all_equal(rewards, index_N), 0.0, advantages_N)


def decoupled_advantages(
    rewards_NK: Tensor,
    group_ids_N: Tensor,
    weights_K: Sequence[float],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group_std",
    eps: float = STD_EPS,
) -> Tensor:
    """Advantages of K rewards, each taken by itself before they are weighed and added (GDPO).

    In a sum of rewards the one that varies most decides the spread by which all are divided. Here
    each has its own, and the weighted sum is divided by its standard deviation over all samples, so
    that its scale does not grow with K ("Group reward-Decoupled Normalization Policy
    Optimization", 2601.05242).

    Args:
        rewards_NK: float ``[N, K]``, finite and unweighted.
        group_ids_N, baseline, scale, eps: as for :func:`group_advantages`.
        weights_K: of each reward.

    Returns:
        ``[N]``; zero where no reward varies within the group.
    """
    total_N = torch.zeros_like(rewards_NK[:, 0])
    for weight, rewards_N in zip(weights_K, rewards_NK.unbind(1), strict=True):
        total_N = total_N + weight * group_advantages(
            rewards_N, group_ids_N, baseline=baseline, scale=scale, eps=eps
        )
    return total_N / (_sample_std(total_N, torch.zeros_like(group_ids_N)) + eps)


def _group_sum(values_N: Tensor, index_N: Tensor) -> Tensor:
    """Sum over each sample's group, given back to each sample."""
    return torch.zeros_like(values_N).index_add(0, index_N, values_N)[index_N]


def _sample_std(values_N: Tensor, index_N: Tensor) -> Tensor:
    """Bessel-corrected standard deviation of each sample's group; 0 for a group of one."""
    count_N = _group_sum(torch.ones_like(values_N), index_N)
    centred_N = values_N - _group_sum(values_N, index_N) / count_N
    return (_group_sum(centred_N.square(), index_N) / (count_N - 1).clamp(min=1)).sqrt()


def _all_equal(values_N: Tensor, index_N: Tensor) -> Tensor:
    """Whether each sample's group holds a single value."""
    blank_N = torch.zeros_like(values_N)
    low_N = blank_N.scatter_reduce(0, index_N, values_N, "amin", include_self=False)
    high_N = blank_N.scatter_reduce(0, index_N, values_N, "amax", include_self=False)
    return (low_N == high_N)[index_N]

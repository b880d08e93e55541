"""Losses, gradients and advantages on random inputs, against the definitions written out in floats.

The golden values are one batch; these are the formulas themselves, one token at a time and without
a tensor, with the derivatives taken by hand.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trainer.advantages import decoupled_advantages, group_advantages
from trainer.grpo import PRESETS, Objective, policy_loss, token_weights

SEEDS = range(12)
Matrix = list[list[float]]


class Batch:
    """Random sequences of random lengths, with clear distances from every kink of the losses."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.rows, self.width = draw.randint(2, 5), draw.randint(1, 6)
        self.mask = [[draw.random() < 0.7 for _ in range(self.width)] for _ in range(self.rows)]
        self.mask[0][0] = True

        def near(values: Matrix, spread: float) -> Matrix:
            return [[x + draw.gauss(0, spread) for x in row] for row in values]

        start = [[draw.uniform(-4, -0.5) for _ in range(self.width)] for _ in range(self.rows)]
        self.new, self.old = near(start, 0.4), near(start, 0.4)
        self.sampler, self.ref = near(self.old, 0.2), near(start, 0.6)
        self.advantages = [draw.gauss(0, 1) for _ in range(self.rows)]

    def tokens(self, row: int) -> list[int]:
        return [t for t in range(self.width) if self.mask[row][t]]


def expected(objective: Objective, batch: Batch) -> tuple[float, Matrix, dict[str, float]]:
    """Loss, its gradient, and how many tokens the correction drops."""
    loss, gradient = 0.0, [[0.0] * batch.width for _ in range(batch.rows)]
    dropped = 0
    for row in range(batch.rows):
        tokens = batch.tokens(row)
        for t in tokens:
            weight = weight_of(objective, batch, row)
            c = correction_of(objective, batch, row, t)
            dropped += c == 0
            advantage = batch.advantages[row]
            if objective.beta and objective.kl == "k1_reward":
                advantage -= objective.beta * (batch.old[row][t] - batch.ref[row][t])
            value, slope = surrogate(objective, batch, row, t, advantage)
            loss += weight * c * value
            # The ratio of a sequence moves with each of its tokens.
            moved = tokens if objective.surrogate == "gspo" else [t]
            for u in moved:
                gradient[row][u] += weight * c * slope / len(moved)
            if objective.beta and objective.kl != "k1_reward":
                value, slope = kl(
                    objective.kl, batch.new[row][t], batch.old[row][t], batch.ref[row][t]
                )
                loss += weight * objective.beta * value
                gradient[row][t] += weight * objective.beta * slope
    return loss, gradient, {"dropped": dropped}


def weight_of(objective: Objective, batch: Batch, row: int) -> float:
    if objective.reduction == "grpo":
        return 1 / (batch.rows * len(batch.tokens(row)))
    if objective.reduction == "dapo":
        return 1 / sum(len(batch.tokens(r)) for r in range(batch.rows))
    assert objective.constant_length is not None
    return 1 / (batch.rows * objective.constant_length)


def correction_of(objective: Objective, batch: Batch, row: int, t: int) -> float:
    if objective.correction == "none":
        return 1.0
    logs = [batch.old[row][u] - batch.sampler[row][u] for u in batch.tokens(row)]
    level, form = objective.correction.split("_")
    log = {
        "token": batch.old[row][t] - batch.sampler[row][t],
        "sequence": sum(logs),
        "geometric": sum(logs) / len(logs),
    }[level]
    rho = math.exp(log)
    low = objective.correction_low or 0.0
    high = math.inf if objective.correction_high is None else objective.correction_high
    if form == "truncate":
        return min(rho, high)
    return rho if low <= rho <= high else 0.0


def surrogate(
    objective: Objective, batch: Batch, row: int, t: int, advantage: float
) -> tuple[float, float]:
    """Loss of a token, and its derivative by the log-probability (by the mean of them for GSPO)."""
    new, old = batch.new[row], batch.old[row]
    if objective.surrogate == "reinforce":
        return -advantage * new[t], -advantage
    logs = [new[u] - old[u] for u in batch.tokens(row)]
    ratio = math.exp(sum(logs) / len(logs) if objective.surrogate == "gspo" else new[t] - old[t])
    low = 0.0 if objective.clip_low is None else 1 - objective.clip_low
    high = math.inf if objective.clip_high is None else 1 + objective.clip_high
    clipped = max(low, min(ratio, high))
    if objective.surrogate == "cispo":
        return -clipped * advantage * new[t], -clipped * advantage
    gain, slope = ratio * advantage, ratio * advantage
    if clipped * advantage < gain:
        gain, slope = clipped * advantage, 0.0
    if objective.dual_clip is not None and advantage < 0 and objective.dual_clip * advantage > gain:
        gain, slope = objective.dual_clip * advantage, 0.0
    return -gain, -slope


def kl(name: str, new: float, old: float, ref: float) -> tuple[float, float]:
    d = ref - new
    if name == "k2":
        return d * d / 2, -d
    k3, slope = math.exp(d) - 1 - d, 1 - math.exp(d)
    if name == "k3_forward":
        return k3, slope
    ratio = math.exp(new - old)
    return ratio * k3, ratio * (k3 + slope)


def objectives() -> list[Any]:
    changes: list[tuple[str, dict[str, Any]]] = [
        (name, {"constant_length": 7} if name == "dr_grpo" else {}) for name in PRESETS
    ]
    changes += [
        ("grpo", {"beta": 0.3, "kl": k}) for k in ("k1_reward", "k2", "k3_forward", "k3_ratio")
    ]
    changes += [("gspo", {"clip_low": 0.1, "clip_high": 0.1, "beta": 0.3})]
    changes += [("grpo", {"dual_clip": 1.3}), ("cispo", {"clip_high": 0.1})]
    changes += [("dapo", {"clip_low": None}), ("grpo", {"clip_high": None})]
    for level in ("token", "sequence", "geometric"):
        changes += [
            ("dapo", {"correction": f"{level}_truncate", "correction_high": 1.05}),
            (
                "grpo",
                {"correction": f"{level}_mask", "correction_low": 0.9, "correction_high": 1.1},
            ),
            ("cispo", {"correction": f"{level}_mask", "correction_low": 0.9}),
            ("gspo", {"correction": f"{level}_mask", "correction_high": 1.1, "beta": 0.1}),
        ]
    return [pytest.param(Objective.named(n, **c), id=f"{n} {c}") for n, c in changes]


@pytest.mark.parametrize("objective", objectives())
def test_loss_and_gradient_are_those_of_the_definition(objective: Objective) -> None:
    clear_of_zero = 0.0
    for seed in SEEDS:
        batch = Batch(seed)
        mask = torch.tensor(batch.mask)

        def tensor(values: Sequence[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64)

        logprobs = tensor(batch.new).requires_grad_()
        loss, sums = policy_loss(
            objective,
            logprobs=logprobs,
            old_logprobs=tensor(batch.old),
            sampler_logprobs=tensor(batch.sampler),
            advantages=tensor(batch.advantages),
            mask=mask,
            weights=token_weights(
                mask, objective.reduction, constant_length=objective.constant_length
            ),
            ref_logprobs=tensor(batch.ref) if objective.beta else None,
        )
        value, gradient, counts = expected(objective, batch)
        assert loss.item() == pytest.approx(value, abs=1e-12)
        found = torch.autograd.grad(loss, logprobs)[0]
        torch.testing.assert_close(found, tensor(gradient), atol=1e-12, rtol=1e-9)
        assert int(sums.dropped) == counts["dropped"]
        clear_of_zero = max(clear_of_zero, abs(value))
    assert clear_of_zero > 1e-3


def test_dropped_tokens_are_counted_by_the_length_of_their_sequence() -> None:
    objective = Objective.named("dapo", correction="token_mask", correction_high=1.5)
    lengths, drops = [1, 2, 3, 4, 5, 8, 9], [1, 0, 2, 0, 5, 4, 3]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    sampler = torch.zeros(7, 9)
    for row, count in enumerate(drops):
        sampler[row, :count] = -1.0  # old / sampler = e
    _, sums = policy_loss(
        objective,
        logprobs=torch.zeros(7, 9),
        old_logprobs=torch.zeros(7, 9),
        sampler_logprobs=sampler,
        advantages=torch.ones(7),
        mask=mask,
        weights=token_weights(mask, "dapo"),
    )
    shares = {"1": 1.0, "2": 0.0, "3-4": 2 / 7, "5-8": 9 / 13, "9-16": 1 / 3}
    assert sums.dropped_shares() == pytest.approx(shares)
    assert (sums + sums).dropped_shares() == pytest.approx(shares)


def expected_advantages(
    rewards: Sequence[float], groups: Sequence[int], baseline: str, scale: str
) -> list[float]:
    found = []
    for place, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [
            r for i, (r, g) in enumerate(zip(rewards, groups, strict=True))
            if g == group and i != place
        ]  # fmt: skip
        if len(set(peers)) == 1:
            found.append(0.0)
            continue
        advantage = reward - statistics.fmean(others if baseline == "leave_one_out" else peers)
        if scale != "none":
            spread = statistics.stdev(peers if scale == "group_std" else rewards)
            advantage /= spread + 1e-4
        found.append(advantage)
    return found


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_advantages_are_those_of_the_definition(baseline: Any, scale: Any) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        count = draw.randint(2, 12)
        rewards = [draw.choice([0.0, 1.0, draw.gauss(0, 3)]) for _ in range(count)]
        groups = [draw.randrange(3) for _ in range(count)]
        found = group_advantages(
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor(groups),
            baseline=baseline,
            scale=scale,
        )
        wanted = expected_advantages(rewards, groups, baseline, scale)
        assert found.tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_decoupled_advantages_are_those_of_the_definition(scale: Any) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        count, weights = draw.randint(3, 12), [1.0, -0.5, 0.0]
        rewards = [[draw.gauss(0, 10.0**k) for k in range(3)] for _ in range(count)]
        groups = [draw.randrange(2) for _ in range(count)]
        columns = [
            expected_advantages([row[k] for row in rewards], groups, "mean", scale)
            for k in range(3)
        ]
        totals = [
            math.fsum(w * c[i] for w, c in zip(weights, columns, strict=True)) for i in range(count)
        ]
        wanted = [total / (statistics.stdev(totals) + 1e-4) for total in totals]
        found = decoupled_advantages(
            torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), weights, scale=scale
        )
        assert found.tolist() == pytest.approx(wanted, abs=1e-9)


def test_a_loud_reward_does_not_drown_a_quiet_one_when_each_is_normalised() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0], [0.0, 0.0]])
    each = decoupled_advantages(rewards, torch.zeros(4).long(), [1.0, 1.0]).tolist()
    assert each[0] == pytest.approx(each[1], abs=1e-3)
    together = group_advantages(rewards.sum(1), torch.zeros(4).long())
    assert together[1] - together[0] > 1.5

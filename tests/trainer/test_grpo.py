"""Losses against the values that TRL, verl and Liger agree on, and what must hold of any loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.grpo import (
    PRESETS,
    LossSums,
    Objective,
    group_advantages,
    policy_loss,
    token_weights,
)
from trainer.kl import kl_to_reference
from trainer.mismatch import Correction, correction_weights

GOLDEN = json.loads((Path(__file__).parent / "grpo_golden.json").read_text())
INPUTS = {name: torch.tensor(x, dtype=torch.float64) for name, x in GOLDEN["inputs"].items()}
MASK = INPUTS["MASK"].bool()
REWARDS = INPUTS["REW"]
ONE_GROUP = torch.zeros(4, dtype=torch.long)
TOLERANCE: dict[str, Any] = {"atol": 1e-8, "rtol": 0.0}

CISPO = {"surrogate": "cispo", "clip_high": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo (seq-mean of token-mean)": {"reduction": "grpo"},
    "dapo/token-mean": {},
    "dr_grpo L=4": {"reduction": "dr_grpo", "constant_length": 4},
    "dapo clip-higher .28": {"clip_high": 0.28},
    "dual-clip c=3 token-mean": {"dual_clip": 3.0},
    "delta=2 two-sided, token-mean": {"dual_clip": 2.0},
    "gspo eps .2": {"surrogate": "gspo", "reduction": "grpo"},
    "cispo eps_max=1.5 (abs bound)": {**CISPO, "clip_low": None},
    "cispo verl [1-.2,1+.5]": {**CISPO, "clip_low": 0.2},
    "dapo + k3 KL beta=.1 (no IS corr)": {"beta": 0.1, "kl": "k3_forward"},
    "dapo + k3 KL beta=.1 (bias-corrected)": {"beta": 0.1},
    "dapo + TIS token cap 1.1": {"correction": "token_truncate", "correction_high": 1.1},
    "dapo + IcePop [.9,1.1]": {
        "correction": "token_mask",
        "correction_low": 0.9,
        "correction_high": 1.1,
    },
    "dapo + seq_mask cap 1.1": {"correction": "sequence_mask", "correction_high": 1.1},
}
KINDS = [
    *VARIANTS.values(),
    {"surrogate": "reinforce", "clip_low": None, "clip_high": None},
    {"correction": "geometric_mask", "correction_low": 0.9, "correction_high": 1.1},
    {"correction": "geometric_truncate", "correction_high": 1.01},
    {"beta": 0.1, "kl": "k1_reward"},
]


def step_loss(
    objective: Objective,
    logprobs: Tensor,
    *,
    mask: Tensor = MASK,
    rows: slice = slice(None),
    **changes: Tensor,
) -> tuple[Tensor, LossSums]:
    """The loss of the golden batch or of some rows of it, with some inputs replaced."""
    length = objective.constant_length
    inputs = {
        "logprobs": logprobs,
        "old_logprobs": INPUTS["OLD"],
        "sampler_logprobs": INPUTS["SMP"],
        "advantages": group_advantages(REWARDS, ONE_GROUP),
        "mask": mask,
        "weights": token_weights(mask, objective.reduction, constant_length=length),
        **({"ref_logprobs": INPUTS["REF"]} if objective.beta > 0 else {}),
        **changes,
    }
    return policy_loss(objective, **{name: value[rows] for name, value in inputs.items()})


def new_logprobs() -> Tensor:
    return INPUTS["NEW"].clone().requires_grad_()


def grad_of(loss: Tensor, inputs: Tensor) -> Tensor:
    return torch.autograd.grad(loss, inputs)[0]


# Golden values


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_those_of_the_libraries(name: str) -> None:
    golden, logprobs = GOLDEN["loss"][name], new_logprobs()
    loss, sums = step_loss(Objective(**VARIANTS[name]), logprobs)
    for value in golden["values"].values():
        assert loss.item() == pytest.approx(value, abs=1e-8)
    gradient = torch.tensor(golden["grad"], dtype=torch.float64)
    torch.testing.assert_close(grad_of(loss, logprobs), gradient, **TOLERANCE)
    assert sums.loss == loss.detach()


def test_every_golden_loss_is_tested_or_left_out_on_purpose() -> None:
    left_out = {"luspo (sequence level)", "luspo (token level, mask bug?)", "sapo"}
    assert set(VARIANTS) == set(GOLDEN["loss"]) - left_out


@pytest.mark.parametrize(
    ("name", "baseline", "scale", "eps"),
    [
        ("trl_group(eps1e-4)", "mean", "group_std", 1e-4),
        ("verl_grpo(eps1e-6)", "mean", "group_std", 1e-6),
        ("dr_grpo/prime-rl(no std)", "mean", "none", 1e-4),
        ("verl_nostd", "mean", "none", 1e-4),
        ("rloo", "leave_one_out", "none", 1e-4),
        ("verl_rloo", "leave_one_out", "none", 1e-4),
    ],
)
def test_advantages_are_those_of_the_libraries(
    name: str, baseline: Any, scale: Any, eps: float
) -> None:
    advantages = group_advantages(REWARDS, ONE_GROUP, baseline=baseline, scale=scale, eps=eps)
    assert advantages.tolist() == pytest.approx(GOLDEN["adv"][name], abs=1e-8)


@pytest.mark.parametrize(
    ("name", "value_of", "gradient_of"),
    [("k1",) * 3, ("k2",) * 3, ("k3", "k3_forward", "k3_forward"), ("k3+", "k3_forward", "k2")],
)
def test_kl_estimators_are_those_of_verl(name: str, value_of: Any, gradient_of: Any) -> None:
    """verl's "k3+" is made of two of ours: the value of k3 with the gradient of k2."""
    logprobs, weights = new_logprobs(), token_weights(MASK, "dapo")

    def mean_kl(estimator: Any) -> Tensor:
        kl = kl_to_reference(estimator, logprobs, INPUTS["REF"], INPUTS["OLD"])
        return (weights * kl).sum()

    assert mean_kl(value_of).item() == pytest.approx(GOLDEN["kl"][name]["token_mean"], abs=1e-8)
    gradient = torch.tensor(GOLDEN["kl"][name]["grad"], dtype=torch.float64)
    torch.testing.assert_close(grad_of(mean_kl(gradient_of), logprobs), gradient, **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "correction", "low"),
    [
        ("token:1.1", "token_truncate", 0.0),
        ("token:0.9_1.1", "token_mask", 0.9),
        ("sequence:1.1", "sequence_truncate", 0.0),
        ("sequence:0.9_1.1", "sequence_mask", 0.9),
    ],
)
def test_mismatch_weights_are_those_of_verl(name: str, correction: Any, low: float) -> None:
    weights = correction_weights(
        INPUTS["OLD"], INPUTS["SMP"], MASK, correction=correction, low=low, high=1.1
    )
    expected = torch.tensor(GOLDEN["verl_is"][name], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, **TOLERANCE)


def test_the_geometric_mask_does_not_grow_with_length() -> None:
    """Sequence 0 drifts by 0.05 nats a token: inside [.9, 1.1], while its product is outside."""
    weights = correction_weights(
        INPUTS["OLD"], INPUTS["SMP"], MASK, correction="geometric_mask", low=0.9, high=1.1
    )
    expected = torch.tensor([0.05, -0.05, -0.05, -0.1], dtype=torch.float64).exp()
    torch.testing.assert_close(weights, expected[:, None] * MASK, **TOLERANCE)
    longer = torch.full((1, 200), 0.05, dtype=torch.float64)
    kept = correction_weights(
        longer, 0 * longer, longer > 0, correction="geometric_mask", low=0.9, high=1.1
    )
    torch.testing.assert_close(kept, torch.full_like(kept, math.exp(0.05)))


def test_mismatch_weights_never_read_masked_entries() -> None:
    old, sampler = (torch.where(MASK, INPUTS[name], math.nan) for name in ("OLD", "SMP"))
    for correction in get_args(Correction):
        band = {"correction": correction, "low": 0.0, "high": 2.0}
        weights = correction_weights(old, sampler, MASK, **band)
        assert weights.equal(correction_weights(INPUTS["OLD"], INPUTS["SMP"], MASK, **band))
        assert (weights[~MASK] == 0).all()


# Sum, then divide once


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_micro_batches_add_up_to_the_whole(kind: dict[str, Any]) -> None:
    objective = Objective(**kind)
    whole, split = new_logprobs(), new_logprobs()
    loss, sums = step_loss(objective, whole)
    parts = [
        step_loss(objective, split, rows=rows) for rows in (slice(0, 2), slice(2, 3), slice(3, 4))
    ]
    losses, part_sums = zip(*parts, strict=True)
    torch.testing.assert_close(sum(losses), loss, **TOLERANCE)
    torch.testing.assert_close(
        grad_of(sum(losses), split), grad_of(loss, whole), atol=1e-12, rtol=0
    )
    joined = part_sums[0] + part_sums[1] + part_sums[2]
    assert joined.metrics() == pytest.approx(sums.metrics(), abs=1e-12)


def test_two_micro_batches_give_the_known_token_mean() -> None:
    """0.024239340 would be a mean per micro-batch, 0.039812877 a division done twice."""
    halves = [
        step_loss(Objective(), INPUTS["NEW"], rows=rows)[0].item()
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert sum(halves) == pytest.approx(0.079625754, abs=1e-9)


@pytest.mark.parametrize("reduction", ["grpo", "dapo", "dr_grpo"])
def test_ranks_with_the_totals_of_the_step_hold_slices_of_its_weights(reduction: Any) -> None:
    length = 7 if reduction == "dr_grpo" else None
    whole = token_weights(MASK, reduction, constant_length=length)
    ranks = [
        token_weights(part, reduction, constant_length=length, num_sequences=4, num_tokens=9)
        for part in (MASK[:1], MASK[1:])
    ]
    torch.testing.assert_close(torch.cat(ranks), whole)


def test_weights_of_each_reduction() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0]])
    third = 1 / 3
    assert token_weights(mask, "dapo").tolist() == [[0, third, third], [0, third, 0], [0, 0, 0]]
    dr_grpo = token_weights(mask, "dr_grpo", constant_length=10)
    torch.testing.assert_close(dr_grpo, mask.double() / 30)
    # The fully masked sequence counts among the three.
    grpo = [[0, third / 2, third / 2], [0, third, 0], [0, 0, 0]]
    torch.testing.assert_close(token_weights(mask, "grpo"), torch.tensor(grpo).double())
    with pytest.raises(ValueError, match="constant_length"):
        token_weights(mask, "dr_grpo")


# Degenerate inputs


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_what_masked_positions_hold_does_not_matter(kind: dict[str, Any], garbage: float) -> None:
    objective, clean = Objective(**kind), new_logprobs()
    dirty = {name: torch.where(MASK, x, garbage) for name, x in INPUTS.items() if x.ndim == 2}
    logprobs = dirty["NEW"].requires_grad_()
    changes: dict[str, Any] = {"old_logprobs": dirty["OLD"], "sampler_logprobs": dirty["SMP"]}
    if objective.beta > 0:
        changes["ref_logprobs"] = dirty["REF"]
    loss, sums = step_loss(objective, logprobs, **changes)
    expected_loss, expected_sums = step_loss(objective, clean)
    assert loss.item() == expected_loss.item()
    gradient = grad_of(loss, logprobs)
    assert (gradient[~MASK] == 0).all()
    torch.testing.assert_close(gradient, grad_of(expected_loss, clean), atol=0, rtol=0)
    assert sums.metrics() == expected_sums.metrics()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_without_a_token_has_zero_loss_and_gradient(kind: dict[str, Any]) -> None:
    logprobs = new_logprobs()
    loss, sums = step_loss(Objective(**kind), logprobs, mask=torch.zeros_like(MASK))
    assert loss.item() == 0
    assert (grad_of(loss, logprobs) == 0).all()
    assert set(sums.metrics().values()) == {0.0}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_fully_masked_sample_gets_no_gradient(kind: dict[str, Any]) -> None:
    mask, logprobs = MASK.clone(), new_logprobs()
    mask[1] = False
    gradient = grad_of(step_loss(Objective(**kind), logprobs, mask=mask)[0], logprobs)
    assert (gradient[1] == 0).all()
    assert gradient.isfinite().all()
    assert (gradient[3] != 0).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("apart", [1e3, -1e3])
def test_far_apart_logprobs_stay_finite_in_float32(kind: dict[str, Any], apart: float) -> None:
    logprobs = (INPUTS["NEW"].float() + apart).requires_grad_()
    loss, sums = step_loss(Objective(**kind), logprobs)
    assert loss.isfinite()
    assert grad_of(loss, logprobs).isfinite().all()
    assert sums.metrics()["max_log_ratio"] == pytest.approx(1e3, rel=1e-2)


def test_old_logprobs_may_be_the_very_tensor_that_is_trained() -> None:
    """On-policy, where the ratio is 1, the gradient is that of plain policy gradient."""
    logprobs = new_logprobs()
    loss, _ = step_loss(Objective(), logprobs, old_logprobs=logprobs)
    weights = token_weights(MASK, "dapo")
    advantages = group_advantages(REWARDS, ONE_GROUP)
    torch.testing.assert_close(grad_of(loss, logprobs), -weights * advantages[:, None])


def test_reinforce_is_the_plain_policy_gradient_summed_over_each_sequence() -> None:
    objective, logprobs = Objective.named("rloo"), new_logprobs()
    advantages = group_advantages(
        REWARDS, ONE_GROUP, baseline=objective.baseline, scale=objective.scale
    )
    loss, _ = step_loss(objective, logprobs, advantages=advantages)
    expected = -(advantages * (INPUTS["NEW"] * MASK).sum(1)).mean()
    torch.testing.assert_close(loss.detach(), expected)
    rloo = torch.tensor(GOLDEN["adv"]["rloo"]).double()[:, None]
    torch.testing.assert_close(grad_of(loss, logprobs), -rloo / 4 * MASK, **TOLERANCE)


def test_a_reference_goes_with_beta_and_only_with_it() -> None:
    with pytest.raises(ValueError, match="beta"):
        step_loss(Objective(), new_logprobs(), ref_logprobs=INPUTS["REF"])
    with pytest.raises(ValueError, match="beta"):
        policy_loss(
            Objective(beta=0.1),
            logprobs=INPUTS["NEW"],
            old_logprobs=INPUTS["OLD"],
            sampler_logprobs=INPUTS["SMP"],
            advantages=REWARDS,
            mask=MASK,
            weights=token_weights(MASK, "dapo"),
        )


# Metrics


def test_metrics_are_means_over_completion_tokens() -> None:
    objective = Objective(
        clip_low=0.4,
        clip_high=0.1,
        dual_clip=3.0,
        correction="token_mask",
        correction_high=1.1,
    )
    metrics = step_loss(objective, INPUTS["NEW"])[1].metrics()
    ratio = (INPUTS["NEW"] - INPUTS["OLD"]).exp()[MASK]
    log_rho = (INPUTS["OLD"] - INPUTS["SMP"])[MASK]
    assert metrics["tokens"] == 9
    assert metrics["ratio"] == pytest.approx(ratio.mean().item())
    # Advantages are +, -, -, +. Above 1.1 with A > 0: e^.1 and e^.4; below 0.6 with A < 0: e^-.6.
    assert metrics["clipped_high"] == pytest.approx(2 / 9)
    assert metrics["clipped_low"] == pytest.approx(1 / 9)
    # e^1.3 with A < 0; and the mismatch of e^.1 at one token.
    assert metrics["clipped_dual"] == pytest.approx(1 / 9)
    assert metrics["dropped"] == pytest.approx(1 / 9)
    assert metrics["mismatch_k1"] == pytest.approx(-log_rho.mean().item())
    assert metrics["mismatch_k3"] == pytest.approx((log_rho.expm1() - log_rho).mean().item())
    assert metrics["max_log_ratio"] == pytest.approx(1.3)
    assert metrics["kl"] == 0


def test_kl_metric_is_the_mean_of_the_estimator() -> None:
    metrics = step_loss(Objective(beta=0.1, kl="k3_forward"), INPUTS["NEW"])[1].metrics()
    assert metrics["kl"] == pytest.approx(GOLDEN["kl"]["k3"]["token_mean"])


# Advantages


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_single_and_equal_groups_get_exactly_zero(baseline: Any, scale: Any) -> None:
    # The float32 mean of three 0.9 is not 0.9.
    rewards = torch.tensor([0.9, 0.9, 0.7, 0.9, 1.0, 0.0])
    groups = torch.tensor([5, 5, -3, 5, 9, 9])
    advantages = group_advantages(rewards, groups, baseline=baseline, scale=scale)
    assert advantages[:4].tolist() == [0, 0, 0, 0]
    assert advantages[4] == -advantages[5]
    assert advantages[4] > 0
    alone = group_advantages(torch.ones(1), torch.zeros(1).long(), baseline=baseline, scale=scale)
    assert alone.tolist() == [0]


def test_batch_std_is_of_all_rewards() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 3.0, 5.0]), torch.tensor([0, 0, 1, 1])
    advantages = group_advantages(rewards, groups, scale="batch_std")
    centred = torch.tensor([-0.5, 0.5, -1.0, 1.0])
    torch.testing.assert_close(advantages, centred / (rewards.std() + 1e-4))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        group_advantages(torch.tensor([0.0, bad]), torch.tensor([0, 0]))


def test_rewards_and_groups_must_match() -> None:
    with pytest.raises(ValueError, match=r"\[2\].*\[1\]"):
        group_advantages(torch.zeros(2), torch.zeros(1).long())


graded = st.lists(
    st.tuples(st.floats(-10, 10, allow_subnormal=False), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@given(samples=graded, data=st.data())
def test_the_order_of_samples_does_not_matter(
    samples: list[tuple[float, int]], data: st.DataObject
) -> None:
    baseline: Any = data.draw(st.sampled_from(["mean", "leave_one_out"]))
    scale: Any = data.draw(st.sampled_from(["group_std", "batch_std", "none"]))
    order = torch.tensor(data.draw(st.permutations(range(len(samples)))))
    rewards = torch.tensor([reward for reward, _ in samples], dtype=torch.float64)
    groups = torch.tensor([group for _, group in samples])
    straight = group_advantages(rewards, groups, baseline=baseline, scale=scale)
    shuffled = group_advantages(rewards[order], groups[order], baseline=baseline, scale=scale)
    assert straight.isfinite().all()
    torch.testing.assert_close(shuffled, straight[order], atol=1e-9, rtol=1e-9)


@given(samples=graded)
def test_advantages_of_a_group_do_not_depend_on_other_groups(
    samples: list[tuple[float, int]],
) -> None:
    rewards = torch.tensor([reward for reward, _ in samples], dtype=torch.float64)
    groups = torch.tensor([group for _, group in samples])
    together = group_advantages(rewards, groups)
    for group in groups.unique():
        alone = group_advantages(rewards[groups == group], groups[groups == group])
        torch.testing.assert_close(together[groups == group], alone, atol=1e-9, rtol=1e-9)


# Objectives


@pytest.mark.parametrize("name", PRESETS)
def test_presets_print_their_denominator(name: str) -> None:
    overrides = {"constant_length": 64} if name == "dr_grpo" else {}
    objective = Objective.named(name, **overrides)
    denominator = {"grpo": "tokens of the sequence", "dapo": "tokens of the step"}
    expected = denominator.get(objective.reduction, f"* {objective.constant_length}")
    assert expected in objective.formula()


def test_formula_shows_every_part() -> None:
    objective = Objective.named(
        "dapo", dual_clip=3.0, beta=0.01, correction="token_truncate", correction_high=2.0
    )
    assert objective.formula().splitlines() == [
        "loss = sum over tokens of w * (-c (A < 0 ? max(min(r A, clip(r, 0.8, 1.28) A), 3 A) : "
        "min(r A, clip(r, 0.8, 1.28) A)) + 0.01 r k3(pi, ref))",
        "w    = 1 / (tokens of the step)",
        "A    = (R - group mean) / (group std + 0.0001)",
        "r    = pi / old",
        "k3   = ref / pi - 1 - log(ref / pi)",
        "c    = token_truncate of old / sampler, [0, 2], without gradient",
        "old  = pi before the update",
        "step = samples of groups whose rewards differ",
    ]


def test_formula_says_where_the_plain_k3_pulls() -> None:
    formula = Objective.named("grpo", beta=0.1, kl="k3_forward").formula()
    assert "k3   = ref / pi - 1 - log(ref / pi), which pulls like KL(ref || pi)" in formula


def test_formula_shows_rewards_truncation_and_costs() -> None:
    rewards = (("right", 1.0), ("brief", 0.5))
    punished = Objective.named("rloo", rewards=rewards, truncated="punish", overlong=(100, 20, 2.0))
    assert punished.formula().splitlines() == [
        "loss = sum over tokens of w * (-A log pi)",
        "w    = 1 / (sequences of the step * 1)",
        "A    = R - mean of the others in the group",
        "R    = right + 0.5 brief + 2 min(max((80 - length) / 20, -1), 0)",
        "step = samples of groups whose rewards differ",
    ]
    each = Objective.named(
        "grpo", rewards=rewards, normalise="each", truncated="mask", beta=0.1, kl="k1_reward"
    )
    assert each.formula().splitlines()[2:] == [
        "A    = (1 A_right + 0.5 A_brief) / (batch std of that + 0.0001) - 0.1 (log old - log ref)",
        "A_k  = (R_k - group mean) / (group std + 0.0001)",
        "r    = pi / old",
        "old  = the sampler's",
        "step = samples of groups whose rewards differ, but for those cut off at max_tokens",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"surrogate": "trpo"}, "surrogate='trpo' is none of ppo, gspo, cispo, reinforce"),
        ({"kl": "k3"}, "kl='k3' is none of"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_high": 0.0}, "clip_high=0.0"),
        ({"clip_high": math.nan}, "clip_high=nan"),
        ({"surrogate": "reinforce"}, "reinforce has no ratio"),
        ({"dual_clip": 1.1}, "must exceed 1 \\+ clip_high"),
        ({"dual_clip": 3.0, "surrogate": "cispo"}, "no meaning for cispo"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"beta": math.nan}, "beta=nan"),
        ({"beta": 0.1, "kl": "k1"}, "zero expected gradient"),
        ({"reduction": "dr_grpo"}, "needs a positive constant_length"),
        ({"constant_length": 4}, "does not read constant_length"),
        ({"baseline": "leave_one_out"}, "leave_one_out keeps"),
        ({"correction_high": 2.0}, "band needs a correction"),
        ({"correction": "token_truncate"}, "needs correction_high"),
        ({"correction": "token_mask"}, "needs a band"),
        (
            {"correction": "token_truncate", "correction_low": 0.5, "correction_high": 2.0},
            "no lower end",
        ),
        ({"correction": "token_mask", "correction_high": 0.5}, "correction_high=0.5"),
        ({"normalise": "each"}, "needs several rewards"),
        ({"normalise": "twice"}, "normalise='twice' is none of sum, each"),
        ({"rewards": (("a", 0.0),)}, "reward weights are"),
        ({"truncated": "drop"}, "truncated='drop' is none of keep, mask, punish"),
        ({"truncated": "punish"}, "needs overlong_cache"),
        ({"overlong": (10, 5, 1.0)}, "punishes nothing"),
        ({"truncated": "punish", "overlong": (10, 11, 1.0)}, "must be 1 to 10 tokens"),
        ({"truncated": "punish", "overlong": (10, 5, 0.0)}, "overlong_weight=0.0"),
        (
            {
                "truncated": "punish",
                "overlong": (10, 5, 1.0),
                "normalise": "each",
                "rewards": (("a", 1.0), ("b", 1.0)),
            },
            "list a length_penalty reward",
        ),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**fields)


def test_every_contradiction_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)clip_low.*beta.*constant_length"):
        Objective(clip_low=2.0, beta=-1.0, constant_length=3)


def test_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="no objective 'ppo'; there are grpo, dapo"):
        Objective.named("ppo")

"""Expected gradients of the KL estimators, by exact enumeration of a five-token vocabulary.

The expectation over tokens drawn from ``old`` is a finite sum, so nothing here is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.grpo import Objective, policy_loss
from trainer.kl import Kl, kl_to_reference

REF = torch.tensor([0.4, -0.9, 0.1, 1.3, -0.2], dtype=torch.float64).log_softmax(-1)
OTHER_REF = torch.tensor([-0.8, 0.3, 0.9, -0.1, 0.5], dtype=torch.float64).log_softmax(-1)
OLD = torch.tensor([0.1, 0.2, -0.5, 0.9, 0.0], dtype=torch.float64).log_softmax(-1)


def policy() -> tuple[Tensor, Tensor]:
    logits = torch.tensor([0.7, -0.3, 0.2, 0.5, -1.1], dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(-1)


def expected_gradient(estimator: Kl, *, on_policy: bool, ref: Tensor = REF) -> Tensor:
    """Gradient of the loss, averaged over every token that ``old`` could have drawn."""
    logits, logprobs = policy()
    old = logprobs.detach() if on_policy else OLD
    loss = (old.exp() * kl_to_reference(estimator, logprobs, ref, old)).sum()
    return torch.autograd.grad(loss, logits)[0]


def reverse_kl_gradient() -> Tensor:
    logits, logprobs = policy()
    return torch.autograd.grad((logprobs.exp() * (logprobs - REF)).sum(), logits)[0]


def forward_kl_gradient() -> Tensor:
    logits, logprobs = policy()
    return torch.autograd.grad((REF.exp() * (REF - logprobs)).sum(), logits)[0]


def test_forward_and_reverse_kl_pull_differently_here() -> None:
    """Otherwise the tests below would not tell them apart."""
    assert (forward_kl_gradient() - reverse_kl_gradient()).abs().max() > 0.01


def test_k1_has_no_gradient_on_policy() -> None:
    gradient = expected_gradient("k1", on_policy=True)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_k1_never_looks_at_the_reference() -> None:
    for on_policy in (True, False):
        torch.testing.assert_close(
            expected_gradient("k1", on_policy=on_policy),
            expected_gradient("k1", on_policy=on_policy, ref=OTHER_REF),
        )


def test_k2_is_the_reverse_kl_on_policy() -> None:
    torch.testing.assert_close(expected_gradient("k2", on_policy=True), reverse_kl_gradient())


def test_k3_forward_is_the_forward_kl_on_policy() -> None:
    torch.testing.assert_close(
        expected_gradient("k3_forward", on_policy=True), forward_kl_gradient()
    )


@pytest.mark.parametrize("on_policy", [True, False])
def test_k3_ratio_is_the_reverse_kl_on_and_off_policy(on_policy: bool) -> None:
    torch.testing.assert_close(
        expected_gradient("k3_ratio", on_policy=on_policy), reverse_kl_gradient()
    )


def expected_gradient_of_the_loss(kl: Kl, *, on_policy: bool, surrogate: str = "ppo") -> Tensor:
    """The same through the whole loss, with a coefficient of 1 and rewards that are all equal."""
    logits, logprobs = policy()
    old = logprobs.detach() if on_policy else OLD
    objective = Objective(
        surrogate=surrogate,  # type: ignore[arg-type]
        clip_low=None,
        clip_high=None,
        beta=1.0,
        kl=kl,
    )
    # One row for each token that could have been drawn, with its probability for a weight.
    loss, _ = policy_loss(
        objective,
        logprobs=logprobs[:, None],
        old_logprobs=old[:, None],
        sampler_logprobs=old[:, None],
        advantages=torch.zeros(5, dtype=torch.float64),
        mask=torch.ones(5, 1, dtype=torch.bool),
        weights=old.exp()[:, None],
        ref_logprobs=REF[:, None],
    )
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo", "reinforce"])
def test_k1_in_the_reward_is_the_reverse_kl_on_policy(surrogate: str) -> None:
    gradient = expected_gradient_of_the_loss("k1_reward", on_policy=True, surrogate=surrogate)
    torch.testing.assert_close(gradient, reverse_kl_gradient())


def test_k1_in_the_reward_has_no_gradient_of_its_own() -> None:
    _, logprobs = policy()
    assert not kl_to_reference("k1_reward", logprobs, REF, logprobs.detach()).requires_grad


@pytest.mark.parametrize(
    ("kl", "on_policy", "truth"),
    [
        ("k2", True, reverse_kl_gradient),
        ("k3_forward", True, forward_kl_gradient),
        ("k3_ratio", True, reverse_kl_gradient),
        ("k3_ratio", False, reverse_kl_gradient),
    ],
)
def test_terms_of_the_loss_have_the_gradients_of_their_estimators(
    kl: Any, on_policy: bool, truth: Callable[[], Tensor]
) -> None:
    gradient = expected_gradient_of_the_loss(kl, on_policy=on_policy)
    torch.testing.assert_close(gradient, truth())


@pytest.mark.parametrize("estimator", ["k2", "k3_forward"])
def test_the_others_are_biased_off_policy(estimator: Any) -> None:
    gradient = expected_gradient(estimator, on_policy=False)
    for truth in (reverse_kl_gradient(), forward_kl_gradient()):
        assert (gradient - truth).abs().max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k3_forward", "k3_ratio", "k1_reward"])
def test_values_estimate_the_reverse_kl(estimator: Any) -> None:
    """k2 is biased in value even on-policy."""
    _, logprobs = policy()
    kl = (logprobs.exp() * (logprobs - REF)).sum()
    estimates = kl_to_reference(estimator, logprobs, REF, logprobs.detach())
    torch.testing.assert_close((logprobs.exp() * estimates).sum(), kl)

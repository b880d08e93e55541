from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.protocol import Rollout, Sample
from trainer.config import Config
from trainer.errors import ConfigError, TrainerError
from trainer.learner import Learner, build_learner
from trainer.ledger import fates_of_group
from trainer.policy import token_logprobs
from trainer.rewards import Failed, Outcome, Score
from trainer.update import TrainingSet, learn, training_set

Setup = Callable[..., tuple[Learner, Config]]


@pytest.fixture
def setup(untrained_model: Path, make_config: Callable[..., Config]) -> Setup:
    def build(**sections: Any) -> tuple[Learner, Config]:
        defaults: dict[str, Any] = {
            "model": {"path": str(untrained_model), "device": "cpu"},
            "objective": {"name": "dapo"},
            "optimizer": {"lr": 1e-3},
        }
        config = make_config(**{**defaults, **sections})
        return build_learner(config, None), config

    return build


def parameters(learner: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def rollout(make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]) -> Rollout:
    """Two groups of three samples of uneven lengths, with logprobs of nobody in particular."""
    groups = [
        [
            make_sample(g, tuple(range(40 + 20 * s, 41 + 23 * s + g)), prompt=(50 + g, 51))
            for s in range(3)
        ]
        for g in range(2)
    ]
    return make_rollout(groups)


OUTCOMES: list[list[Outcome]] = [[Score(1.0), Score(0.0), Score(0.0)]] * 2


def chosen(
    rollout: Rollout, learner: Learner, outcomes: Sequence[Sequence[Outcome]] = OUTCOMES
) -> TrainingSet:
    fates = [fates_of_group(g.samples, o) for g, o in zip(rollout.groups, outcomes, strict=True)]
    return training_set(rollout, outcomes, fates, learner)


def with_own_logprobs(rollout: Rollout, learner: Learner, make_rollout: Any) -> Rollout:
    """The same samples, as if the learner's own model had drawn them."""

    def rescored(sample: Sample) -> Sample:
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]])
        with torch.no_grad():
            logprobs = token_logprobs(learner.model, ids, torch.ones_like(ids))
        completion = logprobs[0, len(sample.prompt_ids) :].numpy()
        return replace(sample, logprobs=completion)

    rescored_groups = [[rescored(sample) for sample in g.samples] for g in rollout.groups]
    return make_rollout(rescored_groups)  # type: ignore[no-any-return]


def test_advantages_within_groups(setup: Setup, rollout: Rollout) -> None:
    learner, _ = setup(objective={"name": "dapo", "scale": "none"})
    found = chosen(rollout, learner)
    assert len(found.samples) == 6
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3] * 2)
    assert torch.allclose(found.advantages_N, expected)


def test_failures_leave_their_group_and_flat_groups_leave_the_batch(
    setup: Setup, rollout: Rollout
) -> None:
    learner, _ = setup(objective={"name": "dapo", "scale": "none"})
    outcomes: list[list[Outcome]] = [[Score(1.0), Failed("x"), Score(0.0)], [Score(1.0)] * 3]
    found = chosen(rollout, learner, outcomes)
    first = rollout.groups[0].samples
    assert found.samples == [first[0], first[2]]
    assert found.advantages_N.tolist() == [0.5, -0.5]


def test_spread_of_the_batch_counts_groups_that_are_not_trained(
    setup: Setup, rollout: Rollout
) -> None:
    learner, _ = setup(objective={"name": "dapo", "scale": "batch_std"})
    outcomes: list[list[Outcome]] = [[Score(1.0), Score(0.0), Score(0.0)], [Score(5.0)] * 3]
    found = chosen(rollout, learner, outcomes)
    spread = torch.tensor([1.0, 0.0, 0.0, 5.0, 5.0, 5.0]).std()
    assert torch.allclose(found.advantages_N[0], (2 / 3) / (spread + 1e-4))


def test_good_answers_become_likelier_and_bad_ones_less_likely(
    setup: Setup, rollout: Rollout, make_rollout: Any
) -> None:
    learner, config = setup()
    before = with_own_logprobs(rollout, learner, make_rollout)
    update = learn(learner, chosen(before, learner), config)
    after = with_own_logprobs(rollout, learner, make_rollout)
    pairs = zip(before.samples, after.samples, strict=True)
    gains = [float((new.logprobs - old.logprobs).mean()) for old, new in pairs]
    for good, *bad in (gains[:3], gains[3:]):
        assert good > 0.01
        assert max(bad) < -0.01
    assert update.ratio == pytest.approx(1.0, abs=1e-5)
    assert update.kl_sampler == pytest.approx(0.0, abs=1e-9)
    assert update.clipped == 0.0
    assert math.isnan(update.kl_reference)
    assert update.loss_tokens == sum(len(s.completion_ids) for s in rollout.samples)


def test_micro_batches_change_nothing(setup: Setup, rollout: Rollout, make_rollout: Any) -> None:
    results = []
    for tokens in (1, 20, 10_000):
        learner, config = setup(
            train={"micro_batch_tokens": tokens},
            objective={"name": "grpo", "beta": 0.1},
            optimizer={"lr": 1e-3, "eps": 1e-3},  # so that AdamW does not magnify rounding
        )
        own = with_own_logprobs(rollout, learner, make_rollout)
        update = learn(learner, chosen(own, learner), config)
        results.append((update, parameters(learner)))
    for update, weights in results[1:]:
        assert update.gradient_norm == pytest.approx(results[0][0].gradient_norm, rel=1e-4)
        assert update.loss == pytest.approx(results[0][0].loss, abs=1e-6)
        for left, right in zip(weights, results[0][1], strict=True):
            assert torch.allclose(left, right, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [{"packing": "off"}, {"activation_checkpointing": True}, {"head_dtype": "float32"}],
    ids=["padded", "activation checkpointing", "float32 head"],
)
def test_ways_to_compute_one_update_agree(
    setup: Setup,
    rollout: Rollout,
    make_rollout: Any,
    untrained_model: Path,
    options: dict[str, Any],
) -> None:
    results = []
    for changes in ({}, options):
        model = {"path": str(untrained_model), "device": "cpu", **changes}
        learner, config = setup(model=model, optimizer={"lr": 1e-3, "eps": 1e-3})
        own = with_own_logprobs(rollout, learner, make_rollout)
        results.append((learn(learner, chosen(own, learner), config), parameters(learner)))
    assert results[0][0].gradient_norm == pytest.approx(results[1][0].gradient_norm, rel=1e-4)
    for left, right in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(left, right, atol=2e-6)


def test_sequences_are_packed_unless_told_otherwise(setup: Setup, untrained_model: Path) -> None:
    assert setup()[0].unpacked == ""
    model = {"path": str(untrained_model), "device": "cpu", "packing": "off"}
    assert setup(model=model)[0].unpacked == "model.packing is off"


def test_a_learning_rate_of_zero_leaves_the_model(setup: Setup, rollout: Rollout) -> None:
    learner, config = setup(optimizer={"lr": 0.0})
    before = parameters(learner)
    update = learn(learner, chosen(rollout, learner), config)
    assert update.gradient_norm > 0
    assert same(before, parameters(learner))


def test_nothing_useful_is_no_update(setup: Setup, rollout: Rollout) -> None:
    learner, config = setup()
    before = parameters(learner)
    for outcomes in ([[Score(1.0)] * 3] * 2, [[Failed("x")] * 3] * 2):
        update = learn(learner, chosen(rollout, learner, outcomes), config)
        assert (update.updates, update.loss_tokens) == (0, 0)
    assert same(before, parameters(learner))
    assert learner.scheduler.last_epoch == 0


def test_several_updates_move_away_from_the_sampler(
    setup: Setup, rollout: Rollout, make_rollout: Any
) -> None:
    learner, config = setup(train={"updates_per_rollout": 3})
    own = with_own_logprobs(rollout, learner, make_rollout)
    update = learn(learner, chosen(own, learner), config)
    assert update.updates == 3
    assert update.loss_tokens == sum(len(s.completion_ids) for s in rollout.samples)
    assert update.kl_sampler > 1e-6
    assert learner.scheduler.last_epoch == 3


def test_reference_is_loaded_for_its_coefficient_alone(
    setup: Setup, rollout: Rollout, make_rollout: Any
) -> None:
    assert setup()[0].reference is None
    learner, config = setup(
        objective={"name": "dapo", "beta": 0.1}, train={"updates_per_rollout": 2}
    )
    assert learner.reference is not None
    assert not any(p.requires_grad for p in learner.reference.parameters())
    own = with_own_logprobs(rollout, learner, make_rollout)
    assert learn(learner, chosen(own, learner), config).kl_reference > 0


def test_a_gradient_that_is_not_finite_stops_before_the_model_is_touched(
    setup: Setup, rollout: Rollout
) -> None:
    learner, config = setup()
    before = parameters(learner)
    found = chosen(rollout, learner)
    broken = TrainingSet(found.samples, torch.full_like(found.advantages_N, math.nan))
    with pytest.raises(TrainerError, match="the gradient's norm is nan"):
        learn(learner, broken, config)
    assert same(before, parameters(learner))


def test_long_gradients_are_clipped(setup: Setup, rollout: Rollout) -> None:
    learner, config = setup(optimizer={"lr": 1e-3, "max_gradient_norm": 1e-4})
    seen: list[float] = []

    def watch(*_: Any) -> None:
        gradients = [p.grad for p in learner.model.parameters() if p.grad is not None]
        seen.append(float(torch.stack([g.norm() for g in gradients]).norm()))

    learner.optimizer.register_step_pre_hook(watch)
    update = learn(learner, chosen(rollout, learner), config)
    assert update.gradient_norm > 1e-3
    assert seen[0] == pytest.approx(1e-4, rel=1e-3)


def test_the_learning_rate_is_that_of_the_last_update(setup: Setup, rollout: Rollout) -> None:
    learner, config = setup(
        optimizer={"lr": 1e-3, "warmup_updates": 4}, train={"updates_per_rollout": 2}
    )
    used: list[float] = []
    learner.optimizer.register_step_pre_hook(lambda *_: used.append(_rate(learner)))
    update = learn(learner, chosen(rollout, learner), config)
    assert used == [0.25e-3, 0.5e-3]
    assert update.learning_rate == used[-1]


def _rate(learner: Learner) -> float:
    return float(learner.optimizer.param_groups[0]["lr"])


def test_a_model_that_is_not_there(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config(model={"path": str(tmp_path)})
    with pytest.raises(ConfigError, match="cannot load the model"):
        build_learner(config, None)


@pytest.mark.parametrize("updates", [1, 2])
def test_mismatch_is_corrected_against_a_second_look_at_the_samples(
    setup: Setup, rollout: Rollout, make_rollout: Any, updates: int
) -> None:
    """The sampler gave one sample's tokens three times the probability that the trainer gives."""
    correction = {"correction": "token_mask", "correction_low": 0.5, "correction_high": 2.0}
    learner, config = setup(
        objective={"name": "dapo", **correction},
        train={"updates_per_rollout": updates},
        optimizer={"lr": 1e-6},
    )
    own = with_own_logprobs(rollout, learner, make_rollout)
    first, *others = own.samples
    odd = replace(first, logprobs=first.logprobs + math.log(3.0))
    samples = [odd, *others]
    mixed = make_rollout([samples[:3], samples[3:]])
    update = learn(learner, chosen(mixed, learner), config)
    length = len(first.completion_ids)
    assert update.masked_tokens == length
    assert update.loss_tokens == sum(len(s.completion_ids) for s in samples)
    alike = [len(s.completion_ids) for s in samples if len(s.completion_ids) == length]
    assert update.masked_by_length["1"] == pytest.approx(1 / len(alike))
    # The ratio is against the trainer's own policy, whatever the sampler said.
    assert update.ratio == pytest.approx(1.0, abs=1e-3)


def test_truncated_weights_scale_the_gradient(
    setup: Setup, rollout: Rollout, make_rollout: Any
) -> None:
    norms = []
    for high in (1.0, 0.5):
        # A sampler with twice the trainer's probability everywhere: every weight is 1/2.
        learner, config = setup(
            objective={"name": "dapo", "correction": "token_truncate", "correction_high": 1.0}
            if high < 1
            else {"name": "dapo"},
        )
        own = with_own_logprobs(rollout, learner, make_rollout)
        shift = math.log(2.0) if high < 1 else 0.0
        shifted = [replace(s, logprobs=s.logprobs + shift) for s in own.samples]
        update = learn(learner, chosen(make_rollout([shifted[:3], shifted[3:]]), learner), config)
        norms.append(update.gradient_norm)
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)


def test_advantages_of_each_reward_by_itself(setup: Setup, rollout: Rollout) -> None:
    functions = [{"function": "exact"}, {"name": "loud", "function": "numeric"}]
    learner, _ = setup(
        objective={"name": "dapo", "normalise": "each"}, reward={"functions": functions}
    )
    parts = [(1.0, 0.0), (0.0, 100.0), (0.0, 0.0)]
    outcomes: list[list[Outcome]] = [[Score(sum(part), part) for part in parts]] * 2
    found = chosen(rollout, learner, outcomes)
    assert found.advantages_N[0] == pytest.approx(float(found.advantages_N[1]), abs=1e-3)
    assert found.advantages_N[0] > 0.5

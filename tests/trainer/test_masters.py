"""Half-precision weights learn as float32 weights do: through masters, gradients and moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shared.protocol import Sample
from tests.trainer.directories import save
from tests.trainer.models import build
from tests.trainer.sharded_steps import Work, samples_of
from trainer.config import Config
from trainer.findings import WARNING, find_rounding
from trainer.learner import Learner, build_learner
from trainer.masters import finer_values, has_masters, keep_masters, master_of
from trainer.memory import estimate
from trainer.policy import load_policy
from trainer.publish import checkpoint_tensors
from trainer.update import TrainingSet, learn

RATE = 1e-6
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ConfigOf = Callable[..., Config]


@pytest.fixture
def config_of(half_config: Callable[..., ConfigOf]) -> ConfigOf:
    # Steps as long as the gradient says; AdamW's would depend on the signs of its smallest.
    return half_config("bfloat16", {"lr": RATE, "eps": 1e-4})


def taught(config: Config, steps: int = 5) -> Learner:
    learner = build_learner(config, None)
    for _ in range(steps):
        learn(learner, chosen(learner), config)
    return learner


def chosen(learner: Learner, count: int = 8) -> TrainingSet:
    samples: list[Sample] = samples_of(Work(samples=count), learner.model.config.vocab_size)
    return TrainingSet(samples, torch.linspace(-1.0, 1.5, count))


def updated(learner: Learner) -> Tensor:
    """Everything that the optimizer moves."""
    return torch.cat([p.detach().float().flatten() for p in parameters(learner)])


def parameters(learner: Learner) -> list[Tensor]:
    return [p for group in learner.optimizer.param_groups for p in group["params"]]


def test_steps_of_a_small_rate_are_those_of_float32_and_are_lost_without_masters(
    config_of: ConfigOf,
) -> None:
    start = updated(build_learner(config_of({"dtype": "float32"}), None))
    exact = updated(taught(config_of({"dtype": "float32"}))) - start
    mastered = updated(taught(config_of())) - start
    assert (mastered - exact).norm() < 0.05 * exact.norm()
    # What the checkpoint says in float32 is where masters begin, to the last bit.
    assert torch.equal(updated(build_learner(config_of(), None)), start)
    alone = config_of({"master_weights": False})
    rounded = updated(taught(alone)) - updated(build_learner(alone, None))
    assert rounded.count_nonzero() < 0.2 * exact.count_nonzero()
    assert (rounded - exact).norm() > 0.5 * exact.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_model_computes_with_its_masters_rounded(config_of: ConfigOf, dtype: str) -> None:
    learner = taught(config_of({"dtype": dtype}, optimizer={"lr": 1e-3}))
    for parameter in learner.model.parameters():
        assert parameter.dtype == getattr(torch, dtype)
        assert master_of(parameter).dtype == torch.float32
        assert torch.equal(parameter, master_of(parameter).to(parameter.dtype))
        assert not torch.equal(parameter.float(), master_of(parameter))


def test_gradients_of_micro_batches_are_added_in_float32() -> None:
    """Each is rounded by itself, as the backward pass leaves it; their sum is not."""
    torch.manual_seed(0)
    model, alone = build("qwen3", torch.bfloat16), build("qwen3", torch.bfloat16)
    keep_masters(model, {})
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
    lossy = [torch.zeros_like(p) for p in alone.parameters()]
    for number in range(64):
        ids = torch.randint(0, 50, (1, 3 + number % 5))
        for each in (model, alone):
            each(input_ids=ids, labels=ids).loss.backward()
        for total, half, parameter in zip(exact, lossy, alone.parameters(), strict=True):
            assert parameter.grad is not None
            total.add_(parameter.grad)
            half.add_(parameter.grad)
            parameter.grad = None
    for parameter, total, half in zip(model.parameters(), exact, lossy, strict=True):
        found = master_of(parameter).grad
        assert parameter.grad is None
        assert found is not None
        assert found.dtype == torch.float32
        assert (found - total).norm() < 1e-6 * total.norm()
        assert (half - total).norm() > 1e-3 * total.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_step_keeps_is_what_the_option_says(config_of: ConfigOf, dtype: str) -> None:
    config = config_of({"dtype": dtype})
    learner = build_learner(config, None)
    kept: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = parameters(learner)
        moments = [x for slots in optimizer.state.values() for x in slots.values() if x.ndim]
        kept[:] = [*learner.model.parameters(), *trained, *moments]
        kept.extend(p.grad for p in (*trained, *learner.model.parameters()) if p.grad is not None)

    learner.optimizer.register_step_post_hook(look)
    learn(learner, chosen(learner), config)
    storages = {x.data_ptr(): x.nbytes for x in kept}
    each = sum(storages.values()) / sum(p.numel() for p in learner.model.parameters())
    assert each == {"float32": 16, "bfloat16": 18}[dtype]
    assert f"{each:g}" in str(type(config.model).model_fields["master_weights"].description)
    needed = estimate(learner.model, config)
    assert needed.weights + needed.optimizer == sum(storages.values())
    assert {x.dtype for x in kept} == {torch.float32, getattr(torch, dtype)}


def test_gradients_are_clipped_in_float32(config_of: ConfigOf) -> None:
    config = config_of(optimizer={"lr": 1e-3, "max_gradient_norm": 1e-4})
    learner = build_learner(config, None)
    norms: list[Tensor] = []

    def look(*_: Any) -> None:
        gradients = [p.grad for p in parameters(learner) if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients))

    learner.optimizer.register_step_pre_hook(look)
    assert learn(learner, chosen(learner), config).gradient_norm > 1e-3
    assert float(norms[0]) == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize("name", ["SGD", "Adafactor", "Adam", "RMSprop"])
def test_any_optimizer_updates_the_masters(config_of: ConfigOf, name: str) -> None:
    config = config_of(optimizer={"name": name, "lr": RATE})
    learner = build_learner(config, None)
    before = updated(learner)
    learn(learner, chosen(learner), config)
    after = updated(learner)
    assert after.dtype == torch.float32
    assert 0 < (after - before).abs().max() < 1e-3
    for parameter in learner.model.parameters():
        assert torch.equal(parameter, master_of(parameter).bfloat16())


def sent(learner: Learner, dtype: torch.dtype) -> dict[str, Tensor]:
    found = {}
    for tensor in checkpoint_tensors(learner.model, dtype):
        assert DTYPES[tensor.spec.dtype] == dtype
        found[tensor.spec.name] = torch.frombuffer(bytearray(tensor.load()), dtype=dtype)
    return found


def test_what_is_published_is_what_the_optimizer_has(config_of: ConfigOf) -> None:
    learner = taught(config_of(), steps=2)
    for dtype in DTYPES.values():
        found = sent(learner, dtype)
        own = dict(learner.model.named_parameters())
        assert found.keys() == own.keys()
        for name, parameter in own.items():
            assert torch.equal(found[name], master_of(parameter).to(dtype).flatten())
        same = [torch.equal(found[n], p.to(dtype).flatten()) for n, p in own.items()]
        assert all(same) is (dtype == torch.bfloat16)


def test_a_checkpoint_holds_the_masters_as_a_float32_model(
    config_of: ConfigOf, tmp_path: Path
) -> None:
    learner = taught(config_of(), steps=2)
    path = save(tmp_path, learner) / "model"
    assert AutoConfig.from_pretrained(path).dtype == torch.float32
    saved: Any = AutoModelForCausalLM.from_pretrained(path)  # as it is
    assert saved.config.architectures == ["Qwen3ForCausalLM"]
    pairs = zip(saved.parameters(), learner.model.parameters(), strict=True)
    assert all(torch.equal(value, master_of(parameter)) for value, parameter in pairs)
    assert learner.model.dtype == torch.bfloat16


@pytest.mark.parametrize("before", [{}, {"master_weights": False}, {"dtype": "float32"}])
@pytest.mark.parametrize("after", [{}, {"master_weights": False}, {"dtype": "float32"}])
def test_a_run_goes_on_in_another_precision(
    config_of: ConfigOf, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    rate = {"lr": 1e-3, "warmup_updates": 9}
    learner = taught(config_of(before, optimizer=rate), steps=2)
    config = config_of(after, optimizer=rate)
    resumed = build_learner(config, save(tmp_path, learner))
    for new, old in zip(parameters(resumed), parameters(learner), strict=True):
        assert torch.equal(new, old.to(new.dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            moment = learner.optimizer.state[old][name]
            assert resumed.optimizer.state[new][name].dtype == new.dtype
            assert torch.equal(resumed.optimizer.state[new][name], moment.to(new.dtype))
    if before == after:
        for each in (learner, resumed):
            learn(each, chosen(each), config)
        assert torch.equal(updated(resumed), updated(learner))


def test_adapters_have_masters_too_and_frozen_weights_none(
    config_of: ConfigOf, tmp_path: Path
) -> None:
    config = config_of({"lora": {"rank": 4}}, optimizer={"lr": 1e-3})
    learner = taught(config, steps=2)
    for name, parameter in learner.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert master_of(parameter).dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
    path = save(tmp_path, learner)
    assert not (path / "model" / "config.json").exists()
    saved = load_file(path / "model" / "adapter_model.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.float32}
    resumed = build_learner(config, path)
    assert torch.equal(updated(resumed), updated(learner))
    for each in (learner, resumed):
        learn(each, chosen(each), config)
    assert torch.equal(updated(resumed), updated(learner))
    for one, other in zip(
        checkpoint_tensors(learner.model, torch.float32),
        checkpoint_tensors(resumed.model, torch.float32),
        strict=True,
    ):
        assert one.load() == other.load()


def test_masters_begin_with_what_the_checkpoint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = build("qwen3", torch.float16)
    stored.save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), dtype=torch.bfloat16)
    keep_masters(model, finer_values(model, str(tmp_path)))
    pairs = list(zip(model.parameters(), stored.parameters(), strict=True))
    assert all(torch.equal(master_of(parameter), half.float()) for parameter, half in pairs)
    assert not all(torch.equal(parameter.float(), half.float()) for parameter, half in pairs)
    # Where there is no more to be known, it is not read again.
    model = load_policy(str(tmp_path), dtype=torch.float16)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert finer_values(model, str(tmp_path)) == {}


def test_the_reference_is_in_half_precision_and_has_no_masters(config_of: ConfigOf) -> None:
    learner = build_learner(config_of(objective={"beta": 0.1}), None)
    assert learner.reference is not None
    assert {p.dtype for p in learner.reference.parameters()} == {torch.bfloat16}
    assert has_masters(learner.model)
    assert not has_masters(learner.reference)


def test_the_doctor_sees_steps_that_round_away(config_of: ConfigOf) -> None:
    assert not list(find_rounding(config_of(), build_learner(config_of(), None)))
    for rate, verdict in ((RATE, WARNING), (10.0, "ok")):
        config = config_of({"master_weights": False}, optimizer={"lr": rate})
        (finding,) = find_rounding(config, build_learner(config, None))
        assert finding.verdict == verdict, finding

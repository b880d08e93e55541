"""An adapter trains, is its own reference, is published merged and comes back from a checkpoint."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from shared.client import RolloutClient
from shared.protocol import Sample
from tests.trainer.fake_servers import FakeServer, fake_servers
from trainer.batch import collate
from trainer.config import Config
from trainer.curve import read_records
from trainer.errors import ConfigError
from trainer.learner import Learner, build_learner
from trainer.lora import adapter_off
from trainer.policy import load_policy
from trainer.publish import checkpoint_tensors, tensors_digest
from trainer.replay import replay
from trainer.train import train
from trainer.update import TrainingSet, learn, policy_logprobs


@pytest.fixture
def config_of(make_config: Callable[..., Config], untrained_model: Path) -> Callable[..., Config]:
    def build(**sections: Any) -> Config:
        known: dict[str, dict[str, Any]] = {
            "model": {"path": str(untrained_model), "device": "cpu", "lora": {"rank": 4}},
            "objective": {"name": "dapo", "beta": 0.1},
            "optimizer": {"lr": 1e-2},
        }
        return make_config(**{**known, **sections})

    return build


@pytest.fixture
def chosen(make_sample: Callable[..., Sample]) -> TrainingSet:
    samples = [make_sample(0, tuple(range(30, 34 + 5 * s)), prompt=(50, 51)) for s in range(3)]
    return TrainingSet(samples, torch.tensor([1.0, -0.5, -0.5]))


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def test_only_the_adapter_is_trained_and_the_base_is_the_reference(
    config_of: Callable[..., Config], chosen: TrainingSet, untrained_model: Path
) -> None:
    config = config_of()
    learner = build_learner(config, None)
    assert learner.reference is None
    assert not learner.unpacked
    before = values(learner.model)
    first, second = (learn(learner, chosen, config) for _ in range(2))
    assert first.kl_reference == 0.0
    assert second.kl_reference > 0.0
    changed = {n for n, x in values(learner.model).items() if not x.equal(before[n])}
    assert changed
    assert all(".lora_" in name for name in changed)
    batch = collate(chosen.samples, learner.pad_id)
    plain = load_policy(str(untrained_model))
    with torch.no_grad(), adapter_off(learner.model):
        off = policy_logprobs(learner.model, batch, config)
    with torch.no_grad():
        on = policy_logprobs(learner.model, batch, config)
        torch.testing.assert_close(off, policy_logprobs(plain, batch, config))
    assert (on - off).abs().max() > 0.01


def test_what_is_published_is_the_merged_model(
    config_of: Callable[..., Config], chosen: TrainingSet, untrained_model: Path
) -> None:
    config = config_of()
    learner = build_learner(config, None)
    untouched = load_policy(str(untrained_model))
    assert tensors_digest(learner.model, torch.float32, torch.float32) == tensors_digest(
        untouched, torch.float32, torch.float32
    )
    learn(learner, chosen, config)
    sent = {t.spec.name: t for t in checkpoint_tensors(learner.model, torch.float32)}
    merged = load_policy(str(untrained_model))
    assert list(sent) == [t.spec.name for t in checkpoint_tensors(merged, torch.float32)]
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            data = np.frombuffer(sent[name].load(), np.float32).copy()
            parameter.copy_(torch.from_numpy(data).reshape(parameter.shape))
    batch = collate(chosen.samples, learner.pad_id)
    with torch.no_grad():
        torch.testing.assert_close(
            policy_logprobs(merged, batch, config), policy_logprobs(learner.model, batch, config)
        )


@pytest.fixture(scope="module")
def server(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as servers:
        yield servers[0]


def test_a_run_is_resumed_and_replayed_with_its_adapter(
    config_of: Callable[..., Config], server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "def even(*, sample, **_):\n    return float(sample.completion_ids[0] % 2)\n"
    )

    def run(steps: int, *, resume: bool = False) -> Learner:
        config = config_of(
            server={"url": server.url},
            rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6, "seeded": True},
            reward={"function": f"{tmp_path / 'rewards.py'}:even"},
            train={"output": str(tmp_path / "run"), "steps": steps},
            evaluation={"prompts": 0},
        )
        train(config, resume=resume, console=Console(file=io.StringIO()))
        return build_learner(config, tmp_path / "run" / "checkpoints" / f"step-{steps:06d}")

    run(2)
    learner = run(3, resume=True)
    with RolloutClient(server.url) as client:
        assert client.info().digest == tensors_digest(learner.model, torch.bfloat16, torch.bfloat16)
    saved = tmp_path / "run" / "checkpoints" / "step-000003" / "model"
    assert (saved / "adapter_model.safetensors").exists()
    assert not (saved / "model.safetensors").exists()
    for step in (1, 3):
        assert all(figure.equal for figure in replay(tmp_path / "run", step).figures)
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 3


def test_targets_that_are_not_there(
    config_of: Callable[..., Config], untrained_model: Path
) -> None:
    lora = {"rank": 4, "target_modules": ["nothing"]}
    config = config_of(model={"path": str(untrained_model), "device": "cpu", "lora": lora})
    with pytest.raises(ConfigError, match=r"model\.lora: .*nothing"):
        build_learner(config, None)


def test_optimizers_of_torch(config_of: Callable[..., Config], chosen: TrainingSet) -> None:
    sgd = {"name": "SGD", "lr": 1e-2, "options": {"momentum": 0.9}}
    config = config_of(optimizer=sgd)
    learner = build_learner(config, None)
    assert isinstance(learner.optimizer, torch.optim.SGD)
    assert learn(learner, chosen, config).gradient_norm > 0
    for wrong, says in (
        ({"name": "Nothing"}, "torch.optim has no Nothing"),
        ({"name": "SGD", "options": {"beta3": 1}}, r"optimizer\.options"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_learner(config_of(optimizer=wrong), None)

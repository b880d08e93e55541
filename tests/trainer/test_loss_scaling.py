"""float16 trains with a scaled loss: what is small is kept, what is too large costs one update."""

from __future__ import annotations

import copy
import io
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.amp import GradScaler

from tests.trainer import scaled_steps
from tests.trainer.directories import save
from tests.trainer.fake_servers import fake_servers
from tests.trainer.processes import PATIENCE_S, TORCHRUN
from tests.trainer.sharded_steps import Work, samples_of
from trainer.config import Config
from trainer.config_file import to_toml
from trainer.curve import read_records
from trainer.errors import ConfigError, TrainerError
from trainer.learner import Learner, build_learner
from trainer.reconcile import read_ledgers, table
from trainer.replay import replay
from trainer.tally import Update
from trainer.train import train
from trainer.update import TrainingSet, learn

FIRST = 2.0**16
"""The scale that torch begins with."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
ConfigOf = Callable[..., Config]


@pytest.fixture
def config_of(half_config: Callable[..., ConfigOf]) -> ConfigOf:
    return half_config("float16", {"lr": 1e-4, "warmup_updates": 9})


def step(learner: Learner, config: Config, factor: float = 1.0) -> Update:
    """One step on advantages of this size."""
    samples = samples_of(Work(), learner.model.config.vocab_size)
    return learn(learner, TrainingSet(samples, factor * torch.linspace(-1.0, 1.5, 8)), config)


def gradient(learner: Learner, config: Config, factor: float) -> Tensor:
    """That the optimizer gets, as a share of the advantages."""
    found: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        found.extend(p.grad.flatten() for p in trained if p.grad is not None)

    learner.optimizer.register_step_pre_hook(look)
    step(learner, config, factor)
    return torch.cat(found).double() / factor


def unscaled(learner: Learner) -> Learner:
    return replace(learner, scaler=GradScaler(learner.device.type, enabled=False))


def off(one: Tensor, best: Tensor) -> float:
    return float((one - best).norm() / best.norm())


def everything(learner: Learner) -> dict[str, Any]:
    """All that an update may change, but for the scale."""
    return copy.deepcopy(
        {
            "model": learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "schedule": learner.scheduler.state_dict(),
            "trained": [p for group in learner.optimizer.param_groups for p in group["params"]],
        }
    )


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit, whatever is in it."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 4}}, {"packing": "off"}])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_small_gradients_are_those_of_float32_and_are_lost_without_a_scale(
    config_of: ConfigOf, options: dict[str, Any], device: str
) -> None:
    small = 1e-6
    config = config_of(options | {"device": device})
    wide = config_of(options | {"device": device, "dtype": "float32"})
    exact = gradient(build_learner(wide, None), wide, small)
    assert off(gradient(build_learner(config, None), config, small), exact) < 0.02
    assert off(gradient(unscaled(build_learner(config, None)), config, small), exact) > 0.5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_an_overflow_costs_one_update_and_half_the_scale(config_of: ConfigOf, device: str) -> None:
    config = config_of({"device": device})
    learner = build_learner(config, None)
    assert step(learner, config).loss_scale == FIRST
    before = everything(learner)
    update = step(learner, config, 1e6)
    assert (update.updates, update.skipped, update.loss_scale) == (0, 1, FIRST / 2)
    assert (update.loss_tokens, math.isnan(update.gradient_norm)) == (0, True)
    assert update.loss > 1e4  # what was looked at is told
    assert_same(everything(learner), before)
    # Nothing of it is left in the next one.
    other = build_learner(config, None)
    step(other, config)
    after, expected = (gradient(x, config, 1.0) for x in (learner, other))
    assert off(after, expected) < 1e-3
    assert learner.scaler.get_scale() == FIRST / 2
    assert learner.scheduler.last_epoch == 2


def test_the_next_update_of_a_rollout_is_made_with_the_smaller_scale(config_of: ConfigOf) -> None:
    once, twice = config_of(), config_of(train={"updates_per_rollout": 2})
    scale = FIRST
    while not step(with_scale(build_learner(once, None), scale), once).skipped:
        scale *= 2  # to the smallest that overflows
    update = step(with_scale(build_learner(twice, None), scale), twice)
    assert (update.updates, update.skipped, update.loss_scale) == (1, 1, scale / 2)
    alone = step(build_learner(once, None), once)
    assert update.loss_tokens == alone.loss_tokens > 0
    assert update.loss == pytest.approx(alone.loss)
    assert update.gradient_norm == pytest.approx(alone.gradient_norm, rel=1e-3)


def with_scale(learner: Learner, scale: float) -> Learner:
    learner.scaler.load_state_dict(learner.scaler.state_dict() | {"scale": scale})
    return learner


def test_the_scale_doubles_after_updates_without_overflow_in_a_row(config_of: ConfigOf) -> None:
    config = config_of()
    learner = build_learner(config, None)
    learner.scaler.set_growth_interval(2)
    factors = (1.0, 1e6, 1.0, 1.0, 1.0)
    scales = [step(learner, config, factor).loss_scale / FIRST for factor in factors]
    assert scales == [1, 0.5, 0.5, 1, 1]


def test_what_no_scale_can_help_ends_the_run(config_of: ConfigOf) -> None:
    config = config_of()
    learner = with_scale(build_learner(config, None), 2.0)
    before = everything(learner)
    assert step(learner, config, 3e7).loss_scale == 1.0
    with pytest.raises(TrainerError, match=r"do not fit into float16 as they are.*bfloat16"):
        step(learner, config, 3e7)
    assert_same(everything(learner), before)
    learner = build_learner(config, None)
    with pytest.raises(TrainerError, match=r"the loss is nan, whatever it is scaled by"):
        step(learner, config, math.nan)
    assert_same(everything(learner), before)
    assert learner.scaler.get_scale() == FIRST


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_precisions_have_no_scale(config_of: ConfigOf, dtype: str) -> None:
    config = config_of({"dtype": dtype})
    learner = build_learner(config, None)
    loss = torch.ones(())
    assert learner.scaler.scale(loss) is loss
    update = step(learner, config, 1e6)
    assert (update.updates, update.skipped) == (1, 0)
    assert math.isnan(update.loss_scale)
    assert learner.scaler.state_dict() == {}
    with pytest.raises(TrainerError, match="the gradient's norm is nan"):
        step(learner, config, math.nan)


def test_float16_without_masters_is_refused(config_of: ConfigOf) -> None:
    with pytest.raises(ConfigError, match="'float16' needs master_weights"):
        config_of({"master_weights": False})


def test_a_run_goes_on_with_its_scale(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of()
    learner = build_learner(config, None)
    learner.scaler.set_growth_interval(3)
    for factor in (1e6, 1.0, 1.0):  # one more and it doubles
        step(learner, config, factor)
    resumed = build_learner(config, save(tmp_path, learner))
    assert resumed.scaler.state_dict() == learner.scaler.state_dict()
    for each in (learner, resumed):
        assert step(each, config).loss_scale == FIRST
    assert_same(everything(resumed), everything(learner))


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_a_run_goes_on_in_another_precision(
    config_of: ConfigOf, tmp_path: Path, before: str, after: str
) -> None:
    config = config_of({"dtype": before})
    learner = with_scale(build_learner(config, None), 64.0)
    step(learner, config)
    config = config_of({"dtype": after})
    resumed = build_learner(config, save(tmp_path, learner))
    assert resumed.scaler.is_enabled() is (after == "float16")
    assert resumed.scaler.get_scale() == (FIRST if after == "float16" else 1.0)
    assert step(resumed, config).updates == 1


def test_ranks_skip_together(config_of: ConfigOf, tmp_path: Path) -> None:
    """What overflows on one rank, in its rows or in its part of the gradient, stops both."""
    config = config_of(optimizer={"lr": 1e-6})
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    ended = subprocess.run(
        [*TORCHRUN, "-m", scaled_steps.__name__, str(tmp_path / "run.toml"), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    torch.testing.assert_close(ranks[0], ranks[1], rtol=0, atol=0, equal_nan=True)
    updates = [Update(**figures) for figures, _ in ranks[0]]
    assert [(u.updates, u.skipped) for u in updates] == [(1, 0), (0, 1), (0, 1), (1, 0)]
    assert [u.loss_scale / FIRST for u in updates] == [1, 0.5, 0.25, 0.25]
    weights = [tensors for _, tensors in ranks[0]]
    assert_same(weights[1], weights[0])
    assert_same(weights[2], weights[0])
    assert not all(torch.equal(x, y) for x, y in zip(weights[3], weights[2], strict=True))
    # One process does the same.
    alone = build_learner(config, None)
    first, second = (scaled_steps.take(alone, config, factor) for factor in (1.0, 1.0))
    for one, other in ((first, updates[0]), (second, updates[3])):
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-3)
        assert other.loss == pytest.approx(one.loss, abs=1e-4)


REWARD = """
def far_apart(*, sample, **_):
    return 1e8 * float(sample.completion_ids[0] % 2)
"""


def test_a_step_that_overflowed_is_accounted_for(
    config_of: ConfigOf, untrained_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")
    out = io.StringIO()
    with fake_servers(untrained_model, tmp_path, 1) as (server,):
        config = config_of(
            server={"url": server.url},
            rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6},
            reward={"function": f"{tmp_path / 'rewards.py'}:far_apart"},
            objective={"name": "dapo", "scale": "none"},
            train={"output": str(tmp_path / "run"), "steps": 2},
            evaluation={"prompts": 0},
        )
        train(config, console=Console(file=out, soft_wrap=True))
        # The weights of the beginning are served still, and not sent again.
        assert server.engine.version == 1
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [(m["updates"], m["skipped_updates"]) for m in metrics] == [(0, 1)] * 2
    assert [m["loss_scale"] for m in metrics] == [FIRST / 2, FIRST / 4]
    assert [m["gradient_norm"] for m in metrics] == [None, None]
    said = (
        f"warning: float16 overflowed: 1 updates skipped, the next loss is scaled by {FIRST / 2:g}"
    )
    assert out.getvalue().count(said) == 1
    for entry in read_ledgers(tmp_path / "run" / "ledger.jsonl"):
        assert entry.tokens["overflowed"] > 0 == entry.loss_tokens
        assert entry.groups["overflowed"] > 0
        assert "trained" not in entry.samples
    assert "gradient overflowed" in table(tmp_path / "run", None)
    assert all(figure.equal for figure in replay(tmp_path / "run", 2).figures)

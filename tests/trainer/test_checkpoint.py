from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.protocol import Rollout, Sample
from trainer.checkpoint import (
    RunState,
    latest_checkpoint,
    random_states,
    read_queue,
    read_state,
    restore_random_states,
    restore_trainer,
    save_checkpoint,
)
from trainer.config import Config
from trainer.errors import CheckpointError
from trainer.learner import Learner, build_learner
from trainer.ledger import fates_of_group
from trainer.rewards import Score
from trainer.update import learn, training_set


@pytest.fixture(autouse=True)
def _unchanged_random_states() -> Iterator[None]:
    before = random_states()
    yield
    restore_random_states(before)


@pytest.fixture
def config(make_config: Callable[..., Config], untrained_model: Path) -> Config:
    return make_config(
        model={"path": str(untrained_model), "device": "cpu"},
        objective={"name": "dapo", "beta": 0.01},
        optimizer={"lr": 1e-3, "warmup_updates": 3, "weight_decay": 0.01},
    )


@pytest.fixture
def step(
    config: Config, make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> Callable[[Learner], None]:
    """An update on samples and rewards drawn from all random generators that a run may use."""

    def take(learner: Learner) -> None:
        samples = [
            make_sample(
                completion=[random.randrange(200) for _ in range(random.randint(1, 6))],
                logprobs=None,
            )
            for _ in range(4)
        ]
        outcomes = [Score(float(np.random.rand()) + float(torch.rand(()))) for _ in samples]
        rollout = make_rollout([samples])
        fates = [fates_of_group(samples, outcomes)]
        learn(learner, training_set(rollout, [outcomes], fates, learner), config)

    return take


def save(
    root: Path, learner: Learner, step: int = 2, keep: int = 2, queue: Sequence[Any] = ()
) -> Path:
    return save_checkpoint(
        root,
        RunState(step, step * 8, 5, "d"),
        model=learner.model,
        tokenizer=learner.tokenizer,
        optimizer=learner.optimizer,
        scheduler=learner.scheduler,
        scaler=learner.scaler,
        keep=keep,
        queue=queue,
    )


def everything(learner: Learner) -> list[Any]:
    state = learner.optimizer.state_dict()["state"]
    moments = [state[index][name] for index in sorted(state) for name in sorted(state[index])]
    draws = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
    rates = torch.tensor(learner.scheduler.get_last_lr())
    return [*(p.detach() for p in learner.model.parameters()), *moments, draws, rates]


def test_going_on_is_bit_identical_to_never_having_stopped(
    tmp_path: Path, config: Config, step: Callable[[Learner], None]
) -> None:
    learner = build_learner(config, None)
    for _ in range(2):
        step(learner)
    checkpoint = save(tmp_path, learner)
    for _ in range(3):
        step(learner)
    unbroken = everything(learner)

    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    resumed = build_learner(config, checkpoint)
    for _ in range(3):
        step(resumed)
    for left, right in zip(unbroken, everything(resumed), strict=True):
        assert torch.equal(left, right)


def test_the_comparison_above_can_fail(
    tmp_path: Path, config: Config, step: Callable[[Learner], None]
) -> None:
    learner = build_learner(config, None)
    step(learner)
    checkpoint = save(tmp_path, learner)
    step(learner)
    fresh = build_learner(config.model_copy(update={}), checkpoint)
    random.random()
    step(fresh)
    pairs = zip(everything(learner), everything(fresh), strict=True)
    assert not all(torch.equal(left, right) for left, right in pairs)


def test_the_reference_stays_the_model_that_the_run_began_with(
    tmp_path: Path, config: Config, step: Callable[[Learner], None]
) -> None:
    learner = build_learner(config, None)
    step(learner)
    resumed = build_learner(config, save(tmp_path, learner))
    assert learner.reference is not None
    assert resumed.reference is not None
    pairs = zip(learner.reference.parameters(), resumed.reference.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    changed = zip(resumed.model.parameters(), resumed.reference.parameters(), strict=True)
    assert not all(torch.equal(left, right) for left, right in changed)


def test_readable_by_transformers(tmp_path: Path, config: Config) -> None:
    learner = build_learner(config, None)
    path = save(tmp_path, learner) / "model"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert (path / "model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(path).get_vocab() == learner.tokenizer.get_vocab()
    pairs = zip(model.parameters(), learner.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_the_newest_are_kept_and_found(tmp_path: Path, config: Config) -> None:
    learner = build_learner(config, None)
    for number in (1, 2, 10):
        save(tmp_path, learner, number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000010"]
    newest = latest_checkpoint(tmp_path)
    assert read_state(newest) == RunState(10, 80, 5, "d")
    # By number, not by name: seven digits come after six.
    newest.rename(tmp_path / "step-1000000")
    assert latest_checkpoint(tmp_path).name == "step-1000000"


def test_a_crash_while_writing_leaves_the_one_before(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build_learner(config, None)
    save(tmp_path, learner, 1)

    def full(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="disk full"):
            save(tmp_path, learner, 2)
    assert latest_checkpoint(tmp_path).name == "step-000001"
    build_learner(config, latest_checkpoint(tmp_path))
    save(tmp_path, learner, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


def test_a_queue_is_kept_beside_the_rest(tmp_path: Path, config: Config) -> None:
    learner = build_learner(config, None)
    queue = [{"step": 3, "portions": [{"position": 16, "count": 8, "answer": None}]}]
    path = save(tmp_path, learner, queue=queue)
    assert read_queue(path) == queue
    (path / "queue.msgpack").write_bytes(b"\xc1")
    with pytest.raises(CheckpointError, match="damaged"):
        read_queue(path)
    # A checkpoint from before there were queues.
    (path / "queue.msgpack").unlink()
    assert read_queue(path) == []


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path, config: Config) -> None:
    learner = build_learner(config, None)
    path = save(tmp_path, learner)
    written = (path / "trainer.pt").stat().st_mtime_ns
    assert save(tmp_path, learner) == path
    assert (path / "trainer.pt").stat().st_mtime_ns == written


def test_one_that_was_moved_aside_is_none_of_them(tmp_path: Path, config: Config) -> None:
    """As the message of a damaged one advises; any name will do."""
    learner = build_learner(config, None)
    bad, good = save(tmp_path, learner, step=40), tmp_path / "step-000020"
    bad.rename(tmp_path / "step-000040.broken")
    (tmp_path / "step-old").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        latest_checkpoint(tmp_path)
    assert save(tmp_path, learner, step=20) == good
    assert latest_checkpoint(tmp_path) == good


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        latest_checkpoint(tmp_path / "none")


def test_damaged_checkpoints_are_told_apart(tmp_path: Path, config: Config) -> None:
    learner = build_learner(config, None)
    path = save(tmp_path, learner)
    (path / "state.json").write_text("{}x", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        read_state(path)
    for content in (b"", b"nonsense"):
        (path / "trainer.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match="does not fit"):
            restore_trainer(
                path,
                optimizer=learner.optimizer,
                scheduler=learner.scheduler,
                scaler=learner.scaler,
            )

"""Steps made again from what a run left behind."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.protocol import Rollout, Sample
from tests.trainer.fake_servers import FakeServer, fake_servers
from trainer.batches import (
    batch_path,
    forget_later_batches,
    kept_steps,
    load_batch,
    save_batch,
)
from trainer.config import Config
from trainer.curve import read_records
from trainer.errors import DataError
from trainer.ledger import Fate
from trainer.replay import print_replay, replay
from trainer.rewards import Failed, Outcome, Score
from trainer.rewards.outcome import TimedOut
from trainer.train import train

REWARD = """
def even(*, sample, **_):
    return float(sample.completion_ids[0] % 2)
"""


@pytest.fixture(scope="module")
def server(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as servers:
        yield servers[0]


@pytest.fixture
def config_of(
    make_config: Callable[..., Config], untrained_model: Path, server: FakeServer, tmp_path: Path
) -> Callable[..., Config]:
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")

    def build(**sections: Any) -> Config:
        known: dict[str, dict[str, Any]] = {
            "train": {"output": str(tmp_path / "run"), "steps": 5, "checkpoint_every": 3}
        }
        for name, section in sections.items():
            known[name] = known.get(name, {}) | section
        return make_config(
            model={"path": str(untrained_model), "device": "cpu"},
            server={"url": server.url},
            rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6},
            reward={"function": f"{tmp_path / 'rewards.py'}:even"},
            optimizer={"lr": 1e-3, "warmup_updates": 3},
            evaluation={"prompts": 0},
            **known,
        )

    return build


def run(config: Config) -> Path:
    train(config, console=Console(file=io.StringIO()))
    return Path(config.train.output)


def test_every_step_comes_out_as_it_was_logged_to_the_last_bit(
    config_of: Callable[..., Config],
) -> None:
    """Steps 1 to 3 from the model at the beginning, 4 and 5 from the checkpoint after 3."""
    directory = run(config_of(objective={"name": "grpo", "beta": 0.05}))
    logged = read_records(directory / "metrics.jsonl")
    for step, began in ((1, 0), (3, 0), (4, 3), (5, 3)):
        found = replay(directory, step)
        assert found.began == began
        assert found.tokens > 0
        for figure in found.figures:
            assert figure.replayed == logged[step - 1][figure.name], figure.name
            assert figure.equal
    assert len({record["gradient_norm"] for record in logged}) == 5
    out = io.StringIO()
    assert print_replay(Console(file=out, width=120), directory, replay(directory, 5))
    printed = out.getvalue()
    assert "2 steps from checkpoint step-000003" in printed
    assert printed.count("equal") == 4
    assert "to the last bit" in printed


def test_what_was_changed_since_is_noticed(config_of: Callable[..., Config]) -> None:
    directory = run(config_of())
    text = (directory / "config.toml").read_text(encoding="utf-8")
    (directory / "config.toml").write_text(
        text.replace("lr = 0.001", "lr = 0.01"), encoding="utf-8"
    )
    # The first gradient does not depend on the learning rate; the second does.
    assert all(figure.equal for figure in replay(directory, 1).figures)
    changed = replay(directory, 3)
    assert not all(figure.close for figure in changed.figures)
    out = io.StringIO()
    assert not print_replay(Console(file=out), directory, changed)
    assert "NOT reproduced" in out.getvalue()


def test_what_cannot_be_replayed_is_said(config_of: Callable[..., Config], tmp_path: Path) -> None:
    directory = run(config_of(train={"keep_batches": 1}))
    with pytest.raises(DataError, match=r"step 9 is not in .* ends with step 5"):
        replay(directory, 9)
    with pytest.raises(DataError, match=r"batch of step 1 is not kept .* steps 5 to 5 are"):
        replay(directory, 2)
    with pytest.raises(DataError, match=r"is .* a run's directory"):
        replay(tmp_path / "none", 1)
    batch_path(directory / "batches", 4).write_bytes(b"\xc1")
    with pytest.raises(DataError, match="damaged"):
        replay(directory, 5)


def test_a_batch_comes_back_as_it_was(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout], tmp_path: Path
) -> None:
    rollout = make_rollout([[make_sample(), make_sample(0, (9,), logprobs=[-0.1])]])
    outcomes: list[list[Outcome]] = [[Score(0.1, (0.1, 2.0)), TimedOut("slow")]]
    fates = [[Fate.TRAINED, Fate.REWARD_TIMEOUT]]
    save_batch(tmp_path, step=7, rollout=rollout, outcomes=outcomes, fates=fates, keep=2)
    found = load_batch(tmp_path, 7)
    assert (found.step, found.outcomes, found.fates) == (7, outcomes, fates)
    assert found.outcomes[0][0].parts == (0.1, 2.0)  # type: ignore[union-attr]
    assert isinstance(found.outcomes[0][1], TimedOut)
    for before, after in zip(rollout.samples, found.rollout.samples, strict=True):
        assert before.completion_ids.tolist() == after.completion_ids.tolist()
        assert before.logprobs.tobytes() == after.logprobs.tobytes()


def test_old_batches_go_and_none_are_kept_if_none_are_wanted(
    make_rollout: Callable[..., Rollout], make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    rollout = make_rollout([[make_sample()]])
    for step in (9, 10, 11):
        save_batch(
            tmp_path / "some",
            step=step,
            rollout=rollout,
            outcomes=[[Failed("x")]],
            fates=[[Fate.REWARD_ERROR]],
            keep=2,
        )
    names = sorted(path.name for path in (tmp_path / "some").iterdir())
    assert names == ["step-000010.msgpack", "step-000011.msgpack"]
    save_batch(tmp_path / "none", step=1, rollout=rollout, outcomes=[], fates=[], keep=0)
    assert not (tmp_path / "none").exists()


def test_batches_of_a_lost_timeline_do_not_push_out_the_new_ones(
    tmp_path: Path, make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    def save(step: int) -> None:
        save_batch(
            tmp_path,
            step=step,
            rollout=make_rollout([[make_sample()]]),
            outcomes=[[Score(1.0)]],
            fates=[[Fate.TRAINED]],
            keep=2,
        )

    for step in (18, 19):
        save(step)
    (tmp_path / "step-000019.msgpack.bad").touch()
    forget_later_batches(tmp_path, 10)
    assert kept_steps(tmp_path) == []
    save(11)
    assert kept_steps(tmp_path) == [11]
    assert (tmp_path / "step-000019.msgpack.bad").exists()


def test_resuming_forgets_the_batches_of_lost_steps(config_of: Callable[..., Config]) -> None:
    config = config_of()
    train(config)
    output = Path(config.train.output)
    shutil.rmtree(output / "checkpoints" / "step-000005")
    assert kept_steps(output / "batches") == [1, 2, 3, 4, 5]
    train(config_of(train={"steps": 4}), resume=True)
    assert kept_steps(output / "batches") == [1, 2, 3, 4]

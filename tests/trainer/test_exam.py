"""Right leniently, right strictly, and right in form alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from transformers import AutoTokenizer

from shared.client import RolloutClient
from shared.errors import Overloaded
from shared.protocol import Rollout, Sample
from tests.trainer.fake_servers import MORE_THAN_A_CLIENT_TRIES, FakeServer, fake_servers
from trainer.config import Config, LoraConfig
from trainer.errors import CheckpointError
from trainer.exam import (
    estimates,
    examine,
    form_judge,
    judge,
    strict_judge,
)
from trainer.exam_checkpoints import checkpoint_path, examine_checkpoints
from trainer.lora import ADAPTER, add_lora
from trainer.policy import load_policy
from trainer.prompts import Task, held_out_tasks
from trainer.publish import publish
from trainer.rewards import Failed, Outcome, Score, open_reward

HASHES = r"#### (.*)"


@pytest.mark.parametrize(
    ("pattern", "text", "reference", "strict", "form"),
    [
        ("", " 7\n", "7", True, True),
        ("", "7.0", "7", True, True),
        ("", "It is 7", "7", False, False),
        ("", "8", "7", False, True),
        ("", "", "7", False, False),
        ("", "Paris", "Paris", True, True),
        ("", "London", "Paris", False, True),
        (HASHES, "3 + 4 = 7\n#### 7", "so\n#### 7", True, True),
        (HASHES, "3 + 4 = 7", "so\n#### 7", False, False),
        (HASHES, "#### 8\n#### 7", "7", True, True),
        (HASHES, "#### 1,007", "#### 1007", True, True),
        (HASHES, "#### 8 apples", "#### 7", False, False),
    ],
)
def test_strict_and_form(pattern: str, text: str, reference: str, strict: bool, form: bool) -> None:
    assert strict_judge(pattern)(text, reference) is strict
    assert form_judge(pattern)(text, reference) is form


def test_the_three_ways_count_apart(
    make_config: Callable[..., Config],
    make_rollout: Callable[..., Rollout],
    make_sample: Callable[..., Sample],
) -> None:
    """A reward that failed leaves lenient alone; strict and form need none."""
    rollout = make_rollout([[make_sample(text=text) for text in ("7", "is 7", "8", "?")]])
    outcomes: list[list[Outcome]] = [[Score(1.0), Score(1.0), Score(0.5), Failed("x")]]
    marks = judge(make_config(), [Task("q", "7")], rollout, outcomes)
    assert marks == {
        "lenient": [[True, True, False]],
        "strict": [[True, False, False, False]],
        "form only": [[True, False, True, False]],
    }
    generous = make_config(evaluation={"right_at": 0.5})
    assert judge(generous, [Task("q", "7")], rollout, outcomes)["lenient"] == [[True] * 3]


def test_columns() -> None:
    sampled = estimates([[True, False, False, False], [False] * 4, [True] * 3], greedy=False)
    assert list(sampled) == ["pass@1", "pass@2", "pass@4"]
    assert sampled["pass@1"].value == pytest.approx((0.25 + 0 + 1) / 3)
    assert sampled["pass@2"].value == pytest.approx((0.5 + 0 + 1) / 3)
    # The third problem has only three answers with a verdict.
    assert sampled["pass@4"].value == pytest.approx(0.5)
    assert list(estimates([[True] * 100], greedy=False)) == [
        "pass@1", "pass@16", "pass@32", "pass@64", "pass@100",
    ]  # fmt: skip
    assert estimates([[True], [False]], greedy=True)["greedy"].value == 0.5


@pytest.mark.parametrize("pattern", ["(", "no group", "(a)(b)"])
def test_patterns_that_capture_no_answer_are_refused(
    make_config: Callable[..., Config], pattern: str
) -> None:
    with pytest.raises(Exception, match="answer_pattern"):
        make_config(evaluation={"answer_pattern": pattern})


def test_named_checkpoints(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config(train={"output": str(tmp_path)})
    assert checkpoint_path(config, "base") == config.model.path
    (tmp_path / "checkpoints" / "step-000004" / "model").mkdir(parents=True)
    latest = tmp_path / "checkpoints" / "step-000004"
    assert checkpoint_path(config, "latest") == str(latest / "model")
    assert checkpoint_path(config, str(latest)) == str(latest / "model")
    with pytest.raises(CheckpointError, match="allowed: base, latest"):
        checkpoint_path(config, str(tmp_path / "none"))


def test_checkpoints_are_examined_and_the_server_gets_its_own_back(
    client: RolloutClient, tiny_model: Path, untrained_model: Path, make_config: Callable[..., Any]
) -> None:
    config = make_config(
        model={"path": str(tiny_model)},
        evaluation={"prompts": 8, "samples": 4, "max_tokens": 4},
    )
    tasks = held_out_tasks(config)
    with client.lease() as lease:
        own = client.reset(fence=lease.fence).digest
    with open_reward(config.reward) as reward:
        exams = list(
            examine_checkpoints(
                client, config, tasks, reward, checkpoints=["base", str(untrained_model)]
            )
        )
    assert [exam.name for exam in exams] == ["base", str(untrained_model)]
    assert exams[1].version == exams[0].version + 1
    for exam in exams:
        assert exam.errors == 0
        assert list(exam.table["strict"]) == ["greedy", "pass@1", "pass@2", "pass@4"]
        for way in exam.table.values():
            assert way["pass@1"].value <= way["pass@2"].value <= way["pass@4"].value
        assert exam.table["strict"]["pass@4"].value <= exam.table["form only"]["pass@4"].value
    assert client.info().digest == own


@pytest.fixture
def server(untrained_model: Path, tmp_path: Path) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path / "staging", 1) as (server,):
        yield server


@pytest.fixture
def fake(server: FakeServer) -> Iterator[RolloutClient]:
    with RolloutClient(server.url) as client:
        yield client


@pytest.fixture
def trained(untrained_model: Path) -> Any:
    model = load_policy(str(untrained_model))
    with torch.no_grad():
        model.get_parameter("model.norm.weight").add_(0.125)
    return model


def examined(client: RolloutClient, config: Config, checkpoints: list[str]) -> list[str]:
    with open_reward(config.reward) as reward:
        tasks = held_out_tasks(config)
        exams = examine_checkpoints(client, config, tasks, reward, checkpoints=checkpoints)
        return [exam.name for exam in exams]


@pytest.fixture
def after_run(
    untrained_model: Path, tmp_path: Path, make_config: Callable[..., Config]
) -> Callable[[Any], Config]:
    """Leaves a model as the last checkpoint of a run; the run's configuration."""

    def save(model: Any) -> Config:
        latest = tmp_path / "run" / "checkpoints" / "step-000007" / "model"
        model.save_pretrained(latest)
        AutoTokenizer.from_pretrained(untrained_model).save_pretrained(latest)
        return make_config(
            model={"path": str(untrained_model)},
            evaluation={"prompts": 2, "max_tokens": 4},
            train={"output": str(tmp_path / "run")},
        )

    return save


def test_a_run_gets_back_what_it_had_published(
    fake: RolloutClient, trained: Any, after_run: Callable[[Any], Config]
) -> None:
    """As it is after a run: its last weights are served, and kept in its last checkpoint."""
    config = after_run(trained)
    with fake.lease() as lease:
        live = publish(fake, trained, torch.bfloat16, fence=lease.fence)
    for checkpoints in (["base", "latest"], ["latest", "base"], ["base"]):
        assert examined(fake, config, checkpoints) == checkpoints
        assert fake.info().digest == live.digest
        assert fake.info().version > live.version


def sum_in_another_order(model: Any) -> None:
    """As another device would: turns the rank's components round, which changes no product."""
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            down, up = (layer.get_parameter(f"lora_{x}.{ADAPTER}.weight") for x in "AB")
            down.copy_(down.flip(0))
            up.copy_(up.flip(1))


@torch.no_grad()
def test_a_run_gets_back_an_adapter_that_was_merged_on_another_device(
    fake: RolloutClient, untrained_model: Path, after_run: Callable[[Any], Config]
) -> None:
    model = load_policy(str(untrained_model))
    add_lora(model, LoraConfig(rank=16))
    dice = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.normal_(generator=dice)
    config = after_run(model)
    sum_in_another_order(model)
    with fake.lease() as lease:
        live = publish(fake, model, torch.bfloat16, fence=lease.fence)
    assert examined(fake, config, ["base"]) == ["base"]
    assert fake.info().digest == live.digest
    assert fake.info().version > live.version


def test_weights_that_could_not_be_given_back_are_left_alone(
    fake: RolloutClient, trained: Any, untrained_model: Path, make_config: Callable[..., Any]
) -> None:
    config = make_config(model={"path": str(untrained_model)}, evaluation={"prompts": 2})
    with fake.lease() as lease:
        live = publish(fake, trained, torch.bfloat16, fence=lease.fence)
    with pytest.raises(CheckpointError, match="could not get them back"):
        examined(fake, config, ["base"])
    assert (fake.info().version, fake.info().digest) == (live.version, live.digest)


def test_a_busy_server_is_asked_again_until_patience_ends(
    server: FakeServer,
    fake: RolloutClient,
    trained: Any,
    untrained_model: Path,
    make_config: Callable[..., Config],
) -> None:
    def exam(patience: float) -> int:
        config = make_config(
            model={"path": str(untrained_model)},
            server={"ready_timeout": patience},
            evaluation={"prompts": 1, "max_tokens": 4},
        )
        with open_reward(config.reward) as reward:
            return examine(fake, config, held_out_tasks(config), reward, name="served").problems

    with fake.lease() as lease:
        publish(fake, trained, torch.bfloat16, fence=lease.fence)
    server.engine.busy = MORE_THAN_A_CLIENT_TRIES
    assert exam(60) == 1
    assert server.engine.busy == 0
    server.engine.busy = MORE_THAN_A_CLIENT_TRIES
    with pytest.raises(Overloaded, match="no room"):
        exam(0)

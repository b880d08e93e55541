"""The loop against a real server. The model is untrained: what is tested is the exchange."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import Conflict
from tests.rollout_server.support import samples_run
from tests.trainer.directories import with_another_template
from trainer.checkpoint import latest_checkpoint, read_state
from trainer.config import Config
from trainer.curve import read_records
from trainer.errors import CheckpointError, ConfigError, MismatchError, RewardError
from trainer.publish import publish
from trainer.train import train

REWARDS = """
def even(*, sample, **_):
    return float(sample.completion_ids[0] % 2)

def constant(**_):
    return 1.0

def often_broken(*, sample, **_):
    if sample.completion_ids[0] % 3 == 0:
        raise RuntimeError("no verdict")
    return float(sample.completion_ids[0])

def always_broken(**_):
    raise RuntimeError("never a verdict")
"""

RunConfig = Callable[..., Config]


@pytest.fixture
def run_config(
    make_config: Callable[..., Config], untrained_model: Path, server_url: str, tmp_path: Path
) -> RunConfig:
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")

    def build(reward: str = "even", **sections: Any) -> Config:
        known: dict[str, dict[str, Any]] = {
            "model": {"path": str(untrained_model), "device": "cpu"},
            "server": {"url": server_url},
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 6},
            "reward": {"function": f"{tmp_path / 'rewards.py'}:{reward}"},
            "optimizer": {"lr": 1e-3},
            "train": {"output": str(tmp_path / "run"), "steps": 2},
            "evaluation": {"prompts": 8, "max_tokens": 4},
        }
        for name, section in sections.items():
            known[name] = known.get(name, {}) | section
        return make_config(**known)

    return build


def run(config: Config, *, resume: bool = False) -> str:
    out = io.StringIO()
    train(config, resume=resume, console=Console(file=out, soft_wrap=True, highlight=False))
    return out.getvalue()


def test_the_loop_publishes_what_it_learns_and_keeps_its_books(
    run_config: RunConfig, server_url: str, tmp_path: Path
) -> None:
    with RolloutClient(server_url) as client:
        before = client.info()
        printed = run(run_config())
        after = client.info()
    # One publish at the start and one after each step, and nothing else.
    assert after.version == before.version + 3
    output = tmp_path / "run"
    metrics = read_records(output / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    assert [m["version"] for m in metrics] == [before.version + 2, before.version + 3]
    assert [m["sampled_version"] for m in metrics] == [before.version + 1, before.version + 2]
    assert [m["staleness"] for m in metrics] == [0, 0]
    assert all(m["updates"] == 1 and m["gradient_norm"] > 0 for m in metrics)
    for entry in read_records(output / "ledger.jsonl"):
        assert entry["prompts"] == sum(entry["groups"].values()) == 4
        assert entry["received_samples"] == sum(entry["samples"].values()) == 16
        assert entry["received_tokens"] == sum(entry["tokens"].values())
        assert entry["loss_tokens"] == entry["tokens"]["trained"] > 0
    evaluations = read_records(output / "evaluation.jsonl")
    assert [(e["step"], e["greedy"]["version"]) for e in evaluations] == [
        (0, before.version + 1),
        (2, after.version),
    ]
    assert list((output / "tensorboard").iterdir())
    assert "step 2/2  reward" in printed
    assert "w    = 1 /" in printed
    assert "near 0 by construction" in printed
    state = read_state(latest_checkpoint(output / "checkpoints"))
    assert (state.step, state.position, state.version) == (2, 8, after.version)
    assert state.digest == after.digest


def test_sampler_and_trainer_agree_about_the_first_samples(
    run_config: RunConfig, tmp_path: Path
) -> None:
    run(run_config(train={"steps": 1}, rollout={"temperature": 0.7}))
    (first,) = read_records(tmp_path / "run" / "metrics.jsonl")
    # A float32 trainer against a bfloat16 sampler; a temperature ignored would give ten times this.
    assert first["ratio"] == pytest.approx(1.0, abs=0.01)
    assert first["kl_sampler"] < 2e-3


def test_a_resumed_run_publishes_first_and_goes_on_where_it_was(
    run_config: RunConfig, server_url: str, tmp_path: Path
) -> None:
    run(run_config())
    state = read_state(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    with RolloutClient(server_url) as client:
        # Another policy takes the server meanwhile.
        other = run_config(train={"output": str(tmp_path / "other"), "steps": 1, "seed": 5})
        run(other)
        assert client.info().digest != state.digest
        between = client.info().version
        printed = run(run_config(train={"steps": 4, "checkpoint_every": 1}), resume=True)
        assert client.info().version == between + 3
    assert "going on after step 2" in printed
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert metrics[2]["sampled_version"] == between + 1
    evaluations = read_records(tmp_path / "run" / "evaluation.jsonl")
    assert [e["step"] for e in evaluations] == [0, 2, 4]
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["step-000003", "step-000004"]
    state = read_state(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    assert (state.step, state.position) == (4, 16)


def test_a_finished_run_resumed_does_nothing_more(run_config: RunConfig, tmp_path: Path) -> None:
    run(run_config(train={"steps": 1}))
    run(run_config(train={"steps": 1}), resume=True)
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 1


def test_one_run_is_not_written_over_another(run_config: RunConfig) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        run(run_config(), resume=True)
    run(run_config(train={"steps": 1}))
    with pytest.raises(ConfigError, match="holds those of another run"):
        run(run_config(train={"steps": 1}))


def test_steps_without_a_signal_are_skipped_and_told(
    run_config: RunConfig, server_url: str, tmp_path: Path
) -> None:
    with RolloutClient(server_url) as client:
        before = client.info().version
        printed = run(run_config("constant"))
        assert client.info().version == before + 1
    assert printed.count("no update") == 2
    for entry in read_records(tmp_path / "run" / "ledger.jsonl"):
        assert entry["groups"] == {"zero_variance": 4}
        assert (entry["updates"], entry["loss_tokens"]) == (0, 0)


def test_samples_whose_reward_fails_leave_and_are_counted(
    run_config: RunConfig, tmp_path: Path
) -> None:
    printed = run(run_config("often_broken", evaluation={"prompts": 0}))
    entries = read_records(tmp_path / "run" / "ledger.jsonl")
    assert all(entry["samples"]["trained"] > 0 for entry in entries)
    for entry in entries:
        failed = entry["samples"]["reward_error"]
        assert 0 < failed < 16
        assert entry["reward_errors"] == {"RuntimeError: no verdict": failed}
    assert printed.count("warning: reward errors") == 1


def test_a_reward_that_never_works_ends_the_run(run_config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"none of 16 samples.*RuntimeError: never a verdict"):
        run(run_config("always_broken"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_another_chat_template_is_refused(
    run_config: RunConfig, untrained_model: Path, tmp_path: Path
) -> None:
    copy = with_another_template(untrained_model, tmp_path / "copy")
    with pytest.raises(MismatchError, match="the server's tokenizer"):
        run(run_config(model={"path": str(copy)}))


def test_somebody_elses_publish_is_noticed(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish_twice(client: RolloutClient, model: Any, dtype: Any, **options: Any) -> Any:
        answer = publish(client, model, dtype, **options)
        model.model.norm.weight.data.mul_(2.0)
        publish(client, model, dtype, **options)
        return answer

    monkeypatch.setattr("trainer.transports.publish", publish_twice)
    with pytest.raises(MismatchError, match="does another run publish to it"):
        run(run_config(evaluation={"prompts": 0}))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("transport", ["http", "delta"])
def test_samples_in_flight_are_stale_by_the_steps_between(
    run_config: RunConfig,
    server_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    deltas: list[int] = []
    encode = DeltaBase.encode

    def spy(base: DeltaBase, tensors: Any) -> Any:
        deltas.append(len(tensors))
        return encode(base, tensors)

    monkeypatch.setattr(DeltaBase, "encode", spy)
    # Long samples, so that a publish falls into some of them.
    config = run_config(
        server={"url": server_url, "transport": transport},
        rollout={"max_tokens": 60},
        train={"steps": 5, "max_staleness": 2},
        evaluation={"prompts": 0},
    )
    with RolloutClient(server_url) as client:
        before = client.info().version
        run(config)
        assert client.info().version == before + 6
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert all(m["updates"] == 1 and 0 <= m["staleness"] <= 2 for m in metrics)
    assert len(deltas) == (5 if transport == "delta" else 0)


def test_two_servers_share_the_work_and_have_the_same_weights(
    run_config: RunConfig, server_url: str, deterministic_url: str, tmp_path: Path
) -> None:
    urls = [server_url, deterministic_url]
    before = [samples_run(url) for url in urls]
    printed = run(run_config(server={"urls": urls}, evaluation={"prompts": 0}, train={"steps": 4}))
    assert all(samples_run(url) > count for url, count in zip(urls, before, strict=True))
    with RolloutClient(urls[0]) as one, RolloutClient(urls[1]) as other:
        assert one.info().digest == other.info().digest
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [(m["updates"], m["staleness"]) for m in metrics] == [(1, 0)] * 4
    assert "not current" not in printed


def test_two_runs_do_not_share_a_server(run_config: RunConfig, server_url: str) -> None:
    with (
        RolloutClient(server_url) as client,
        client.lease(holder="the other run"),
        pytest.raises(Conflict, match="the other run"),
    ):
        run(run_config())
    # Freed when the other ends; and a run frees its own.
    run(run_config(train={"steps": 1}))
    with RolloutClient(server_url) as client, client.lease(holder="the other run"):
        pass


def test_tables_of_prompts_train_too(run_config: RunConfig, tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1=?", "solution": i + 1} for i in range(5)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = {"source": "jsonl", "path": str(path), "prompt_field": "question"}
    config = run_config(
        data={**data, "answer_field": "solution"},
        evaluation={"path": str(path)},
        train={"updates_per_rollout": 2, "micro_batch_tokens": 64},
        objective={"name": "grpo", "beta": 0.01},
    )
    run(config)
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [m["updates"] for m in metrics] == [2, 2]
    assert all(m["kl_reference"] > 0 for m in metrics)

"""Ways to a server: each publishes the same weights, and ``auto`` takes one that works."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.errors import Conflict, ServerUnreachable
from tests.rollout_server.channel_support import ChannelEngine
from tests.rollout_server.engines import Running, running
from tests.rollout_server.support import FakeEngine
from trainer.channels import ChannelError
from trainer.config import Config, ServerConfig
from trainer.curve import read_records
from trainer.masters import finer_values, keep_masters, master_of, round_masters
from trainer.policy import load_policy
from trainer.publish import tensors_digest
from trainer.train import train
from trainer.transports import Transport, transport_to


@pytest.fixture(scope="module")
def model(untrained_model: Path) -> PreTrainedModel:
    """In float32, as it is trained."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        untrained_model, dtype=torch.float32
    )
    return loaded


def settings(model: Path, tmp_path: Path) -> ServerSettings:
    return ServerSettings(model=str(model), staging_dir=tmp_path / "staging", channel_seconds=20.0)


@pytest.fixture
def server(untrained_model: Path, tmp_path: Path) -> Iterator[Running]:
    with running(settings(untrained_model, tmp_path), lambda _: ChannelEngine()) as at:
        yield at


def way(server: Running, model: PreTrainedModel, transport: Any, said: list[str]) -> Transport:
    options = ServerConfig(url=server.url, transport=transport)
    return transport_to(server.client, model, options, said.append)


@pytest.mark.parametrize("transport", ["http", "delta", "ipc", "nccl", "auto"])
def test_every_way_publishes_the_same(
    server: Running, model: PreTrainedModel, transport: str
) -> None:
    expected = tensors_digest(model, torch.bfloat16, torch.bfloat16)
    to_server = way(server, model, transport, [])
    with server.client.lease(holder="a") as lease:
        for _ in range(2):
            result = to_server.publish(lease.fence)
            assert result.digest == expected
    to_server.close()
    assert server.client.info().version == result.version


@pytest.mark.parametrize("transport", ["http", "delta", "ipc", "nccl", "auto"])
def test_every_way_publishes_masters_as_the_model_computes_with_them(
    server: Running, untrained_model: Path, transport: str
) -> None:
    mastered = load_policy(str(untrained_model), dtype=torch.bfloat16)
    keep_masters(mastered, finer_values(mastered, str(untrained_model)))
    to_server = way(server, mastered, transport, [])
    with server.client.lease(holder="a") as lease, torch.no_grad():
        for _ in range(2):
            for parameter in mastered.parameters():
                master_of(parameter).mul_(1.01)
            round_masters(mastered)
            plain = load_policy(str(untrained_model), dtype=torch.bfloat16)
            plain.load_state_dict(mastered.state_dict())
            expected = tensors_digest(plain, torch.bfloat16, torch.bfloat16)
            assert to_server.publish(lease.fence).digest == expected
    to_server.close()


def test_auto_says_what_it_takes_and_why_not_the_others(
    server: Running, model: PreTrainedModel
) -> None:
    said: list[str] = []
    to_server = way(server, model, "auto", said)
    with server.client.lease(holder="a") as lease:
        to_server.publish(lease.fence)
        to_server.publish(lease.fence)
    assert said == ["weights go by ipc (not nccl: the model is on the CPU)"]


def test_auto_takes_http_where_nothing_else_works(
    untrained_model: Path, tmp_path: Path, model: PreTrainedModel
) -> None:
    said: list[str] = []
    with (
        running(settings(untrained_model, tmp_path), lambda _: FakeEngine()) as at,
        at.client.lease(holder="a") as lease,
    ):
        way(at, model, "auto", said).publish(lease.fence)
        with pytest.raises(Conflict, match="takes no channels"):
            way(at, model, "ipc", []).publish(lease.fence)
    assert len(said) == 1
    assert said[0].startswith("weights go by http (")
    assert "not ipc: this engine takes no channels" in said[0]


def test_a_way_that_breaks_later_is_given_up(
    server: Running, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    to_server = way(server, model, "auto", said)
    with server.client.lease(holder="a") as lease:
        first = to_server.publish(lease.fence)

        def broken(*_: Any) -> None:
            raise ChannelError("the mapping has gone")

        monkeypatch.setattr("trainer.channels.ChannelSender._publish", broken)
        assert to_server.publish(lease.fence).version == first.version + 1
    assert said[1].startswith("weights go by http (")
    assert "not ipc: the mapping has gone" in said[1]


def test_a_server_that_is_not_there_is_no_reason_to_give_up(model: PreTrainedModel) -> None:
    with RolloutClient("http://127.0.0.1:9") as nobody:
        said: list[str] = []
        options = ServerConfig(transport="auto")
        with pytest.raises(ServerUnreachable):
            transport_to(nobody, model, options, said.append).publish(1)
    assert not said


def test_the_loop_publishes_through_channels(
    make_config: Callable[..., Config], untrained_model: Path, server_url: str, tmp_path: Path
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def even(*, sample, **_):\n    return sample.completion_ids[0] % 2\n")
    config = make_config(
        model={"path": str(untrained_model), "device": "cpu"},
        server={"url": server_url, "transport": "auto"},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6},
        reward={"function": f"{rewards}:even"},
        optimizer={"lr": 1e-3},
        train={"output": str(tmp_path / "run"), "steps": 2},
        evaluation={"prompts": 4, "max_tokens": 4},
    )
    out = io.StringIO()
    train(config, console=Console(file=out, soft_wrap=True, highlight=False))
    assert "weights go by ipc" in out.getvalue()
    assert [m["staleness"] for m in read_records(tmp_path / "run" / "metrics.jsonl")] == [0, 0]

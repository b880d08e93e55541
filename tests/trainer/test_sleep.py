"""A server that sleeps while the trainer steps; the server is whole but for the engine."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.client import RolloutClient
from shared.errors import EngineFailure, ServerUnreachable
from shared.protocol import PauseMode
from shared.tokens import tokenizer_fingerprint
from tests.rollout_server.support import eventually
from tests.trainer.fake_servers import FakeServer, WordyEngine, fake_servers
from trainer import publish
from trainer.config import Config
from trainer.config_file import load_config
from trainer.errors import ConfigError
from trainer.published import Published
from trainer.server import Server
from trainer.servers import ServerPool
from trainer.train import train


@dataclass
class SleepyEngine(WordyEngine):
    """Has sleep among vLLM's controls; the others are not used here.

    Attributes:
        torn: its weights were dropped, and none were loaded since.
    """

    hands_memory_back: bool = True
    torn: bool = False

    async def sleep(self, level: int, mode: PauseMode) -> None:
        self.calls.append(f"sleep {level} {mode.value}")
        self.paused, self.torn = True, level == 2

    async def wake_up(self, tags: Sequence[str]) -> bool:
        self.calls.append(f"wake {' '.join(tags)}")
        self.paused = tags == ["weights"]
        assert self.paused or not self.torn, "it would generate from memory without weights"
        return not self.paused

    async def load(self, paths: Sequence[Path]) -> None:
        await super().load(paths)
        self.torn = False

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("not asked for")

    world_size = describe = reset_prefix_cache = init_transfer = _unused
    begin_receiving = receive = end_receiving = abandon_receiving = _unused


@pytest.fixture(scope="module")
def fingerprint(untrained_model: Path) -> str:
    return tokenizer_fingerprint(AutoTokenizer.from_pretrained(untrained_model))


@pytest.fixture
def server(untrained_model: Path, tmp_path: Path) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path, 1, SleepyEngine) as [server]:
        yield server


@pytest.fixture
def model(untrained_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(untrained_model)


@pytest.fixture
def pool_of(server: FakeServer, model: Any, fingerprint: str) -> Any:
    def build(level: int) -> contextlib.AbstractContextManager[ServerPool]:
        url = server.url
        return ServerPool(
            [Server(url, RolloutClient(url, timeout=60), RolloutClient(url))],
            lambda client, fence: publish.publish(client, model, torch.bfloat16, fence=fence),
            Published(),
            holder="run",
            fingerprint=fingerprint,
            patience=30.0,
            sleep_level=level,
        )

    return build


def is_ready(server: FakeServer) -> bool:
    with RolloutClient(server.url) as client, contextlib.suppress(Exception):
        client.wait_ready(0.0)
        return True
    return False


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_until_new_weights_are_in(
    server: FakeServer, pool_of: Any, model: Any, level: int
) -> None:
    with pool_of(level) as pool:
        pool.publish(0)
        first = pool.latest
        pool.sleep()
        assert not is_ready(server)
        with torch.no_grad():
            model.model.norm.weight.add_(0.125)
        pool.publish(1)
        order = [f"sleep {level} drain", "wake weights", "load", "wake kv_cache"]
        assert [call for call in server.engine.calls if call in order][-4:] == order
        assert pool.latest.version == first.version + 1
        assert pool.rollout([[5]], group_size=2).samples[0].spans[0].version == pool.latest.version


@pytest.mark.parametrize("level", [1, 2])
def test_a_step_that_changes_nothing_wakes_it_too(
    server: FakeServer, pool_of: Any, level: int
) -> None:
    with pool_of(level) as pool:
        pool.publish(0)
        pool.sleep()
        pool.keep(1)
        assert server.engine.calls.count("load") == level  # level 2 has its weights restored
        assert pool.rollout([[5]], group_size=2).samples
        assert pool.troubles() is None


def test_it_does_not_sleep_unless_it_is_to(server: FakeServer, pool_of: Any) -> None:
    with pool_of(0) as pool:
        pool.publish(0)
        pool.sleep()
        pool.publish(1)
        assert not [call for call in server.engine.calls if call.startswith(("sleep", "wake"))]


def test_a_publish_that_fails_meets_the_last_good_weights(
    server: FakeServer, pool_of: Any, model: Any
) -> None:
    with pool_of(2) as pool:
        pool.publish(0)
        pool.sleep()
        server.engine.load_errors.append(EngineFailure("torn"))
        with torch.no_grad():
            model.model.norm.weight.add_(0.125)
        pool.publish(1)  # it is set aside, wakes up as it was, and is sent the new ones again
        assert pool.troubles() is None
        old, torn, *back, new = server.engine.loaded
        assert torn == new != old
        assert set(back) == {old}
        assert pool.rollout([[5]], group_size=2).samples


def test_a_run_that_ends_in_the_middle_leaves_it_awake(server: FakeServer, pool_of: Any) -> None:
    with pool_of(2) as pool:
        pool.publish(0)
        pool.sleep()
        assert not is_ready(server)
    eventually(lambda: is_ready(server), 30)
    with RolloutClient(server.url) as client:
        assert client.rollout([[5]], group_size=1).samples
        assert client.info().version == 1


@pytest.mark.parametrize(("call", "arrives"), [("sleep", True), ("wake_up", False)])
def test_a_lost_connection_does_not_leave_it_asleep(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch, call: str, arrives: bool
) -> None:
    send = getattr(RolloutClient, call)

    def broken(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(RolloutClient, call, send)
        if arrives:
            send(*args, **options)
        raise ServerUnreachable("the connection was lost")

    with pool_of(1) as pool:
        pool.publish(0)
        monkeypatch.setattr(RolloutClient, call, broken)
        pool.sleep()
        pool.publish(1)
        assert pool.troubles() is None
        assert pool.rollout([[5]], group_size=2).samples


def test_it_sleeps_through_every_step_of_a_run(
    server: FakeServer,
    make_config: Callable[..., Config],
    untrained_model: Path,
    tmp_path: Path,
) -> None:
    reward = tmp_path / "rewards.py"
    reward.write_text("def even(*, sample, **_):\n    return sample.completion_ids[0] % 2\n")
    config = make_config(
        model={"path": str(untrained_model), "device": "cpu"},
        server={"url": server.url, "sleep": 2},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6},
        reward={"function": f"{reward}:even"},
        train={"output": str(tmp_path / "run"), "steps": 2},
        evaluation={"prompts": 4},
    )
    assert train(config, console=Console(file=io.StringIO()))
    order = ["sleep 2 drain", "wake weights", "load", "wake kv_cache"]
    assert [call for call in server.engine.calls if call in order] == ["load", *order, *order]
    with RolloutClient(server.url) as client:
        assert client.wait_ready(30).version == 3


def test_a_server_that_frees_nothing_is_refused(server: FakeServer, pool_of: Any) -> None:
    server.kill()
    server.engine_class = WordyEngine
    server.start()
    with pool_of(1) as pool, pytest.raises(ConfigError, match="hands no memory back"):
        pool.publish(0)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["train.max_staleness=1"], "cannot sample for later steps"),
        (['server.urls=["http://a:1", "http://b:1"]'], "the one server"),
    ],
)
def test_pairs_that_make_no_sense_are_refused(overrides: list[str], why: str) -> None:
    demo = Path(publish.__file__).parent / "configs" / "demo.toml"
    with pytest.raises(ConfigError) as caught:
        load_config(demo, ["server.sleep=1", *overrides])
    assert why in str(caught.value) + "".join(str(p) for p in caught.value.problems)
    config: Config = load_config(demo, ["server.sleep=2"])
    assert config.server.sleep == 2

"""The doctor finds what is wrong, says what to do, and leaves the server as it was."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from shared.client import RolloutClient
from shared.protocol import Rollout, Sample
from tests.conftest import free_port
from tests.trainer.directories import with_another_template
from tests.trainer.fake_servers import FakeServer, fake_servers
from trainer import findings
from trainer.batch import collate
from trainer.config import Config
from trainer.doctor import diagnose
from trainer.findings import FAILURE, OK, WARNING, Finding, print_finding
from trainer.learner import build_learner
from trainer.memory import estimate
from trainer.policy import load_policy
from trainer.publish import publish, tensors_digest

REWARDS = """
def spread(*, sample, **_):
    return float(sample.completion_ids[0])

def constant(**_):
    return 1.0

def broken(**_):
    raise RuntimeError("no verdict")
"""


@pytest.fixture(scope="module")
def fake(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 1) as servers:
        yield servers[0]


@pytest.fixture
def config_of(
    make_config: Callable[..., Config], untrained_model: Path, fake: FakeServer, tmp_path: Path
) -> Callable[..., Config]:
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")

    def build(reward: str = "spread", **sections: Any) -> Config:
        known: dict[str, dict[str, Any]] = {
            "model": {"path": str(untrained_model), "device": "cpu"},
            "server": {"url": fake.url, "ready_timeout": 1.0},
            "rollout": {"max_tokens": 8, "group_size": 4, "prompts_per_step": 4},
            "reward": {"function": f"{tmp_path / 'rewards.py'}:{reward}"},
            "train": {"micro_batch_tokens": 512},
        }
        for name, section in sections.items():
            known[name] = known.get(name, {}) | section
        return make_config(**known)

    return build


def found_by(config: Config) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(config)}


def test_all_is_well_with_a_real_server(
    make_config: Callable[..., Config], server_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    config = make_config(
        model={"path": str(tiny_model), "device": "cpu"},
        server={"url": server_url},
        rollout={"max_tokens": 64, "group_size": 4},
        reward={"function": f"{tmp_path / 'rewards.py'}:spread"},
        train={"micro_batch_tokens": 512},
    )
    with RolloutClient(server_url) as client:
        with client.lease() as lease:
            own = client.reset(fence=lease.fence)
        found = found_by(config)
        after = client.info()
        assert client.policy()["lease"] is None
    # The same weights were there already, so nothing has to be given back.
    assert list(found) == [
        "model", "layers", "server", "tokenizer", "reload", "records", "log-probabilities",
        "ratio at step 0", "packing", "reward", "variance", "truncation", "memory",
    ]  # fmt: skip
    for name in set(found) - {"truncation"}:  # a barely trained policy rambles
        assert found[name].verdict == OK, found[name]
    assert "on both sides" in found["reload"].found
    assert after.digest == own.digest
    assert after.version == own.version + 1


def test_a_server_that_is_not_there(config_of: Callable[..., Config]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    found = found_by(config_of(server={"url": url, "ready_timeout": 0.1}))
    assert list(found) == ["model", "layers", "server", "memory"]
    assert found["layers"].found == "the decoder's are not fused: the model is on cpu, not on a GPU"
    assert found["server"].verdict == FAILURE
    assert url in found["server"].found
    assert "Start it" in found["server"].advice


def test_another_tokenizer(
    config_of: Callable[..., Config], untrained_model: Path, fake: FakeServer, tmp_path: Path
) -> None:
    copy = with_another_template(untrained_model, tmp_path / "copy")
    with RolloutClient(fake.url) as client:
        before = client.info()
        found = found_by(config_of(model={"path": str(copy)}))
        assert client.info() == before
    assert list(found) == ["model", "layers", "server", "tokenizer", "memory"]
    assert found["tokenizer"].verdict == FAILURE


def test_a_server_that_cannot_sleep(config_of: Callable[..., Config]) -> None:
    found = found_by(config_of(server={"sleep": 1}))
    assert found["sleep"].verdict == FAILURE
    assert "--sleep-mode" in found["sleep"].advice
    assert "sleep" not in found_by(config_of())


def test_no_model_at_all(config_of: Callable[..., Config], tmp_path: Path) -> None:
    found = found_by(config_of(model={"path": str(tmp_path)}))
    assert [(f.name, f.verdict) for f in found.values()] == [("model", FAILURE)]


def test_a_sampler_with_other_log_probabilities(
    config_of: Callable[..., Config], fake: FakeServer
) -> None:
    """The fake engine says -5 for every token."""
    with RolloutClient(fake.url) as client, client.lease() as lease:
        client.reset(fence=lease.fence)
    found = found_by(config_of())
    assert found["log-probabilities"].verdict == FAILURE
    assert "nats rms" in found["log-probabilities"].found
    for name in ("reload", "records", "ratio at step 0", "packing", "reward", "variance"):
        assert found[name].verdict == OK, found[name]


@pytest.mark.parametrize(
    ("reward", "name", "says"),
    [
        ("constant", "variance", "rewards differ within 0 of 4 groups"),
        ("broken", "reward", "no verdict on 16 of 16 answers: RuntimeError: no verdict"),
        ("missing", "reward", "no function 'missing'"),
    ],
)
def test_rewards_that_teach_nothing(
    config_of: Callable[..., Config], reward: str, name: str, says: str
) -> None:
    found = found_by(config_of(reward))
    assert found[name].verdict == FAILURE
    assert says in found[name].found


def test_weights_of_somebody_else_are_left_alone(
    config_of: Callable[..., Config], fake: FakeServer, untrained_model: Path
) -> None:
    model = load_policy(str(untrained_model))
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(2.0)
    with RolloutClient(fake.url) as client:
        with client.lease() as lease:
            theirs = publish(client, model, torch.bfloat16, fence=lease.fence)
        assert theirs.digest == tensors_digest(model, torch.bfloat16, torch.bfloat16)
        found = found_by(config_of())
        info = client.info()
        with client.lease() as lease:
            client.reset(fence=lease.fence)
    assert (info.version, info.digest) == (theirs.version, theirs.digest)
    assert found["reload"].verdict == WARNING
    assert "log-probabilities" not in found
    assert found["variance"].verdict == OK


def test_the_server_gets_its_own_back_after_a_failure_too(
    config_of: Callable[..., Config], fake: FakeServer
) -> None:
    with RolloutClient(fake.url) as client:
        with client.lease() as lease:
            own = client.reset(fence=lease.fence)
        found = found_by(config_of(rollout={"max_tokens": 10**6}))
        after = client.info()
    assert found["rollout"].verdict == FAILURE
    assert (after.version, after.digest) == (own.version + 1, own.digest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_digests_agree_whatever_is_sent(
    config_of: Callable[..., Config], fake: FakeServer, dtype: str
) -> None:
    with RolloutClient(fake.url) as client:
        before = client.info().digest
        found = found_by(config_of(server={"publish_dtype": dtype}))
        assert found["reload"].verdict == OK, found["reload"]
        assert client.info().digest == before


def test_weights_that_the_server_refuses(config_of: Callable[..., Config]) -> None:
    found = found_by(config_of(server={"publish_dtype": "float16"}))
    assert found["reload"].verdict == FAILURE
    assert "allowed: BF16 or F32" in found["reload"].found


def test_a_run_that_holds_the_server(config_of: Callable[..., Config], fake: FakeServer) -> None:
    with RolloutClient(fake.url) as client, client.lease(holder="the other run"):
        found = found_by(config_of())
    assert found["reload"].verdict == FAILURE
    assert "the other run" in found["reload"].found


def test_a_model_that_draws_at_random(
    config_of: Callable[..., Config], make_sample: Callable[..., Sample]
) -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.01 * torch.randn_like(x)

    config = config_of()
    learner = build_learner(config, None)
    batch = collate([make_sample(completion=(5, 6, 7))], learner.pad_id)
    first = findings.completion_logprobs(config, learner, batch)
    assert findings.find_randomness(config, learner, batch, first).verdict == OK
    decoder: Any = learner.model.get_decoder()
    decoder.norm = nn.Sequential(decoder.norm, Noise())
    first = findings.completion_logprobs(config, learner, batch)
    assert findings.find_randomness(config, learner, batch, first).verdict == FAILURE


@pytest.mark.parametrize(("cut", "verdict"), [(1, OK), (3, WARNING), (9, FAILURE)])
def test_truncation(
    make_rollout: Callable[..., Rollout],
    make_sample: Callable[..., Sample],
    cut: int,
    verdict: str,
) -> None:
    reasons = ["length"] * cut + ["stop"] * (10 - cut)
    rollout = make_rollout([[make_sample(finish_reason=reason) for reason in reasons]])
    assert findings.find_truncation(rollout).verdict == verdict


def test_memory_with_rewards_that_are_normalised_apart(
    make_config: Callable[..., Config], untrained_model: Path
) -> None:
    """What the loss is can only be said together with the rewards."""
    config = make_config(
        model={"path": str(untrained_model)},
        reward={"functions": [{"function": "exact"}, {"function": "numeric"}]},
        objective={"normalise": "each"},
    )
    model = load_policy(config.model.path)
    assert estimate(model, config).total == estimate(model, make_config()).total


def test_memory_grows_with_what_is_asked(config_of: Callable[..., Config]) -> None:
    config = config_of()
    model = load_policy(config.model.path)
    parameters = sum(p.numel() for p in model.parameters())
    small = estimate(model, config)
    assert small.weights == 4 * parameters
    assert small.optimizer == 12 * parameters
    more = estimate(model, config_of(train={"micro_batch_tokens": 1024}))
    assert more.activations == 2 * small.activations
    shares = [
        estimate(model, config_of(model={"activation_checkpointing": share})).activations
        for share in (0, 0.25, 0.5, True)
    ]
    assert shares[0] == small.activations
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[1] < shares[0]
    reference = estimate(model, config_of(objective={"beta": 0.1}))
    assert reference.weights == 2 * small.weights


def test_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False)
    print_finding(console, Finding("a", OK, "fine", "unseen"))
    print_finding(console, Finding("b", FAILURE, "[red]", "fix it"))
    assert out.getvalue() == ("ok      a: fine\nfailure b: [red]\n        what to do: fix it\n")

"""LoRA policies in a real engine: immutable adapters beside the base weights, many at once.

The reference is transformers on merged weights, W + (alpha / r) B A, computed here by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from rollout_server.engine import Completion, EngineDied
from rollout_server.settings import ServerSettings
from rollout_server.spool import Spool
from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import (
    Conflict,
    Forbidden,
    InsufficientStorage,
    InvalidRequest,
    NotFound,
    TitoError,
)
from shared.protocol import DIGEST_HEADER, DIGEST_TRAILER, SAFETENSORS, ReloadResult, Rollout
from shared.requests import SamplingSettings
from shared.weights import TRAILER_BYTES, stream_checkpoint
from tests.rollout_server.engines import (
    PATIENCE_S,
    Running,
    WatchedEngine,
    assert_made_by,
    assert_tiles,
    committed,
    greedy,
    in_flight,
    running,
    staged_folders,
)
from tests.rollout_server.support import (
    FakeEngine,
    Tensors,
    Weights,
    counter,
    eventually,
    lazy,
    post,
)

MAX_RANK = 8
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 4
PREFIX = "base_model.model."
MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
QUERY_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
QUERY_B = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight"
LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


@dataclass(frozen=True, eq=False)
class Lora:
    """An adapter as PEFT would save it."""

    tensors: Tensors
    config: dict[str, Any]

    def onto(self, base: Weights) -> Weights:
        """What the adapted model computes with."""
        merged = dict(base.tensors)
        scale = self.config["lora_alpha"] / self.config["r"]
        for name, a in self.tensors.items():
            if name.endswith(".lora_A.weight"):
                b = self.tensors[name.replace("lora_A", "lora_B")]
                weight = name.removeprefix(PREFIX).replace(".lora_A", "")
                merged[weight] = merged[weight].float() + scale * (b.float() @ a.float())
        return Weights(base.model_dir, merged)

    def with_tensors(self, **changes: torch.Tensor | None) -> Lora:
        """Some tensors replaced, or left out where None."""
        tensors: dict[str, Any] = {**self.tensors, **changes}
        return replace(self, tensors={k: v for k, v in tensors.items() if v is not None})

    def with_config(self, **changes: Any) -> Lora:
        return replace(self, config={**self.config, **changes})

    def without(self, key: str) -> Lora:
        return replace(self, config={k: v for k, v in self.config.items() if k != key})


def lora(
    base: Weights,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8,
    modules: tuple[str, ...] = MODULES,
    dtype: torch.dtype = torch.bfloat16,
) -> Lora:
    """A random adapter, so that two of them surely disagree.

    Larger B would amplify bfloat16's rounding to tenths of a nat in single tokens, mixed or alone.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in base.tensors.items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            rows, columns = weight.shape
            for half, shape, size in (("A", (rank, columns), 0.3), ("B", (rows, rank), 0.03)):
                values = size * torch.randn(shape, generator=generator)
                tensors[f"{PREFIX}{module}.lora_{half}.weight"] = values.to(dtype)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [module.rpartition(".")[2] for module in modules],
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    return Lora(tensors, config)


def saved(folder: Path, adapter: Lora) -> Path:
    """PEFT's directory of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(adapter.tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config))
    return folder


def publish(client: RolloutClient, policy: str, adapter: Lora) -> ReloadResult:
    """Stream an adapter."""
    return client.reload(lazy(adapter.tensors), adapter_config=adapter.config, policy=policy)


@dataclass(frozen=True)
class LoraServer(Running):
    """A server with a real engine that takes two adapters at once."""

    staging: Path = field(default_factory=Path)
    reload_dir: Path = field(default_factory=Path)
    engine: WatchedEngine | None = None

    @property
    def policies(self) -> list[dict[str, Any]]:
        """As ``GET /policies`` has them."""
        answer = httpx.get(f"{self.url}/policies", timeout=PATIENCE_S).json()
        found: list[dict[str, Any]] = answer["policies"]
        return found

    @property
    def listed(self) -> set[str]:
        """Adapters in the engine under the names of policies."""
        assert self.engine is not None
        return {name.partition(".")[0] for name in self.engine.listed()}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    folder = tmp_path_factory.mktemp("lora")
    staging, reload_dir = folder / "staging", folder / "reload"
    reload_dir.mkdir()
    settings = ServerSettings(
        model=str(tiny_model),
        max_loras=2,
        max_lora_rank=MAX_RANK,
        staging_dir=staging,
        reload_dirs=[reload_dir],
    )
    built: list[WatchedEngine] = []

    def build(settings: ServerSettings) -> WatchedEngine:
        built.append(WatchedEngine(settings))
        return built[0]

    with running(settings, build) as up:
        yield LoraServer(up.url, up.client, staging, reload_dir, built[0])


@pytest.fixture
def client(server: LoraServer) -> Iterator[RolloutClient]:
    """A client of this module's server; the adapters that a test leaves behind are deleted."""
    yield server.client
    for policy in server.policies:
        if policy["kind"] == "lora":
            eventually(lambda policy=policy: deleted(server.client, policy["name"]), 60)  # type: ignore[misc]
    for numbered in server.staging.rglob("numbered"):
        numbered.unlink()  # so that each test begins at version 1


def deleted(client: RolloutClient, name: str) -> bool:
    """Whether a policy could be deleted; not while groups are sampled from it."""
    with contextlib.suppress(Conflict):
        client.delete_policy(name)
        return True
    return False


@pytest.fixture(scope="module")
def one(base: Weights) -> Lora:
    return lora(base, 1)


@pytest.fixture(scope="module")
def two(base: Weights) -> Lora:
    return lora(base, 2, rank=2, alpha=6)


def assert_made_of(rollout: Rollout, weights: Weights) -> None:
    """All samples were made by these weights, whatever they are called."""
    for sample in rollout.samples:
        assert_made_by(sample, lambda _: weights)


def test_a_streamed_adapter_samples_as_the_merged_weights_do(
    client: RolloutClient, base: Weights, one: Lora
) -> None:
    before = client.info()
    result = publish(client, "one", one)
    assert result.version == 1
    assert {"upload", "verify", "load"} <= result.timings.keys()
    merged = one.onto(base)
    assert greedy(client, PROMPT, policy="one") == merged.greedy(PROMPT, 10)
    assert greedy(client, PROMPT) == base.greedy(PROMPT, 10) != merged.greedy(PROMPT, 10)
    rollout = client.rollout(
        [PROMPT, [9, 8]], group_size=2, max_tokens=60, ignore_eos=True, policy="one"
    )
    assert rollout.policy == "one"
    for sample in rollout.samples:
        assert (sample.version, sample.digest) == (1, result.digest)
        assert_tiles(sample)
        assert_made_by(sample, lambda _: merged)
        with pytest.raises(AssertionError, match="off by"):
            assert_made_by(sample, lambda _: base)
    assert client.info() == before, "the model itself is as it was"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "modules", [("self_attn.q_proj", "mlp.down_proj"), ("mlp.up_proj",), MODULES]
)
def test_adapters_of_some_modules_and_other_dtypes(
    client: RolloutClient, base: Weights, modules: tuple[str, ...], dtype: torch.dtype
) -> None:
    adapter = lora(base, 3, rank=MAX_RANK, alpha=12, modules=modules, dtype=dtype)
    publish(client, "some", adapter)
    sample = client.rollout(
        [PROMPT], group_size=1, max_tokens=60, ignore_eos=True, policy="some"
    ).samples[0]
    assert_made_by(sample, lambda _: adapter.onto(base))


def test_rank_stabilized_scaling(client: RolloutClient, base: Weights, one: Lora) -> None:
    publish(client, "stable", one.with_config(use_rslora=True, lora_alpha=4))
    sample = client.rollout(
        [PROMPT], group_size=1, max_tokens=60, ignore_eos=True, policy="stable"
    ).samples[0]
    # alpha / sqrt(r) is twice alpha / r here.
    assert_made_by(sample, lambda _: one.with_config(lora_alpha=8).onto(base))


def test_a_directory(
    client: RolloutClient, server: LoraServer, base: Weights, one: Lora, two: Lora
) -> None:
    folder = saved(server.reload_dir / "one", one)
    streamed = publish(client, "streamed", one)
    result = client.reload_path(folder, policy="from-path")
    assert result.version == 1
    assert result.digest == streamed.digest
    # It was copied: its owner may do with it what he likes.
    saved(folder, two)
    assert greedy(client, PROMPT, policy="from-path") == one.onto(base).greedy(PROMPT, 10)


def test_a_directory_with_a_digest(client: RolloutClient, server: LoraServer, one: Lora) -> None:
    folder = saved(server.reload_dir / "digest", one)
    *_, trailer = stream_checkpoint(lazy(one.tensors))
    digest = bytes(trailer).decode()
    with pytest.raises(TitoError, match="as announced"):
        client.reload_path(folder, digest="0" * 32, policy="digest")
    assert client.reload_path(folder, digest=digest, policy="digest").version == 1


def test_a_digest_covers_tensors_configuration_and_base(
    client: RolloutClient, one: Lora, two: Lora
) -> None:
    results = [
        publish(client, "d", adapter) for adapter in (one, one.with_config(lora_alpha=9), two, one)
    ]
    assert [result.version for result in results] == [1, 2, 3, 4]
    assert results[0].digest == results[3].digest
    assert len({result.digest for result in results}) == 3
    assert client.info().digest not in {result.digest for result in results}


def test_two_policies_and_the_base_in_one_batch(
    client: RolloutClient, server: LoraServer, base: Weights, one: Lora, two: Lora
) -> None:
    assert server.engine is not None
    made = {
        publish(client, "one", one).digest: one.onto(base),
        publish(client, "two", two).digest: two.onto(base),
        client.info().digest: base,
    }
    server.engine.together.clear()

    def roll(policy: str) -> Rollout:
        prompts = [[5, 6, 7], PROMPT, [200, 7]]  # the same ones, so that a shared cache would show
        with RolloutClient(server.url, timeout=PATIENCE_S) as own:
            return own.rollout(prompts, group_size=2, policy=policy, **LONG)

    with ThreadPoolExecutor() as pool:
        rollouts = dict(zip(names := ["one", "two", "default"], pool.map(roll, names), strict=True))
    assert max(map(len, server.engine.together)) == 3, "they did not run side by side"
    for policy, rollout in rollouts.items():
        assert rollout.policy == policy
        for sample in rollout.samples:
            assert sample.digest == client.policy(policy)["digest"]
            assert len(sample.spans) == 1
            assert_made_by(sample, made.__getitem__)
            for digest in set(made) - {sample.digest}:
                with pytest.raises(AssertionError, match="off by"):
                    assert_made_by(sample, dict.fromkeys(made, made[digest]).__getitem__)


def test_more_policies_than_slots_take_turns(
    client: RolloutClient, server: LoraServer, base: Weights
) -> None:
    adapters = {f"p{seed}": lora(base, seed, rank=2) for seed in range(6)}
    for name, adapter in adapters.items():
        publish(client, name, adapter)

    def roll(name: str) -> Rollout:
        with RolloutClient(server.url, timeout=PATIENCE_S) as own:
            return own.rollout([PROMPT], group_size=2, policy=name, max_tokens=80, ignore_eos=True)

    with ThreadPoolExecutor() as pool:
        for name, rollout in zip(adapters, pool.map(roll, adapters), strict=True):
            assert_made_of(rollout, adapters[name].onto(base))


def test_a_request_in_flight_keeps_its_adapter(
    client: RolloutClient, server: LoraServer, base: Weights, one: Lora, two: Lora
) -> None:
    old = publish(client, "p", one)
    prompts = [[5, 6, 7], [9] * 20, [40, 41]]
    with in_flight(server.url, prompts, policy="p", group_size=2, **LONG) as futures:
        new = publish(client, "p", two)
        assert not all(future.done() for future in futures), "the publish came too late"
        assert committed(server.staging, "p") == ["v00000001", "v00000002"]
        late = client.rollout([[5, 6, 7]], group_size=2, max_tokens=40, policy="p")
        samples = [s for future in futures for s in future.result(PATIENCE_S).samples]
    assert len(samples) == 6
    for sample in samples:
        assert len(sample.completion_ids) == 900
        assert [(s.version, s.digest) for s in sample.spans] == [(old.version, old.digest)]
        assert_tiles(sample)
        assert_made_by(sample, lambda _: one.onto(base))
    for sample in late.samples:
        assert (sample.version, sample.digest) == (new.version, new.digest) == (2, new.digest)
        assert_made_by(sample, lambda _: two.onto(base))


def test_a_replaced_version_is_released_once_unused(
    client: RolloutClient, server: LoraServer, one: Lora, two: Lora
) -> None:
    publish(client, "p", one)
    with in_flight(server.url, [[5, 6, 7]], policy="p", group_size=4, **LONG) as futures:
        publish(client, "p", two)
        assert not futures[0].done(), "the publish came too late"
        client.rollout([[5]], group_size=1, max_tokens=2, policy="p")
        assert {"p@1", "p@2"} <= server.listed
        assert committed(server.staging, "p") == ["v00000001", "v00000002"]
        futures[0].result(PATIENCE_S)
    eventually(lambda: committed(server.staging, "p") == ["v00000002"], 60)
    eventually(lambda: server.listed & {"p@1", "p@2"} == {"p@2"}, 60)


def test_a_replaced_version_that_nobody_uses_is_released_at_once(
    client: RolloutClient, server: LoraServer, one: Lora, two: Lora
) -> None:
    publish(client, "p", one)
    client.rollout([[5]], group_size=1, max_tokens=2, policy="p")
    publish(client, "p", two)
    eventually(lambda: committed(server.staging, "p") == ["v00000002"], 60)
    eventually(lambda: "p@1" not in server.listed, 60)


def test_the_engine_keeps_no_second_copy_of_an_adapter(
    client: RolloutClient, server: LoraServer, one: Lora
) -> None:
    # Few fit into the engine's memory; a copy that nobody asks for would drive out another policy.
    assert server.engine is not None
    for _ in range(3):
        publish(client, "p", one)
        client.rollout([[5]], group_size=1, max_tokens=2, policy="p")
    eventually(lambda: server.listed == {"p@3"}, 10)


def test_staleness_is_counted_for_each_policy(client: RolloutClient, one: Lora, two: Lora) -> None:
    publish(client, "p", one)
    publish(client, "p", two)
    ask: dict[str, Any] = {"group_size": 1, "max_tokens": 2, "policy": "p"}
    assert client.rollout([[5]], version=2, **ask).samples[0].version == 2
    assert client.rollout([[5]], min_version=2, **ask).samples[0].version == 2
    conditions: list[dict[str, Any]] = [{"version": 1}, {"min_version": 3}]
    for condition in conditions:
        with pytest.raises(TitoError) as caught:
            client.rollout([[5]], **condition, **ask)
        assert caught.value.status == 412
        assert caught.value.details["version"] == 2


# Whatever is wrong with an adapter.

Spoil = Callable[[Lora], Lora]
HUGE = torch.finfo(torch.float32).max

BAD_CONFIGS: dict[str, Spoil] = {
    "another kind": lambda x: x.with_config(peft_type="IA3"),
    "no kind": lambda x: x.without("peft_type"),
    "no rank": lambda x: x.without("r"),
    "rank 0": lambda x: x.with_config(r=0),
    "negative rank": lambda x: x.with_config(r=-4),
    "rank in words": lambda x: x.with_config(r="4"),
    "broken rank": lambda x: x.with_config(r=4.0),
    "another rank": lambda x: x.with_config(r=5),
    "dora": lambda x: x.with_config(use_dora=True),
    "bias": lambda x: x.with_config(bias="all"),
    "bias of its own": lambda x: x.with_config(lora_bias=True),
    "whole modules": lambda x: x.with_config(modules_to_save=["lm_head"]),
    "no alpha": lambda x: x.without("lora_alpha"),
    "alpha in words": lambda x: x.with_config(lora_alpha="8"),
    "alpha that is not a number": lambda x: x.with_config(lora_alpha=math.nan),
    "endless alpha": lambda x: x.with_config(lora_alpha=math.inf),
    "alpha null": lambda x: x.with_config(lora_alpha=None),
    "no targets": lambda x: x.without("target_modules"),
    "changed base": lambda x: x.with_config(init_lora_weights="pissa"),
    "repeated layers": lambda x: x.with_config(layer_replication=[[0, 1], [0, 1]]),
    "invocation tokens": lambda x: x.with_config(alora_invocation_tokens=[5]),
    "rank by module": lambda x: x.with_config(rank_pattern={"q_proj": 2}),
}
BAD_TENSORS: dict[str, Spoil] = {
    "no tensors": lambda x: replace(x, tensors={}),
    "A of another rank": lambda x: x.with_tensors(**{QUERY_A: torch.zeros(3, 128)}),
    "B of another rank": lambda x: x.with_tensors(**{QUERY_B: torch.zeros(128, 5)}),
    "A transposed": lambda x: x.with_tensors(**{QUERY_A: x.tensors[QUERY_A].T.contiguous()}),
    "A flat": lambda x: x.with_tensors(**{QUERY_A: torch.zeros(512)}),
    "B for another matrix": lambda x: x.with_tensors(**{QUERY_B: torch.zeros(64, 4)}),
    "NaN": lambda x: x.with_tensors(**{QUERY_A: torch.full((4, 128), torch.nan)}),
    "infinity": lambda x: x.with_tensors(**{QUERY_B: torch.full((128, 4), -torch.inf)}),
    "infinite once rounded": lambda x: x.with_tensors(**{QUERY_A: torch.full((4, 128), HUGE)}),
    "no A": lambda x: x.with_tensors(**{QUERY_A: None}),
    "no B": lambda x: x.with_tensors(**{QUERY_B: None}),
    "integers": lambda x: x.with_tensors(**{QUERY_A: torch.zeros(4, 128, dtype=torch.int64)}),
    "an unknown module": lambda x: pair(x, "model.layers.0.self_attn.x_proj", 128, 128),
    "an unknown layer": lambda x: pair(x, "model.layers.7.self_attn.q_proj", 128, 128),
    "a norm": lambda x: pair(x, "model.norm", 128, 128),
    "the head": lambda x: pair(x, "lm_head", 288, 128),
    "the embedding": lambda x: pair(x, "model.embed_tokens", 288, 128),
    "a third half": lambda x: x.with_tensors(
        **{QUERY_A.replace("lora_A", "lora_C"): torch.zeros(4, 128)}
    ),
    "another beginning": lambda x: x.with_tensors(
        **{f"model.{QUERY_A}": x.tensors[QUERY_A], f"model.{QUERY_B}": x.tensors[QUERY_B]}
    ),
}


def pair(adapter: Lora, module: str, rows: int, columns: int) -> Lora:
    """The adapter with a module more."""
    halves = {
        f"{PREFIX}{module}.lora_A.weight": torch.zeros(4, columns),
        f"{PREFIX}{module}.lora_B.weight": torch.zeros(rows, 4),
    }
    return adapter.with_tensors(**halves)


@dataclass(frozen=True)
class Standing:
    """What a refused publish must leave as it is: a live policy, and nothing else."""

    client: RolloutClient
    server: LoraServer


@pytest.fixture
def standing(
    client: RolloutClient, server: LoraServer, base: Weights, one: Lora
) -> Iterator[Standing]:
    publish(client, "p", one)
    before, expected = server.policies, one.onto(base).greedy(PROMPT, 10)
    assert greedy(client, PROMPT, policy="p") == expected
    yield Standing(client, server)
    assert server.policies == before
    assert committed(server.staging, "*") == ["v00000001"]
    assert staged_folders(server.staging) == []
    assert greedy(client, PROMPT, policy="p") == expected
    assert greedy(client, PROMPT) == base.greedy(PROMPT, 10)


def stream_of(adapter: Lora, config: str | None = None) -> bytes:
    """The body of a publish, digest included."""
    metadata = {"adapter_config": json.dumps(adapter.config) if config is None else config}
    return b"".join(bytes(piece) for piece in stream_checkpoint(lazy(adapter.tensors), metadata))


def send(url: str, raw: Any, policy: str = "p", digest: str | None = DIGEST_TRAILER) -> Any:
    return post(
        url,
        raw=raw,
        path=f"/reload?policy={policy}",
        content_type=SAFETENSORS,
        headers={} if digest is None else {DIGEST_HEADER: digest},
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("policy", ["p", "another"])
@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_a_configuration_that_cannot_be_served(
    standing: Standing, one: Lora, what: str, policy: str
) -> None:
    adapter = BAD_CONFIGS[what](one)
    response = send(standing.server.url, stream_of(adapter), policy)
    assert response.status_code == 422, response.text
    history = standing.client.policy("p")["history"]
    assert history[0]["state"] == ("rejected" if policy == "p" else "live")


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_tensors_that_do_not_fit(standing: Standing, one: Lora, what: str) -> None:
    adapter = BAD_TENSORS[what](one)
    response = send(standing.server.url, stream_of(adapter))
    assert response.status_code == 422, response.text
    assert response.json()["error"]["code"] == "weights_rejected"


def test_a_rank_above_the_servers(standing: Standing, base: Weights) -> None:
    response = send(standing.server.url, stream_of(lora(base, 3, rank=MAX_RANK + 1)))
    assert response.status_code == 422
    (problem,) = response.json()["error"]["problems"]
    assert problem["where"] == "r"
    assert str(MAX_RANK) in problem["allowed"]


@pytest.mark.parametrize("config", ["", "{", "[]", "null", '"LORA"', "\ufffd", "1e999"])
def test_a_configuration_that_is_none(standing: Standing, one: Lora, config: str) -> None:
    response = send(standing.server.url, stream_of(one, config))
    assert response.status_code == 400, response.text


def test_a_stream_without_configuration(standing: Standing, one: Lora) -> None:
    raw = b"".join(bytes(piece) for piece in stream_checkpoint(lazy(one.tensors)))
    assert send(standing.server.url, raw).status_code == 400


def test_a_stream_with_metadata_of_another_kind(standing: Standing, one: Lora) -> None:
    raw = stream_of(one)
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    odd: list[Any] = [[], "x", 5, {"adapter_config": one.config}, {"adapter_config": 5}, None]
    for metadata in odd:
        changed = json.dumps({**header, "__metadata__": metadata}).encode()
        body = len(changed).to_bytes(8, "little") + changed + raw[8 + length :]
        assert send(standing.server.url, body).status_code == 400, metadata


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1000, -33, -32, -1])
def test_a_truncated_stream(standing: Standing, one: Lora, length: int) -> None:
    assert send(standing.server.url, stream_of(one)[:length]).status_code in (400, 422)


def test_garbage(standing: Standing) -> None:
    broken = (2).to_bytes(8, "little")
    for raw in (b"\xff" * 1000, b"\0" * 1000, broken + b"[]", broken + b"{x", broken + b"{}"):
        for trailer in (b"", b"0" * TRAILER_BYTES):
            response = send(standing.server.url, raw + trailer)
            assert response.status_code in (400, 422), (raw[:20], response.text)


def test_a_flipped_bit(standing: Standing, one: Lora) -> None:
    raw = bytearray(stream_of(one))
    raw[-100] ^= 1
    assert send(standing.server.url, bytes(raw)).status_code == 422


def test_a_full_checkpoint_under_the_name_of_an_adapter(standing: Standing, base: Weights) -> None:
    with pytest.raises(TitoError) as caught:
        standing.client.reload(lazy(base.tensors), policy="p")
    assert caught.value.status in (400, 422)


def test_an_adapter_under_the_name_of_the_model(standing: Standing, one: Lora) -> None:
    with pytest.raises(TitoError) as caught:
        publish(standing.client, "default", one)
    assert caught.value.status == 422


class TestPaths:
    """Directories that hold no adapter, or one that the server must not read."""

    def refused(self, standing: Standing, folder: Path) -> TitoError:
        with pytest.raises(TitoError) as caught:
            standing.client.reload_path(folder, policy="p")
        return caught.value

    def test_no_configuration(self, standing: Standing, one: Lora) -> None:
        folder = saved(standing.server.reload_dir / "bare", one)
        (folder / "adapter_config.json").unlink()
        assert 400 <= self.refused(standing, folder).status < 500

    def test_no_weights(self, standing: Standing, one: Lora) -> None:
        folder = saved(standing.server.reload_dir / "empty", one)
        (folder / "adapter_model.safetensors").unlink()
        assert isinstance(self.refused(standing, folder), InvalidRequest)

    def test_nothing_there(self, standing: Standing) -> None:
        assert isinstance(
            self.refused(standing, standing.server.reload_dir / "nothing"), InvalidRequest
        )

    def test_outside(self, standing: Standing, one: Lora, tmp_path: Path) -> None:
        assert isinstance(self.refused(standing, saved(tmp_path / "x", one)), Forbidden)

    @pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
    def test_a_link_that_leads_out(
        self, standing: Standing, one: Lora, tmp_path: Path, name: str
    ) -> None:
        outside = saved(tmp_path / "outside", one) / name
        folder = saved(standing.server.reload_dir / f"trap-{name}", one)
        (folder / name).unlink()
        (folder / name).symlink_to(outside)
        assert isinstance(self.refused(standing, folder), Forbidden)

    def test_a_configuration_that_is_a_directory(self, standing: Standing, one: Lora) -> None:
        folder = saved(standing.server.reload_dir / "odd", one)
        (folder / "adapter_config.json").unlink()
        (folder / "adapter_config.json").mkdir(exist_ok=True)
        assert 400 <= self.refused(standing, folder).status < 500

    def test_a_file_instead_of_a_directory(self, standing: Standing, one: Lora) -> None:
        folder = saved(standing.server.reload_dir / "file", one)
        refused = self.refused(standing, folder / "adapter_model.safetensors")
        assert 400 <= refused.status < 500


# Names, deletion, and the weights below.


@pytest.mark.parametrize(
    "name",
    ["", "..", "../up", "a/b", "a.b", "-a", "_a", "a b", "ä", "a\n", "a\0", "x" * 65, "v*", "%61"],
)
def test_a_name_with_odd_characters(standing: Standing, two: Lora, name: str) -> None:
    with pytest.raises(InvalidRequest):
        publish(standing.client, name, two)
    for call in (standing.client.delete_policy, standing.client.policy):
        with pytest.raises(TitoError) as caught:
            call(name)
        assert 400 <= caught.value.status < 500 or name in ("", "..")


@pytest.mark.parametrize("name", ["A", "a-b_C9", "9", "x" * 64, "check", "staging", "DEFAULT"])
def test_a_name_of_plain_characters(
    client: RolloutClient, base: Weights, one: Lora, name: str
) -> None:
    publish(client, name, one)
    assert greedy(client, PROMPT, policy=name) == one.onto(base).greedy(PROMPT, 10)
    assert client.policy(name)["kind"] == "lora"


def test_full_weights_are_not_published_below_an_adapter(
    standing: Standing, first: Weights, base: Weights
) -> None:
    client = standing.client
    known = DeltaBase()
    for _ in stream_checkpoint(known.record(lazy(base.tensors))):
        pass
    known.commit()
    folder = standing.server.reload_dir / "full"
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(first.tensors, folder / "model.safetensors")
    attempts: list[Callable[[], Any]] = [
        lambda: client.reload(lazy(first.tensors)),
        lambda: client.reload(lazy(first.tensors), base=known),
        lambda: client.reload_path(folder),
        client.reset,
    ]
    for attempt in attempts:
        with pytest.raises(Conflict, match="p belong"):
            attempt()


def test_full_weights_after_the_last_adapter_is_gone(
    client: RolloutClient, base: Weights, first: Weights, one: Lora
) -> None:
    on_base = publish(client, "p", one)
    client.delete_policy("p")
    try:
        full = client.reload(lazy(first.tensors))
        assert greedy(client, PROMPT) == first.greedy(PROMPT, 10)
        on_first = publish(client, "p", one)
        assert on_first.digest != on_base.digest, "it belongs to other weights now"
        rollout = client.rollout([PROMPT], group_size=2, max_tokens=60, ignore_eos=True, policy="p")
        for sample in rollout.samples:
            assert_made_by(sample, lambda _: one.onto(first))
        assert client.info().version == full.version
        client.delete_policy("p")
    finally:
        client.reset()
    assert greedy(client, PROMPT) == base.greedy(PROMPT, 10)


def test_deletion(client: RolloutClient, server: LoraServer, one: Lora) -> None:
    publish(client, "p", one)
    client.rollout([[5]], group_size=1, max_tokens=2, policy="p")
    client.delete_policy("p")
    for call in (
        lambda: client.policy("p"),
        lambda: client.delete_policy("p"),
        lambda: client.rollout([[5]], group_size=1, max_tokens=2, policy="p"),
    ):
        with pytest.raises(NotFound, match="'p'"):
            call()
    assert [policy["name"] for policy in server.policies] == ["default"]
    assert committed(server.staging, "p") == []
    assert "p@1" not in server.listed
    # A version names one set of weights for good, also of a policy that comes again.
    assert publish(client, "p", one).version == 2
    assert publish(client, "another", one).version == 1


def test_the_model_itself_cannot_be_deleted(client: RolloutClient) -> None:
    with pytest.raises(Conflict, match="model itself"):
        client.delete_policy("default")


def test_a_policy_in_use_is_not_deleted(
    client: RolloutClient, server: LoraServer, base: Weights, one: Lora
) -> None:
    publish(client, "p", one)
    with in_flight(server.url, [[5, 6, 7]], policy="p", group_size=2, **LONG) as futures:
        with pytest.raises(Conflict, match="in use"):
            client.delete_policy("p")
        samples = futures[0].result(PATIENCE_S).samples
    for sample in samples:
        assert_made_by(sample, lambda _: one.onto(base))
    client.delete_policy("p")


def test_a_name_that_is_used_again_means_the_new_adapter_alone(
    client: RolloutClient, base: Weights, one: Lora, two: Lora
) -> None:
    # The engine files cached keys and values under an adapter's name: it must be a new one.
    prompt = (PROMPT * 20)[:600]
    for adapter in (one, two):
        publish(client, "again", adapter)
        for _ in range(2):
            rollout = client.rollout(
                [prompt], group_size=2, max_tokens=40, ignore_eos=True, policy="again"
            )
            assert_made_of(rollout, adapter.onto(base))
        client.delete_policy("again")


def test_leases_hold_for_adapters_too(client: RolloutClient, one: Lora, two: Lora) -> None:
    with client.lease("p", holder="A") as lease:
        with pytest.raises(Conflict, match="'A'"):
            publish(client, "p", one)
        mine = client.reload(
            lazy(one.tensors), adapter_config=one.config, policy="p", fence=lease.fence
        )
        with pytest.raises(Conflict, match="'A'"):
            client.delete_policy("p")
        assert publish(client, "q", two).version == 1
    assert mine.version == 1


# Races, with an engine that waits until it is told to go on.


@contextlib.contextmanager
def fake(
    model: Path, folder: Path, **changes: Any
) -> Iterator[tuple[Running, GatedEngine, ThreadPoolExecutor]]:
    """An application, its engine, and threads for requests that wait for the engine."""
    engine = GatedEngine()
    settings = ServerSettings(
        model=str(model), max_loras=2, staging_dir=folder / "scratch", **changes
    )
    with running(settings, lambda _: engine) as server, ThreadPoolExecutor() as pool:
        try:
            yield server, engine, pool
        finally:
            for gate in (engine.gate, engine.load_gate, engine.adapter_gate):
                gate.set()


@dataclass
class GatedEngine(FakeEngine):
    """Adapters wait for a gate as well, and the engine may be found dead.

    Attributes:
        dead: calls about adapters find the engine's processes gone.
        folderless: prompts that were to be sampled from an adapter whose files are gone.
    """

    adapter_gate: threading.Event = field(default_factory=threading.Event)
    dead: bool = False
    folderless: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adapter_gate.set()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSettings, n: int, *more: Any
    ) -> list[Completion]:
        adapter = more[0] if more else None
        made = await super().generate(prompt_ids, sampling, n)
        if adapter is not None and not adapter.folder.is_dir():
            self.folderless += 1  # vLLM's engine does not survive that
        return made

    async def add_adapter(self, adapter: Any) -> None:
        if self.dead:
            raise EngineDied("the engine tripped over a cable")
        await super().add_adapter(adapter)
        while not self.adapter_gate.is_set():  # noqa: ASYNC110 - opened from another thread
            await asyncio.sleep(0.005)

    async def remove_adapter(self, adapter: Any) -> None:
        if self.dead:
            raise EngineDied("the engine tripped over a cable")
        await super().remove_adapter(adapter)


def test_an_engine_that_dies_under_a_publish(tiny_model: Path, tmp_path: Path, one: Lora) -> None:
    with fake(tiny_model, tmp_path) as (server, engine, _):
        engine.dead = True
        response = send(server.url, stream_of(one))
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert not staged_folders(tmp_path)
        assert not committed(tmp_path, "p")
        engine.dead = False
        assert publish(server.client, "p", one).version == 1


def test_an_engine_that_dies_under_a_deletion(tiny_model: Path, tmp_path: Path, one: Lora) -> None:
    with fake(tiny_model, tmp_path) as (server, engine, _):
        publish(server.client, "p", one)
        engine.dead = True
        with contextlib.suppress(TitoError):
            server.client.delete_policy("p")
        names = [
            policy["name"] for policy in httpx.get(f"{server.url}/policies").json()["policies"]
        ]
        # A policy that is gone must not come back with the next start.
        assert ("p" in names) == bool(committed(tmp_path, "p"))


def test_an_adapter_that_arrives_while_full_weights_are_loaded(
    tiny_model: Path, tmp_path: Path, first: Weights, one: Lora
) -> None:
    with fake(tiny_model, tmp_path) as (server, engine, pool):
        engine.load_gate.clear()
        full = pool.submit(server.client.reload, lazy(first.tensors))
        eventually(lambda: "load" in engine.calls)
        adapter = pool.submit(publish, server.client, "p", one)
        # Give it the time to overtake, if it wrongly can.
        with contextlib.suppress(AssertionError):
            eventually(adapter.done, 2)
        engine.load_gate.set()
        assert full.result(60).version == 1
        assert_belongs_together(server, adapter, one)


def test_full_weights_that_arrive_while_an_adapter_is_loaded(
    tiny_model: Path, tmp_path: Path, first: Weights, one: Lora
) -> None:
    with fake(tiny_model, tmp_path) as (server, engine, pool):
        engine.adapter_gate.clear()
        adapter = pool.submit(publish, server.client, "p", one)
        eventually(lambda: any(call.startswith("add") for call in engine.calls))
        full = pool.submit(server.client.reload, lazy(first.tensors))
        with contextlib.suppress(AssertionError):
            eventually(full.done, 2)
        engine.adapter_gate.set()
        assert adapter.result(60).version == 1
        with pytest.raises(Conflict, match="p belong"):
            full.result(60)


def assert_belongs_together(server: Running, adapter: Any, one: Lora) -> None:
    """The adapter was refused, or names the base on which it is served."""
    try:
        digest = adapter.result(60).digest
    except Conflict:
        return
    server.client.delete_policy("p")
    assert publish(server.client, "p", one).digest == digest, "it names weights that are gone"


def test_two_first_publishes_of_one_policy(
    tiny_model: Path, tmp_path: Path, one: Lora, two: Lora
) -> None:
    with fake(tiny_model, tmp_path) as (server, engine, pool):
        engine.adapter_gate.clear()
        both = [pool.submit(publish, server.client, "p", adapter) for adapter in (one, two)]
        eventually(lambda: any(call.startswith("add") for call in engine.calls))
        with contextlib.suppress(AssertionError):
            eventually(lambda: len(staged_folders(tmp_path)) == 0, 1)
        engine.adapter_gate.set()
        assert sorted(future.result(60).version for future in both) == [1, 2]
        # In the order in which they began, which need not be that in which they went live.
        history = server.client.policy("p")["history"]
        assert sorted(item["version"] for item in history) == [1, 2]
        eventually(lambda: committed(tmp_path, "p") == ["v00000002"])


def test_a_first_publish_that_takes_long_is_not_forgotten(
    tiny_model: Path, tmp_path: Path, one: Lora
) -> None:
    raw = stream_of(one)
    with fake(tiny_model, tmp_path) as (server, engine, pool):
        sent = threading.Event()

        def slowly() -> Iterator[bytes]:
            yield raw[:100]
            sent.wait(60)
            yield raw[100:]

        long = pool.submit(send, server.url, slowly())
        eventually(lambda: staged_folders(tmp_path))
        for _ in range(70):
            assert send(server.url, b"no adapter").status_code == 400
        assert publish(server.client, "p", one).version == 1
        sent.set()
        assert long.result(60).json()["version"] == 2
        eventually(lambda: "remove p@1.1" in engine.calls)


def test_what_waits_for_a_policy_that_is_deleted_is_never_run(
    tiny_model: Path, tmp_path: Path, one: Lora
) -> None:
    with fake(tiny_model, tmp_path, max_running_samples=1) as (server, engine, pool):
        publish(server.client, "p", one)
        engine.gate.clear()
        ask: dict[str, Any] = {"group_size": 1, "max_tokens": 2}
        first = pool.submit(server.client.rollout, [[5]], **ask)
        eventually(lambda: engine.running == 1)
        queued = pool.submit(server.client.rollout, [[6]], policy="p", **ask)
        scored = pool.submit(server.client.score, [[5]], [[6]], policy="p")
        eventually(lambda: counter(server.url, "tito_queued") > 2)
        server.client.delete_policy("p")
        engine.gate.set()
        assert len(first.result(60).samples) == 1
        for waiting in (queued, scored):
            with pytest.raises(NotFound, match="deleted"):
                waiting.result(60)
        assert engine.folderless == 0


def test_a_policy_whose_earlier_version_is_in_use_is_not_deleted(
    tiny_model: Path, tmp_path: Path, one: Lora, two: Lora
) -> None:
    with fake(tiny_model, tmp_path) as (server, engine, pool):
        publish(server.client, "p", one)
        engine.gate.clear()
        ask: dict[str, Any] = {"group_size": 1, "max_tokens": 2, "policy": "p"}
        early = pool.submit(server.client.rollout, [[5]], **ask)
        eventually(lambda: engine.running == 1)
        publish(server.client, "p", two)
        with pytest.raises(Conflict, match="in use by 1 group"):
            server.client.delete_policy("p")
        engine.gate.set()
        assert early.result(60).samples[0].version == 1
        assert engine.folderless == 0
        server.client.delete_policy("p")


def test_a_deletion_waits_for_a_publish_that_is_being_loaded(
    tiny_model: Path, tmp_path: Path, one: Lora, two: Lora
) -> None:
    with fake(tiny_model, tmp_path) as (server, engine, pool):
        publish(server.client, "p", one)
        engine.adapter_gate.clear()
        loading = pool.submit(publish, server.client, "p", two)
        eventually(lambda: any(call.startswith("add p@2") for call in engine.calls))
        deleting = pool.submit(server.client.delete_policy, "p")
        with contextlib.suppress(AssertionError):
            eventually(deleting.done, 1)  # give it the time to overtake, if it wrongly can
        engine.adapter_gate.set()
        assert loading.result(60).version == 2
        deleting.result(60)
        assert committed(tmp_path, "p") == []
        with pytest.raises(NotFound):
            server.client.policy("p")
        assert publish(server.client, "p", one).version == 3


def test_what_could_trip_the_server_is_refused(tiny_model: Path, tmp_path: Path, one: Lora) -> None:
    reload_dir = tmp_path / "reload"
    looped, crowd = (saved(reload_dir / name, one) for name in ("looped", "crowd"))
    (looped / "adapter_config.json").unlink()
    (looped / "adapter_config.json").symlink_to("adapter_config.json")
    weights = crowd / "adapter_model.safetensors"
    raw = weights.read_bytes()
    weights.unlink()
    weights.mkdir()
    for name in "ab":
        (weights / f"{name}.safetensors").write_bytes(raw)
    with fake(tiny_model, tmp_path, reload_dirs=[reload_dir]) as (server, _, _):
        assert send(server.url, stream_of(one, "[" * 200_000)).status_code == 400
        for folder in (looped, crowd):
            with pytest.raises(InvalidRequest):
                server.client.reload_path(folder, policy="p")
        assert httpx.post(f"{server.url}/policies/nobody/reset").status_code == 404
        assert staged_folders(tmp_path) == []


def test_a_commit_that_fails_leaves_no_adapter_in_the_engine(
    tiny_model: Path, tmp_path: Path, one: Lora, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fake(tiny_model, tmp_path) as (server, engine, _):
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "commit", full)
            with pytest.raises(InsufficientStorage):
                publish(server.client, "p", one)
        assert engine.calls[-2:] == ["add p@1.1", "remove p@1.1"]
        assert staged_folders(tmp_path) == []
        assert publish(server.client, "p", one).version == 1


def test_versions_that_a_crash_has_left_are_removed(
    tiny_model: Path, tmp_path: Path, one: Lora, two: Lora
) -> None:
    spool = tmp_path / "spool"
    with fake(tiny_model, tmp_path, spool_dir=spool) as (server, engine, pool):
        publish(server.client, "p", one)
        engine.gate.clear()
        used = pool.submit(server.client.rollout, [[5]], group_size=1, max_tokens=2, policy="p")
        eventually(lambda: engine.running)
        publish(server.client, "p", two)
        assert committed(spool, "p") == ["v00000001", "v00000002"]
        shutil.copytree(spool, tmp_path / "crashed")  # what there is if the server dies now
        engine.gate.set()
        used.result(60)
    spool = tmp_path / "crashed"
    with fake(tiny_model, tmp_path, spool_dir=spool) as (server, _, _):
        assert server.client.policy("p")["version"] == 2
        assert committed(spool, "p") == ["v00000002"]


def test_folders_are_removed_off_the_event_loop(
    tiny_model: Path, tmp_path: Path, one: Lora, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard, found = Spool.discard, []

    def watched(spool: Spool, folder: Path) -> None:
        with contextlib.suppress(RuntimeError):  # there is none
            found.append(asyncio.get_running_loop())
        discard(spool, folder)

    monkeypatch.setattr(Spool, "discard", watched)
    with fake(tiny_model, tmp_path) as (server, _, _):
        publish(server.client, "p", one)
        assert send(server.url, b"garbage").status_code == 400
        assert staged_folders(tmp_path) == []
    assert found == []


def test_adapters_count_as_uploads(tiny_model: Path, tmp_path: Path, one: Lora) -> None:
    with fake(tiny_model, tmp_path, max_uploads=1) as (server, engine, pool):
        engine.adapter_gate.clear()
        running_one = pool.submit(publish, server.client, "p", one)
        eventually(lambda: any(call.startswith("add") for call in engine.calls))
        second = pool.submit(send, server.url, stream_of(one), "q")
        with contextlib.suppress(AssertionError):
            eventually(second.done)
        engine.adapter_gate.set()
        assert second.result(60).status_code == 429
        assert running_one.result(60).version == 1


def test_a_server_that_takes_no_adapters(tiny_model: Path, tmp_path: Path, one: Lora) -> None:
    settings = ServerSettings(model=str(tiny_model), staging_dir=tmp_path / "staging")
    with (
        running(settings, lambda _: FakeEngine()) as server,
        pytest.raises(Conflict, match="--max-loras"),
    ):
        publish(server.client, "p", one)


def test_an_adapter_over_the_limit(tiny_model: Path, tmp_path: Path, one: Lora) -> None:
    reload_dir = tmp_path / "reload"
    folder = saved(reload_dir / "big", one)
    limit = 1e-5
    changes: dict[str, Any] = {"max_upload_gib": limit, "reload_dirs": [reload_dir]}
    with fake(tiny_model, tmp_path, **changes) as (server, _, _):
        assert send(server.url, stream_of(one)).status_code == 413
        with pytest.raises(TitoError) as caught:
            server.client.reload_path(folder, policy="p")
        assert caught.value.status == 413
        assert staged_folders(tmp_path) == []


def test_samples_leave_the_engine_whole(
    server: LoraServer, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message when the prompt is through and one at the end, not one for each token."""
    assert server.engine is not None
    processor = server.engine.llm.output_processor
    plain, lengths = processor.process_outputs, list[int]()

    def counted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.extend(len(output.new_token_ids) for output in outputs)
        return plain(outputs, *args, **kwargs)

    monkeypatch.setattr(processor, "process_outputs", counted)
    rollout = client.rollout([PROMPT], group_size=3, max_tokens=40, ignore_eos=True)
    assert [len(sample.logprobs) for sample in rollout.samples] == [40] * 3
    assert sorted(lengths) == [1] * 3 + [39] * 3

"""Deltas from the client to a real engine: exact to the bit, and in full where that cannot be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from rollout_server.settings import ServerSettings
from shared.client import AsyncRolloutClient, RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import Conflict, WeightsRejected
from shared.protocol import DELTA, SAFETENSORS
from shared.weights import stream_checkpoint
from tests.rollout_server.engines import (
    PATIENCE_S,
    Running,
    assert_made_by,
    assert_tiles,
    committed,
    greedy,
    in_flight,
    running,
    staged_folders,
)
from tests.rollout_server.support import (
    EMBEDDING,
    HEAD,
    FakeEngine,
    Tensors,
    Weights,
    base_weights,
    digest_of,
    eventually,
    lazy,
    make_live,
    post,
)

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 4


class Recording(httpx.HTTPTransport):
    """Notes the kind and size of every publish that goes out."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/reload":
            return super().handle_request(request)
        body = request.read()
        self.sent.append((request.headers["content-type"], len(body)))
        return super().handle_request(request)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.sent]


@pytest.fixture
def wire() -> Recording:
    return Recording()


@pytest.fixture
def trainer(server_url: str, wire: Recording) -> Iterator[RolloutClient]:
    """A client whose publishes are noted."""
    with RolloutClient(server_url, timeout=PATIENCE_S, transport=wire) as trainer:
        yield trainer


def stepped(weights: Weights, seed: int, share: float = 0.03) -> Weights:
    """The weights after a step of which a small share of the values survives the rounding."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        step = torch.randn(tensor.shape, generator=generator)
        survives = torch.rand(tensor.shape, generator=generator) < share
        return (tensor.float() * (1 + 0.02 * step * survives)).to(tensor.dtype)

    return Weights(weights.model_dir, {n: moved(t) for n, t in weights.tensors.items()})


def changed(old: Weights, new: Weights) -> float:
    """Share of the elements that differ."""
    pairs = [(old.tensors[name], new.tensors[name]) for name in old.tensors]
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def remembering(tensors: Tensors) -> DeltaBase:
    """A base that knows these weights although it did not publish them."""
    base = DeltaBase()
    for _ in stream_checkpoint(base.record(lazy(tensors))):
        pass
    base.commit()
    return base


def delta_of(old: Weights, new: Weights) -> bytes:
    """The body of a publish that turns one into the other."""
    return b"".join(remembering(old.tensors).encode(lazy(new.tensors)))


def test_the_second_publish_is_a_delta(
    trainer: RolloutClient, wire: Recording, first: Weights
) -> None:
    base, new = DeltaBase(), stepped(first, 1)
    assert 0.01 < changed(first, new) < 0.05
    full = trainer.reload(lazy(first.tensors), base=base)
    delta = trainer.reload(lazy(new.tensors), base=base)
    assert wire.kinds == [SAFETENSORS, DELTA]
    assert wire.sent[1][1] < wire.sent[0][1] / 5
    assert (delta.version, delta.digest) == (full.version + 1, new.digest)
    assert base.digest == trainer.info().digest == new.digest != first.digest
    # The same weights in full have the same digest, which is the point of it.
    assert trainer.reload(lazy(new.tensors)).digest == new.digest


def test_the_engine_computes_with_what_a_delta_leads_to(
    trainer: RolloutClient, wire: Recording, first: Weights, second: Weights
) -> None:
    base = DeltaBase()
    for weights in (first, second, first):  # nearly every value changes
        trainer.reload(lazy(weights.tensors), base=base)
        assert greedy(trainer, PROMPT) == weights.greedy(PROMPT, 10)
        rollout = trainer.rollout([PROMPT], group_size=2, max_tokens=40, ignore_eos=True)
        for sample in rollout.samples:
            assert_made_by(sample, lambda digest: {w.digest: w for w in (first, second)}[digest])
    assert wire.kinds == [SAFETENSORS, DELTA, DELTA]


def test_many_deltas_in_a_row_stay_exact(
    trainer: RolloutClient, wire: Recording, staging_dir: Path, first: Weights
) -> None:
    base, weights = DeltaBase(), first
    version = trainer.reload(lazy(first.tensors), base=base).version
    for step in range(20):
        weights = stepped(before := weights, step)
        assert changed(before, weights) > 0.01
        result = trainer.reload(lazy(weights.tensors), base=base)
        assert (result.version, result.digest) == (version + step + 1, weights.digest)
    assert wire.kinds == [SAFETENSORS] + [DELTA] * 20
    sample = trainer.rollout([PROMPT], group_size=1, max_tokens=60, ignore_eos=True).samples[0]
    assert_made_by(sample, lambda _: weights)
    assert committed(staging_dir, "default") == [f"v{version + 20:08d}"]
    (file,) = staging_dir.rglob(f"v{version + 20:08d}/*.safetensors")
    assert digest_of(safetensors.torch.load_file(file)) == weights.digest


def test_a_delta_in_the_middle_of_samples(
    trainer: RolloutClient, wire: Recording, server_url: str, first: Weights, second: Weights
) -> None:
    base = DeltaBase()
    old = trainer.reload(lazy(first.tensors), base=base)
    long: dict[str, Any] = {"group_size": 2, "max_tokens": 900, "ignore_eos": True}
    with in_flight(server_url, [[5, 6], [7] * 9], **long) as futures:
        new = trainer.reload(lazy(second.tensors), base=base)
        samples = [s for future in futures for s in future.result(PATIENCE_S).samples]
    assert wire.kinds == [SAFETENSORS, DELTA]
    assert any(len(sample.spans) == 2 for sample in samples)
    by_digest = {old.digest: first, new.digest: second}
    for sample in samples:
        assert_tiles(sample)
        assert_made_by(sample, by_digest.__getitem__, [first, second])


def test_a_step_that_changes_nothing(
    trainer: RolloutClient, wire: Recording, first: Weights
) -> None:
    base = DeltaBase()
    old = trainer.reload(lazy(first.tensors), base=base)
    new = trainer.reload(lazy(first.tensors), base=base)
    assert (new.version, new.digest) == (old.version + 1, old.digest)
    assert wire.sent[1][0] == DELTA
    assert wire.sent[1][1] < 500


def test_another_publisher_in_between_costs_one_full_publish(
    trainer: RolloutClient,
    client: RolloutClient,
    wire: Recording,
    first: Weights,
    second: Weights,
) -> None:
    base = DeltaBase()
    trainer.reload(lazy(first.tensors), base=base)
    other = client.reload(lazy(second.tensors))
    mine = stepped(first, 2)
    result = trainer.reload(lazy(mine.tensors), base=base)
    assert wire.kinds == [SAFETENSORS, DELTA, SAFETENSORS]
    assert (result.version, result.digest) == (other.version + 1, mine.digest)
    assert greedy(trainer, PROMPT) == mine.greedy(PROMPT, 10)
    wire.sent.clear()
    assert trainer.reload(lazy(stepped(mine, 3).tensors), base=base).digest == base.digest
    assert wire.kinds == [DELTA]


def test_a_refused_delta_says_what_is_live(client: RolloutClient, live: Weights) -> None:
    info, version = client.info(), client.info().version
    base = remembering(stepped(live, 4).tensors)
    raw = b"".join(base.encode(lazy(stepped(live, 5).tensors)))
    answer = post(f"{client._exchange.url}", raw=raw, path="/reload", content_type=DELTA)
    assert answer.status_code == 409
    details = answer.json()["error"]["details"]
    assert details == {"version": version, "digest": live.digest}
    assert client.info() == info


def test_a_trainer_that_starts_from_what_is_live_never_sends_it_in_full(
    trainer: RolloutClient, wire: Recording, base: Weights
) -> None:
    trainer.reset()
    known = remembering(base.tensors)
    assert known.digest == trainer.info().digest
    new = stepped(base, 6)
    assert trainer.reload(lazy(new.tensors), base=known).digest == new.digest
    assert wire.kinds == [DELTA]


def wide(weights: Weights) -> Tensors:
    return {name: tensor.float() for name, tensor in weights.tensors.items()}


def with_head(weights: Weights) -> Tensors:
    return {**weights.tensors, HEAD: weights.tensors[EMBEDDING].clone()}


@pytest.mark.parametrize("form", [wide, with_head])
def test_weights_in_another_form_than_served_are_published_in_full(
    trainer: RolloutClient, wire: Recording, first: Weights, form: Any
) -> None:
    # Their digest is never the live one, so no delta of them can be taken; every publish works.
    base = DeltaBase()
    for weights in (first, stepped(first, 7)):
        assert trainer.reload(lazy(form(weights)), base=base).digest == weights.digest
    assert wire.kinds == [SAFETENSORS, DELTA, SAFETENSORS]


def test_a_base_of_other_tensors_is_given_up_for_a_full_publish(
    trainer: RolloutClient, wire: Recording, first: Weights
) -> None:
    base = DeltaBase()
    trainer.reload(lazy(wide(first)), base=base)
    assert trainer.reload(lazy(first.tensors), base=base).digest == first.digest
    assert wire.kinds == [SAFETENSORS, SAFETENSORS]


@pytest.mark.usefixtures("live")
class TestRefused:
    """Nothing of these reaches the engine, and the next delta is taken all the same."""

    @pytest.fixture(autouse=True)
    def _unchanged(
        self, trainer: RolloutClient, staging_dir: Path, live: Weights
    ) -> Iterator[None]:
        info = trainer.info()
        yield
        assert trainer.info() == info
        assert staged_folders(staging_dir) == []
        new = stepped(live, 8)
        base = remembering(live.tensors)
        assert trainer.reload(lazy(new.tensors), base=base).digest == new.digest

    def test_a_value_that_is_not_finite(self, trainer: RolloutClient, live: Weights) -> None:
        bad = live.tensors[EMBEDDING].clone()
        bad[3, 3] = torch.nan
        with pytest.raises(WeightsRejected, match=EMBEDDING):
            trainer.reload(lazy({**live.tensors, EMBEDDING: bad}), base=remembering(live.tensors))

    @pytest.mark.parametrize("at", [3, 60, 200, -40, -1])
    def test_a_flipped_bit(self, server_url: str, live: Weights, at: int) -> None:
        raw = bytearray(delta_of(live, stepped(live, 9)))
        raw[at] ^= 1
        assert send_delta(server_url, bytes(raw)) in (400, 409, 422)

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
    def test_a_truncated_one(self, server_url: str, live: Weights, share: float) -> None:
        raw = delta_of(live, stepped(live, 9))
        assert send_delta(server_url, raw[: int(len(raw) * share)]) == 400

    def test_one_for_an_adapter(self, server_url: str, live: Weights) -> None:
        raw = delta_of(live, stepped(live, 9))
        assert send_delta(server_url, raw, "?policy=mine") == 422


def send_delta(url: str, raw: bytes, query: str = "") -> int:
    return post(url, raw=raw, path=f"/reload{query}", content_type=DELTA).status_code


def test_the_asynchronous_client_sends_deltas_too(
    server_url: str, first: Weights, second: Weights
) -> None:
    async def publish() -> list[str]:
        base, digests = DeltaBase(), []
        async with AsyncRolloutClient(server_url, timeout=PATIENCE_S) as client:
            for weights in (first, second, stepped(second, 10)):
                digests.append((await client.reload(lazy(weights.tensors), base=base)).digest)
                assert base.digest == digests[-1]
            await client.reload(lazy(first.tensors))
            digests.append((await client.reload(lazy(second.tensors), base=base)).digest)
        return digests

    last = stepped(second, 10).digest
    assert asyncio.run(publish()) == [first.digest, second.digest, last, second.digest]


@contextlib.contextmanager
def fake(model: Path, tmp_path: Path, **changes: Any) -> Iterator[tuple[Running, FakeEngine]]:
    """The application on a model, with an engine that only remembers what it loaded."""
    engine = FakeEngine()
    settings = ServerSettings(model=str(model), staging_dir=tmp_path / "staging", **changes)
    with running(settings, lambda _: engine) as server:
        yield server, engine


def test_a_server_in_float32_takes_deltas_in_float32(
    tiny_model: Path, tmp_path: Path, base: Weights
) -> None:
    old = wide(base)
    new = {name: tensor + 1e-6 * tensor.abs().clamp(1e-3) for name, tensor in old.items()}
    with fake(tiny_model, tmp_path, dtype="float32") as (server, engine):
        assert server.client.info().digest == digest_of(old)
        server.client.reload(lazy(new), base=remembering(old))
        assert engine.loaded[-1] == server.client.info().digest == digest_of(new)


def test_a_base_that_is_stored_in_float32_is_changed_as_it_is_served(
    tiny_model: Path, tmp_path: Path, base: Weights
) -> None:
    model = tmp_path / "wide"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    finer = {n: t.float() * 1.001 for n, t in base.tensors.items()}
    safetensors.torch.save_file(
        {**finer, HEAD: finer[EMBEDDING].clone()}, model / "model.safetensors"
    )
    served = Weights(model, {n: t.to(torch.bfloat16) for n, t in finer.items()})
    assert base_weights(model).tensors[EMBEDDING].dtype == torch.float32
    new = stepped(served, 11)
    with fake(model, tmp_path) as (server, engine):
        assert server.client.info().digest == served.digest
        server.client.reload(lazy(new.tensors), base=remembering(served.tensors))
        assert engine.loaded[-1] == server.client.info().digest == new.digest


def test_a_delta_is_refused_when_its_base_is_replaced_while_it_waits(
    tiny_model: Path, tmp_path: Path, base: Weights, first: Weights
) -> None:
    late = delta_of(base, stepped(base, 12))
    with fake(tiny_model, tmp_path) as (server, engine), ThreadPoolExecutor() as pool:
        engine.load_gate.clear()
        sooner = pool.submit(server.client.reload, lazy(first.tensors))
        eventually(lambda: "load" in engine.calls)
        delta = pool.submit(send_delta, server.url, late)
        eventually(lambda: server.client.policy()["history"][0]["state"] == "verified", seconds=60)
        engine.load_gate.set()
        assert sooner.result(60).version == 1
        assert delta.result(60) == 409
        assert engine.loaded[-1] == server.client.info().digest == first.digest


def test_a_lease_of_somebody_else_is_no_reason_for_a_full_publish(
    trainer: RolloutClient, client: RolloutClient, wire: Recording, live: Weights
) -> None:
    known = remembering(live.tensors)
    with client.lease(holder="somebody else"), pytest.raises(Conflict, match="somebody else"):
        trainer.reload(lazy(stepped(live, 13).tensors), base=known)
    assert wire.kinds == [DELTA]
    assert make_live(client, live) == client.info().version

"""Uploads that are copied to the device before the pause, and what makes them do without.

On the CPU vLLM's kernels repack weights, so the model here is a plain one; the worker's methods,
its sockets and its thread are the real ones. With a GPU the same is done with vLLM.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rollout_server import worker_upload
from rollout_server.engine import EngineDied
from rollout_server.load_plan import check_plain
from rollout_server.settings import ServerSettings
from rollout_server.vllm_engine import VLLMEngine
from rollout_server.worker_upload import WorkerUpload
from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import EngineFailure
from tests.rollout_server.channel_support import ChannelEngine, Worker, changed
from tests.rollout_server.engines import PATIENCE_S, in_flight, running
from tests.rollout_server.support import (
    EMBEDDING,
    Tensors,
    Weights,
    digest_of,
    eventually,
    lazy,
    sharpened,
)
from tests.rollout_server.test_channels import own_shared_memory

OPENS, LOADS = "tito_upload_open", "tito_buffer_load"


class PlainModel(nn.Module):
    """Parameters named and shaped as in the checkpoint."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(_attribute(name), nn.Parameter(torch.zeros_like(tensor)))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(_attribute(name)).data.copy_(tensor)


def _attribute(name: str) -> str:
    return name.replace(".", "/")


class PlainWorker(Worker):
    """A worker whose loads can be planned."""

    _tito_plan: Any = None

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.model = PlainModel(tensors)
        check_plain(self.model)  # has vLLM imported before there is memory that an import may keep
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model, reset_lora_state=lambda: None
        )

    def tito_copies_uploads(self) -> bool:
        return True

    def live(self) -> str:
        """Digest of what the model computes with."""
        return digest_of({n.replace("/", "."): t for n, t in self.model.named_parameters()})


@dataclass
class CopyEngine(ChannelEngine):
    worker: Any = None
    at_load: list[bool] = field(default_factory=list)
    """Whether generation stood still when a copy was begun."""

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        if method == OPENS:
            self.at_load.append(self.paused)
        return await super().call_workers(method, **arguments)


@dataclass(frozen=True)
class Server:
    url: str
    client: RolloutClient
    engines: list[CopyEngine]
    reload_dir: Path

    @property
    def engine(self) -> CopyEngine:
        return self.engines[-1]

    @property
    def worker(self) -> PlainWorker:
        worker = self.engine.worker
        assert isinstance(worker, PlainWorker)
        return worker


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path, base: Weights) -> Iterator[Server]:
    engines: list[CopyEngine] = []

    def build(_: ServerSettings) -> CopyEngine:
        engines.append(CopyEngine(worker=PlainWorker(base.tensors)))
        return engines[-1]

    # Of other tests: threads that outlast them free it, or it stays in cycles with their errors.
    gc.collect()
    eventually(lambda: own_shared_memory() == 0)
    reload_dir = tmp_path / "reload"
    reload_dir.mkdir()
    settings = ServerSettings(
        model=str(tiny_model), staging_dir=tmp_path / "staging", reload_dirs=[reload_dir]
    )
    with running(settings, build) as at:
        yield Server(at.url, at.client, engines, reload_dir)


def by_http(server: Server, tensors: Tensors) -> Any:
    return server.client.reload(lazy(tensors))


def by_disk(server: Server, tensors: Tensors) -> Any:
    save_file(tensors, server.reload_dir / "model.safetensors")
    return server.client.reload_path(str(server.reload_dir))


def by_delta(server: Server, tensors: Tensors) -> Any:
    base = DeltaBase()
    server.client.reload(lazy(changed(tensors, EMBEDDING, 0.125)), base=base)
    server.engine.calls.clear()
    return server.client.reload(lazy(tensors), base=base)


@pytest.mark.parametrize("publish", [by_http, by_disk, by_delta])
def test_what_is_published_lies_on_the_device_before_the_pause(
    server: Server, publish: Callable[[Server, Tensors], Any], first: Weights, second: Weights
) -> None:
    for weights in (first, second):
        server.engine.calls.clear()
        result = publish(server, weights.tensors)
        assert own_shared_memory() == 0, "the memory is free again when the answer comes"
        assert result.digest == server.worker.live() == weights.digest
        calls = [call for call in server.engine.calls if call != "tito_copies_uploads"]
        assert calls == [OPENS, "pause", LOADS, f"stamp {result.version}", "resume"]
        assert {"stage", "verify", "pause", "load", "resume"} <= result.timings.keys()
    assert not any(server.engine.at_load)


def test_float32_is_copied_as_it_is_served(server: Server, first: Weights) -> None:
    wide = {name: tensor.float() for name, tensor in first.tensors.items()}
    result = server.client.reload(lazy(wide))
    assert result.digest == server.worker.live() == first.digest
    assert "load" not in server.engine.calls


def test_samples_go_on_while_an_upload_is_copied(
    server: Server, first: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, goes_on, plain = threading.Event(), threading.Event(), WorkerUpload._do_read

    def later(upload: WorkerUpload, paths: list[str]) -> str:
        copies.set()
        goes_on.wait(30)
        return plain(upload, paths)

    monkeypatch.setattr(WorkerUpload, "_do_read", later)
    publish = threading.Thread(target=server.client.reload, args=(lazy(first.tensors),))
    publish.start()
    assert copies.wait(30)
    with RolloutClient(server.url, timeout=30) as other:
        assert other.policy()["state"] == "verified"
        assert len(other.rollout([[5, 6]], group_size=1, max_tokens=3).samples) == 1
    goes_on.set()
    publish.join()
    assert server.worker.live() == first.digest


PLAIN_COPY = WorkerUpload._copy


def torn(upload: WorkerUpload, parts: Any) -> None:
    PLAIN_COPY(upload, parts)
    upload.flat[1000] ^= 1


def unreadable(*_: Any) -> None:
    raise OSError(5, "Input/output error")


def unplanned(*_: Any) -> None:
    raise ValueError("other tensors than were recorded")


@pytest.mark.parametrize(
    ("owner", "method", "instead"),
    [
        (WorkerUpload, "_copy", torn),
        (WorkerUpload, "_copy", unreadable),
        (PlainWorker, "_tito_prepare", unplanned),
        (PlainWorker, "tito_upload_open", unreadable),
        (PlainWorker, "tito_copies_uploads", unreadable),
    ],
)
def test_without_a_good_copy_files_are_loaded(
    server: Server,
    owner: type,
    method: str,
    instead: Any,
    first: Weights,
    second: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(owner, method, instead)
        result = by_http(server, first.tensors)
    assert server.engine.loaded == [first.digest] == [result.digest]
    assert LOADS not in server.engine.calls
    server.engine.calls.clear()
    assert by_http(server, second.tensors).digest == server.worker.live()
    assert "load" not in server.engine.calls


def test_no_more_than_can_be_spared_is_taken(
    server: Server, first: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = sum(tensor.nbytes for tensor in first.tensors.values())
    server.worker.peak_activation_memory = nbytes  # type: ignore[attr-defined]
    for spare, call in ((2 * nbytes, "load"), (3 * nbytes, LOADS)):
        server.engine.calls.clear()
        monkeypatch.setattr(worker_upload, "spare_bytes", lambda _, spare=spare: spare)
        by_http(server, first.tensors)
        assert [c for c in server.engine.calls if c in ("load", LOADS)] == [call]


def test_some_memory_of_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, total, spare in ((5 << 30, 20 << 30, 4 << 30), (9 << 30, 100 << 30, 7 << 30)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, it=(free, total): it)
        assert worker_upload.spare_bytes(torch.device("cuda", 0)) == spare


def test_a_load_that_fails_is_followed_by_one_from_the_files(
    server: Server, first: Weights
) -> None:
    server.engine.calls.clear()
    server.engine.channel_errors = [EngineFailure("the worker tripped over a cable")]
    result = by_http(server, first.tensors)
    assert server.engine.loaded == [first.digest] == [result.digest]
    assert server.engine.calls.count("pause") == server.engine.calls.count("resume") == 1


def test_when_neither_can_be_loaded_the_last_good_weights_are_live(
    server: Server, first: Weights, second: Weights
) -> None:
    by_http(server, first.tensors)
    server.engine.channel_errors = [EngineFailure("a cable")]
    server.engine.load_errors = [EngineFailure("a second cable"), None]
    with pytest.raises(EngineFailure, match="version 1 is live again"):
        by_http(server, second.tensors)
    assert server.engine.loaded == [second.digest, first.digest]
    assert own_shared_memory() == 0


def test_an_engine_that_dies_in_the_load_is_replaced(
    server: Server, first: Weights, second: Weights
) -> None:
    by_http(server, first.tensors)
    server.engine.channel_errors = [EngineDied("killed by the test")]
    with pytest.raises(EngineFailure, match="version 1 is live again"):
        by_http(server, second.tensors)
    assert len(server.engines) == 2
    assert by_http(server, second.tensors).digest == server.worker.live()


def test_a_bit_that_differs_after_the_load_is_noticed(
    server: Server, first: Weights, second: Weights
) -> None:
    by_http(server, first.tensors)
    plan, plain = server.worker._tito_plan, server.worker._tito_plan.apply

    def apply(tensors: Tensors) -> None:
        plain(tensors)
        parameter = server.worker.model.get_parameter(_attribute(EMBEDDING))
        parameter.data.view(-1).view(torch.int16)[-1] ^= 1

    plan.apply = apply
    result = by_http(server, second.tensors)
    assert server.engine.loaded == [second.digest] == [result.digest]


class TestWhichWorkersCopy:
    def test_none_without_a_gpu(self, base: Weights) -> None:
        assert not Worker.tito_copies_uploads(PlainWorker(base.tensors))

    def test_those_whose_weights_are_plain(self, base: Weights) -> None:
        worker = PlainWorker(base.tensors)
        worker.device = torch.device("cuda", 0)
        assert Worker.tito_copies_uploads(worker)
        packed: Any = nn.Module()
        packed.cpu_linear = object()
        worker.model.packed = packed
        assert not Worker.tito_copies_uploads(worker)

    def test_not_those_that_have_found_no_plan(self, base: Weights) -> None:
        worker = PlainWorker(base.tensors)
        worker.device, worker._tito_plan = torch.device("cuda", 0), False
        assert not Worker.tito_copies_uploads(worker)

    def test_an_engine_is_asked_once(
        self, server: Server, first: Weights, second: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(PlainWorker, "tito_copies_uploads", lambda _: False)
        for weights in (first, second):
            timings = by_http(server, weights.tensors).timings
            assert "stage" not in timings
        assert server.engine.calls.count("tito_copies_uploads") == 1
        assert OPENS not in server.engine.calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_vllm_loads_uploads_from_the_device(
    tiny_model: Path, tmp_path: Path, first: Weights, second: Weights
) -> None:
    """Every way of publishing, with samples in flight."""
    calls: list[str] = []

    class Engine(VLLMEngine):
        async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
            calls.append(method)
            return await super().call_workers(method, **arguments)

    settings = ServerSettings(
        model=str(tiny_model),
        staging_dir=tmp_path,
        reload_dirs=[tmp_path],
        kv_cache_gib=1.0,
        memory_share=0.2,
        eager=True,
    )
    with running(settings, Engine) as at:
        base = DeltaBase()
        for weights in (first, second, sharpened(first, 3), first):
            with in_flight(at.url, [[5, 6, 7]], max_tokens=400, ignore_eos=True) as rolls:
                result = at.client.reload(lazy(weights.tensors), base=base)
                rolls[0].result(PATIENCE_S)
            assert result.digest == weights.digest
            assert "stage" in result.timings
        save_file(second.tensors, tmp_path / "model.safetensors")
        assert at.client.reload_path(str(tmp_path / "model.safetensors")).digest == second.digest
        wide = {name: tensor.float() for name, tensor in first.tensors.items()}
        assert at.client.reload(lazy(wide)).digest == first.digest
        assert calls.count(LOADS) == calls.count(OPENS) == 6
        assert "tito_load_weights" not in calls
        assert 'stage="stage"' in httpx.get(f"{at.url}/metrics").text

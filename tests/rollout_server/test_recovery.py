"""Engines that die, loads that go wrong, servers that are killed, disks that are full.

Whatever happens, what is committed is what answers, and it is proved by what the engine computes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch

from rollout_server import staged_files
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.errors import EngineFailure, EngineUnavailable, InsufficientStorage, TitoError
from shared.protocol import DIGEST_HEADER, DIGEST_TRAILER, SAFETENSORS, Rollout
from tests.conftest import StartServer
from tests.rollout_server.engines import (
    LONG_PROMPT,
    PATIENCE_S,
    Running,
    assert_made_by,
    assert_tiles,
    committed,
    engine_processes,
    greedy,
    in_flight,
    running,
    server_process,
    staged_folders,
)
from tests.rollout_server.faulty_worker import FAULT_VARIABLE, FaultyEngine
from tests.rollout_server.support import (
    EMBEDDING,
    FakeEngine,
    Tensors,
    Weights,
    counter,
    eventually,
    lazy,
    make_live,
    samples_run,
    sharpened,
    upload_of,
)
from tests.rollout_server.test_delta_publish import remembering
from tests.rollout_server.test_lora import lora, publish

PROMPTS = [[5, 6, number] for number in range(100, 112)]
GROUP = 2
LONG: dict[str, Any] = {"group_size": GROUP, "max_tokens": 600, "ignore_eos": True}
QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"


def answers(futures: list[Future[Rollout]]) -> list[Rollout]:
    """All rollouts in flight, each with its whole group."""
    rollouts = [future.result(PATIENCE_S) for future in futures]
    for prompt, rollout in zip(PROMPTS, rollouts, strict=False):
        assert [sample.prompt_ids.tolist() for sample in rollout.samples] == [prompt] * GROUP
    return rollouts


def assert_all_by(rollouts: list[Rollout], version: int, weights: Weights) -> None:
    """Every sample is whole and was made by one version, whose weights these are."""
    seen = set()
    for sample in (sample for rollout in rollouts for sample in rollout.samples):
        assert len(sample.completion_ids) == 600
        assert [(s.version, s.digest) for s in sample.spans] == [(version, weights.digest)]
        assert_tiles(sample)
        assert_made_by(sample, lambda _: weights)
        seen.add((tuple(sample.prompt_ids.tolist()), tuple(sample.completion_ids.tolist())))
    assert len(seen) == len(rollouts) * GROUP, "a sample was returned twice"


class TestEngineDeath:
    """One server, whose engine is killed again and again."""

    @pytest.fixture(scope="class")
    def url(
        self, start_server: StartServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[str]:
        spool = tmp_path_factory.mktemp("recovery")
        flags = ["--model", str(tiny_model), "--spool-dir", str(spool), "--max-loras", "1"]
        with start_server(*flags, "--recovery-seconds", str(PATIENCE_S)) as url:
            yield url

    @pytest.fixture
    def client(self, url: str) -> Iterator[RolloutClient]:
        with RolloutClient(url, timeout=PATIENCE_S) as client:
            client.wait_ready(PATIENCE_S)
            yield client

    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("role", ["core", "worker"])
    def test_what_was_in_flight_is_answered_by_the_committed_version(
        self, client: RolloutClient, url: str, first: Weights, role: str
    ) -> None:
        make_live(client, first)
        info, before = client.info(), samples_run(url)
        old = engine_processes(server_process(url))
        with in_flight(url, PROMPTS, **LONG) as futures:
            old[role].kill()
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 503, 60)
            response = httpx.get(f"{url}/readyz")
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["retry_after"] > 0
            assert response.json()["error"]["code"] == "engine_unavailable"
            assert httpx.get(f"{url}/healthz").status_code == 200
            assert client.info() == info
            assert "tito_ready 0.0" in httpx.get(f"{url}/metrics").text
            assert not any(future.done() for future in futures)
            rollouts = answers(futures)
        assert_all_by(rollouts, info.version, first)
        assert samples_run(url) - before == len(PROMPTS) * GROUP
        assert client.wait_ready(PATIENCE_S) == info
        assert greedy(client) == first.greedy(LONG_PROMPT, 10)
        assert engine_processes(server_process(url))[role].pid != old[role].pid
        assert not any(process.is_running for process in old.values())

    @pytest.mark.timeout(1200)
    def test_adapters_in_flight_go_on_too(
        self, client: RolloutClient, url: str, first: Weights
    ) -> None:
        make_live(client, first)
        adapter = lora(first, 1)
        result = publish(client, "mine", adapter)
        with in_flight(url, PROMPTS, policy="mine", **LONG) as futures:
            engine_processes(server_process(url))["core"].kill()
            rollouts = answers(futures)
        merged = adapter.onto(first)
        for sample in (sample for rollout in rollouts for sample in rollout.samples):
            assert (sample.version, sample.digest) == (result.version, result.digest)
            assert len(sample.completion_ids) == 600
            assert_made_by(sample, lambda _: merged)
        client.wait_ready(PATIENCE_S)
        client.delete_policy("mine")
        assert greedy(client) == first.greedy(LONG_PROMPT, 10)

    @pytest.mark.timeout(1200)
    def test_an_idle_engine_is_replaced_too(
        self, client: RolloutClient, url: str, first: Weights, second: Weights
    ) -> None:
        make_live(client, first)
        version = make_live(client, second)
        engine_processes(server_process(url))["core"].kill()
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 503, 60)
        with pytest.raises(EngineUnavailable, match="restarting"):
            client.reload(lazy(first.tensors))
        client.wait_ready(PATIENCE_S)
        assert client.info().version == version
        assert greedy(client) == second.greedy(LONG_PROMPT, 10)
        # And it takes weights as before.
        assert client.reload(lazy(first.tensors)).version == version + 1
        assert greedy(client) == first.greedy(LONG_PROMPT, 10)


class TestFaultyLoad:
    """A real engine whose worker fails inside a load, and is told when."""

    @pytest.fixture(scope="class")
    def fault(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        path = tmp_path_factory.mktemp("fault") / "fault"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FAULT_VARIABLE, str(path))
            yield path

    @pytest.fixture(scope="class")
    def server(
        self, tiny_model: Path, fault: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Running]:
        assert not fault.exists()
        settings = ServerSettings(
            model=str(tiny_model),
            staging_dir=tmp_path_factory.mktemp("faulty"),
            recovery_seconds=PATIENCE_S,
        )
        with running(settings, FaultyEngine) as server:
            yield server

    @pytest.mark.timeout(1200)
    def test_the_very_first_load(
        self, server: Running, fault: Path, base: Weights, first: Weights
    ) -> None:
        client = server.client
        assert client.info().version == 0
        fault.write_text(f"corrupt {NORM}")
        with pytest.raises(EngineFailure, match="version 0 is live again"):
            client.reload(lazy(first.tensors))
        assert (client.info().version, client.info().digest) == (0, base.digest)
        assert greedy(client) == base.greedy(LONG_PROMPT, 10)

    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize(
        "what",
        [
            f"corrupt {NORM}",
            f"corrupt {QUERY}",
            f"corrupt {DOWN}",
            f"corrupt {EMBEDDING}",
            "kill",
            "raise",
            # The restore fails too, so a new engine takes over.
            f"raise\ncorrupt {DOWN}",
        ],
    )
    def test_the_last_good_version_is_restored(
        self, server: Running, fault: Path, first: Weights, second: Weights, what: str
    ) -> None:
        client = server.client
        make_live(client, first)
        info = client.info()
        assert greedy(client) == first.greedy(LONG_PROMPT, 10)
        with in_flight(server.url, PROMPTS, **LONG) as futures:
            fault.write_text(what)
            with pytest.raises(EngineFailure, match=f"version {info.version} is live again"):
                client.reload(lazy(second.tensors))
            assert not fault.exists(), "the fault was not seen"
            rollouts = answers(futures)
        assert_all_by(rollouts, info.version, first)
        assert client.wait_ready(PATIENCE_S) == info
        assert greedy(client) == first.greedy(LONG_PROMPT, 10)
        newest = client.policy()["history"][0]
        assert (newest["state"], newest["version"]) == ("rolled_back", None)
        assert newest["reason"]
        # The number was not used up, and the next publish goes through.
        assert client.reload(lazy(second.tensors)).version == info.version + 1
        assert greedy(client) == second.greedy(LONG_PROMPT, 10)


def test_rollouts_in_flight_hear_of_a_server_that_closes(
    tiny_model: Path, tmp_path: Path, first: Weights
) -> None:
    # The engine stays paused for ever, so whoever waits for it must be answered.
    engine = FakeEngine()
    settings = ServerSettings(model=str(tiny_model), staging_dir=tmp_path)
    with running(settings, lambda _: engine) as server:
        server.client.reload(lazy(first.tensors))
        engine.gate.clear()
        with in_flight(server.url, PROMPTS[:2], group_size=1, max_tokens=2) as futures:
            again = (RuntimeError("another cable") for _ in range(4))
            engine.load_errors = [RuntimeError("a cable"), *again]
            with pytest.raises(TitoError, match="another cable"):
                server.client.reload(lazy(first.tensors))
            engine.gate.set()
            assert httpx.get(f"{server.url}/readyz").status_code == 503
            try:
                for future in futures:
                    with pytest.raises(EngineUnavailable, match="another cable"):
                        future.result(10)
            finally:
                engine.paused = False  # else the threads would wait for ever


# Restarts.


@contextlib.contextmanager
def spooled(start_server: StartServer, model: Path, spool: Path) -> Iterator[RolloutClient]:
    """A server with a spool directory, until the test is through with it."""
    flags = ["--model", str(model), "--spool-dir", str(spool), "--max-loras", "1"]
    with start_server(*flags) as url, RolloutClient(url, timeout=PATIENCE_S) as client:
        yield client


def url_of(client: RolloutClient) -> str:
    return client._exchange.url


@pytest.mark.timeout(1800)
def test_committed_versions_survive_the_service(
    start_server: StartServer,
    tiny_model: Path,
    tmp_path: Path,
    first: Weights,
    second: Weights,
) -> None:
    spool, adapter = tmp_path / "spool", lora(second, 1)

    # Stopped with SIGTERM.
    with spooled(start_server, tiny_model, spool) as client:
        client.reload(lazy(first.tensors))
        assert client.reload(lazy(second.tensors)).version == 2
        info, answer = client.info(), greedy(client)
        assert answer == second.greedy(LONG_PROMPT, 10)

    # Killed with SIGKILL, in the middle of rollouts and of an upload.
    with spooled(start_server, tiny_model, spool) as client:
        assert client.info() == info
        assert greedy(client) == answer
        adapted = publish(client, "mine", adapter)
        server = server_process(url_of(client))
        processes = [server, *server.descendants()]
        assert {"core", "worker"} <= engine_processes(server).keys()
        with half_an_upload(url_of(client), first):
            eventually(lambda: staged_folders(spool), 60)
            server.kill()
        eventually(lambda: not any(process.is_running for process in processes), 60)
    assert staged_folders(spool), "the kill came too late"

    # Everything is back, the adapter too, and what was half there is gone.
    with spooled(start_server, tiny_model, spool) as client:
        assert client.info() == info
        assert staged_folders(spool) == []
        assert greedy(client) == answer
        assert client.policy("mine")["digest"] == adapted.digest
        assert client.policy("mine")["version"] == adapted.version
        sample = client.rollout(
            [LONG_PROMPT], group_size=1, max_tokens=60, ignore_eos=True, policy="mine"
        ).samples[0]
        assert (sample.version, sample.digest) == (adapted.version, adapted.digest)
        assert_made_by(sample, lambda _: adapter.onto(second))
        assert publish(client, "mine", adapter).version == adapted.version + 1

    # The newest version is damaged: the one before it serves, and numbers go on.
    damage(spool / "policies" / "default" / "v00000002")
    with spooled(start_server, tiny_model, spool) as client:
        assert (client.info().version, client.info().digest) == (1, first.digest)
        assert greedy(client) == first.greedy(LONG_PROMPT, 10)
        with pytest.raises(TitoError):
            client.policy("mine")  # it belongs to weights that are not live
        assert client.reload(lazy(second.tensors)).version == 3
        assert greedy(client) == second.greedy(LONG_PROMPT, 10)


def damage(version: Path) -> None:
    """Flip one bit of a committed version."""
    (file,) = version.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


@contextlib.contextmanager
def half_an_upload(url: str, weights: Weights) -> Iterator[socket.socket]:
    """A connection on which half of a checkpoint has been sent."""
    raw = upload_of(weights.tensors)
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST /reload HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\n"
        f"{DIGEST_HEADER}: {DIGEST_TRAILER}\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + raw[: len(raw) // 2])
        yield connection


@contextlib.contextmanager
def fake(
    model: Path, spool: Path | None, **changes: Any
) -> Iterator[tuple[RolloutClient, FakeEngine]]:
    """The application on a spool, with an engine that remembers what it loaded."""
    engine = FakeEngine()
    settings = ServerSettings(model=str(model), spool_dir=spool, **changes)
    with running(settings, lambda _: engine) as server:
        yield server.client, engine


@pytest.fixture
def spool(tiny_model: Path, tmp_path: Path, first: Weights, second: Weights) -> Path:
    """A spool with versions 1 and 2."""
    spool = tmp_path / "spool"
    with fake(tiny_model, spool) as (client, _):
        for weights in (first, second):
            client.reload(lazy(weights.tensors))
    assert committed(spool, "default") == ["v00000001", "v00000002"]
    return spool


def flip_a_bit(version: Path) -> None:
    damage(version)


def cut_short(version: Path) -> None:
    (file,) = version.glob("*.safetensors")
    os.truncate(file, 1000)


def lose_the_weights(version: Path) -> None:
    (file,) = version.glob("*.safetensors")
    file.unlink()


def lose_the_record(version: Path) -> None:
    (version / "record.json").unlink()


def spoil_the_record(version: Path) -> None:
    (version / "record.json").write_text('{"version": 2, "dig')


def forge_the_record(version: Path) -> None:
    record = version / "record.json"
    record.write_text(record.read_text().replace('"digest": "', '"digest": "0'))


@pytest.mark.parametrize(
    "harm",
    [
        flip_a_bit,
        cut_short,
        lose_the_weights,
        lose_the_record,
        spoil_the_record,
        forge_the_record,
    ],
)
def test_a_damaged_newest_version_is_passed_over(
    tiny_model: Path,
    spool: Path,
    first: Weights,
    second: Weights,
    harm: Callable[[Path], None],
) -> None:
    harm(spool / "policies" / "default" / "v00000002")
    with fake(tiny_model, spool) as (client, engine):
        assert (client.info().version, client.info().digest) == (1, first.digest)
        assert engine.loaded == [first.digest]
        # Its number was handed out, so it is not handed out again.
        assert client.reload(lazy(second.tensors)).version == 3
        assert client.reload(lazy(first.tensors)).version == 4
    with fake(tiny_model, spool) as (client, engine):
        assert (client.info().version, client.info().digest) == (4, first.digest)


def test_all_versions_damaged(tiny_model: Path, spool: Path, base: Weights) -> None:
    for number in (1, 2):
        damage(spool / "policies" / "default" / f"v{number:08d}")
    with fake(tiny_model, spool) as (client, _):
        assert (client.info().version, client.info().digest) == (0, base.digest)


def other_model(tiny_model: Path, folder: Path, weights: Weights) -> Path:
    """The same architecture with other weights to start from."""
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    safetensors.torch.save_file(
        weights.tensors, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def test_another_base_model_ignores_the_spool(
    tiny_model: Path, spool: Path, tmp_path: Path, base: Weights, first: Weights, second: Weights
) -> None:
    third = sharpened(base, 3)
    with fake(other_model(tiny_model, tmp_path / "other", third), spool) as (client, engine):
        assert (client.info().version, client.info().digest) == (0, third.digest)
        assert engine.loaded == []
        assert client.reload(lazy(first.tensors)).version == 3
    with fake(tiny_model, spool) as (client, _):
        assert (client.info().version, client.info().digest) == (2, second.digest)


def test_old_versions_are_retired(
    tiny_model: Path, tmp_path: Path, first: Weights, second: Weights
) -> None:
    spool = tmp_path / "spool"
    with fake(tiny_model, spool, spool_keep=3) as (client, _):
        for weights in [first, second] * 3:
            client.reload(lazy(weights.tensors))
    assert committed(spool, "default") == ["v00000004", "v00000005", "v00000006"]


def test_a_spool_has_one_server(tiny_model: Path, spool: Path) -> None:
    with fake(tiny_model, spool):
        command = ["rollout_server", "--model", str(tiny_model), "--spool-dir", str(spool)]
        second = subprocess.run(
            [sys.executable, "-m", *command, "--port", "9"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert second.returncode != 0
        assert "another server uses" in second.stderr


def test_adapters_come_back(tiny_model: Path, spool: Path, second: Weights) -> None:
    adapter = lora(second, 1)
    with fake(tiny_model, spool, max_loras=2) as (client, _):
        results = {name: publish(client, name, adapter) for name in ("a", "b")}
        results["b"] = publish(client, "b", lora(second, 2))
    with fake(tiny_model, spool, max_loras=2) as (client, _):
        for name, result in results.items():
            found = client.policy(name)
            assert (found["version"], found["digest"]) == (result.version, result.digest)
        assert publish(client, "b", adapter).version == 3


@pytest.mark.parametrize("harm", [flip_a_bit, cut_short, lose_the_weights])
def test_a_damaged_adapter_is_passed_over(
    tiny_model: Path, spool: Path, second: Weights, harm: Callable[[Path], None]
) -> None:
    with fake(tiny_model, spool, max_loras=2) as (client, _):
        publish(client, "a", lora(second, 1))
    harm(spool / "policies" / "a" / "v00000001")
    with fake(tiny_model, spool, max_loras=2) as (client, _):
        assert client.info().version == 2
        with pytest.raises(TitoError, match="no policy 'a'"):
            client.policy("a")


def test_a_damaged_adapter_configuration_is_passed_over(
    tiny_model: Path, spool: Path, second: Weights
) -> None:
    with fake(tiny_model, spool, max_loras=2) as (client, _):
        publish(client, "a", lora(second, 1))
    config = spool / "policies" / "a" / "v00000001" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha":8', '"lora_alpha":9'))
    with fake(tiny_model, spool, max_loras=2) as (client, _), pytest.raises(TitoError):
        client.policy("a")


def test_adapters_are_not_served_without_the_flag(
    tiny_model: Path, spool: Path, second: Weights
) -> None:
    with fake(tiny_model, spool, max_loras=2) as (client, _):
        publish(client, "a", lora(second, 1))
    # The engine would take no adapter, so there must not be a policy that needs one.
    with fake(tiny_model, spool) as (client, engine):
        with pytest.raises(TitoError, match="no policy 'a'"):
            client.policy("a")
        assert client.reload(lazy(second.tensors)).version == 3
        assert engine.loaded[-1] == second.digest


# Full disks.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a filesystem of so many bytes; only root may."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"small-{size}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            pytest.skip("no filesystem can be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def size_of(weights: Weights) -> int:
    return len(upload_of(weights.tensors))


def wide(weights: Weights) -> Tensors:
    return {name: tensor.float() for name, tensor in weights.tensors.items()}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_an_upload_that_the_disk_has_no_room_for(
    tiny_model: Path,
    small_disk: Callable[[int], Path],
    base: Weights,
    first: Weights,
    share: float,
) -> None:
    disk = small_disk(int(size_of(first) * share))
    with fake(tiny_model, None, staging_dir=disk) as (client, engine):
        before = list(engine.calls)
        with pytest.raises(InsufficientStorage, match="nothing has changed"):
            client.reload(lazy(first.tensors))
        assert engine.calls == before
        assert (client.info().version, client.info().digest) == (0, base.digest)
        assert client.policy()["history"][0]["state"] == "rejected"
        assert staged_folders(disk) == []


def test_a_rounded_copy_that_the_disk_has_no_room_for(
    tiny_model: Path, small_disk: Callable[[int], Path], first: Weights
) -> None:
    disk = small_disk(int(size_of(first) * 2.5))
    with fake(tiny_model, None, staging_dir=disk) as (client, engine):
        before = list(engine.calls)
        with pytest.raises(InsufficientStorage):
            client.reload(lazy(wide(first)))
        assert engine.calls == before
        assert staged_folders(disk) == []
        assert client.reload(lazy(first.tensors)).version == 1


def test_a_deltas_result_that_the_disk_has_no_room_for(
    tiny_model: Path, small_disk: Callable[[int], Path], base: Weights, first: Weights
) -> None:
    disk = small_disk(int(size_of(first) * 1.5))
    known = remembering(base.tensors)
    with fake(tiny_model, None, staging_dir=disk) as (client, engine):
        before = list(engine.calls)
        with pytest.raises(InsufficientStorage):
            client.reload(lazy(first.tensors), base=known)
        assert engine.calls == before
        assert staged_folders(disk) == []


def test_a_path_that_the_disk_has_no_room_for(
    tiny_model: Path, small_disk: Callable[[int], Path], first: Weights, tmp_path: Path
) -> None:
    folder = other_model(tiny_model, tmp_path / "source", first)
    disk = small_disk(size_of(first) // 2)
    changes = {"staging_dir": disk, "reload_dirs": [tmp_path]}
    with fake(tiny_model, None, **changes) as (client, engine):
        before = list(engine.calls)
        with pytest.raises(InsufficientStorage):
            client.reload_path(folder)
        with pytest.raises(InsufficientStorage):
            client.reset()
        assert engine.calls == before
        assert staged_folders(disk) == []


def test_an_adapter_that_the_disk_has_no_room_for(
    tiny_model: Path, small_disk: Callable[[int], Path], base: Weights
) -> None:
    disk, adapter = small_disk(16 << 10), lora(base, 1)
    with fake(tiny_model, None, staging_dir=disk, max_loras=2) as (client, engine):
        with pytest.raises(InsufficientStorage):
            publish(client, "a", adapter)
        assert not any(call.startswith("add") for call in engine.calls)
        assert staged_folders(disk) == []


def test_a_disk_that_fills_up_to_the_last_page(
    tiny_model: Path, small_disk: Callable[[int], Path], first: Weights, second: Weights
) -> None:
    # The checkpoint fits, with nothing left for what is written after it.
    disk = small_disk(4 << 20)
    with fake(tiny_model, None, staging_dir=disk) as (client, _):
        client.reload(lazy(first.tensors))
        filler = disk / "filler"
        free = os.statvfs(disk).f_bavail * 4096
        filler.write_bytes(bytes(free - -(-size_of(second) // 4096) * 4096))
        info = client.info()
        with pytest.raises(TitoError) as caught:
            client.reload(lazy(second.tensors))
        assert caught.value.status in (500, 507)
        assert client.info() == info
        assert client.rollout([[5]], group_size=1, max_tokens=2).samples[0].version == 1
        assert httpx.get(f"{url_of(client)}/readyz").status_code == 200
        filler.unlink()
        assert client.reload(lazy(second.tensors)).version == 2


def test_a_full_disk_whatever_the_filesystem(
    tiny_model: Path, tmp_path: Path, first: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fake(tiny_model, None, staging_dir=tmp_path) as (client, engine):
        before = list(engine.calls)
        with monkeypatch.context() as patch:
            patch.setattr(staged_files, "write_at", full)
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(InsufficientStorage):
                client.reload(lazy(first.tensors))
        assert engine.calls == before
        assert staged_folders(tmp_path) == []
        assert client.reload(lazy(first.tensors)).version == 1


# Callers that go away.


@pytest.mark.parametrize("reset", [False, True])
def test_a_caller_gone_half_way_through_its_upload(
    client: RolloutClient,
    server_url: str,
    staging_dir: Path,
    live: Weights,
    second: Weights,
    reset: bool,
) -> None:
    info, rejected = client.info(), counter(server_url, "tito_publishes_total")
    with half_an_upload(server_url, second) as connection:
        eventually(lambda: staged_folders(staging_dir), 60)
        if reset:  # a process that is killed with unread data looks like this
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    eventually(lambda: staged_folders(staging_dir) == [], 60)
    eventually(lambda: counter(server_url, "tito_publishes_total") == rejected + 1, 60)
    assert client.info() == info
    assert client.policy()["history"][0]["state"] == "rejected"
    assert greedy(client) == live.greedy(LONG_PROMPT, 10)
    assert client.reload(lazy(second.tensors)).version == info.version + 1

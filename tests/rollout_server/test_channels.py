"""Channels into the workers' memory: who has one, what breaks them, and that nothing torn shows.

The engine is one in memory; the worker's end, the sockets and the shared memory are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import torch

from rollout_server.engine import EngineDied
from rollout_server.settings import ServerSettings
from rollout_server.worker_channel import WorkerChannel
from rollout_server.worker_links import _Link
from shared.channel import Kind
from shared.errors import Conflict, EngineFailure, NotFound, WeightsRejected
from shared.protocol import FENCE_HEADER
from tests.rollout_server.channel_support import (
    ChannelEngine,
    Worker,
    changed,
    named,
    sender_to,
    specs_of,
    without,
)
from tests.rollout_server.engines import Running, running, staged_folders
from tests.rollout_server.support import (
    EMBEDDING,
    Weights,
    eventually,
    lazy,
    make_live,
    post,
    sharpened,
)

KINDS: list[Kind] = ["ipc", "nccl"]
NORM = "model.norm.weight"


class Server:
    """A running server, the engine in it, and where it stages."""

    def __init__(self, at: Running, engines: list[ChannelEngine], staging: Path) -> None:
        self.url, self.client, self.engines, self.staging = at.url, at.client, engines, staging

    @property
    def engine(self) -> ChannelEngine:
        return self.engines[-1]


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    engines: list[ChannelEngine] = []

    def build(_: ServerSettings) -> ChannelEngine:
        engines.append(ChannelEngine())
        return engines[-1]

    settings = ServerSettings(
        model=str(tiny_model), staging_dir=tmp_path, channel_seconds=20.0, lease_max_ttl=60.0
    )
    with running(settings, build) as at:
        yield Server(at, engines, tmp_path)


def own_shared_memory() -> int:
    """Buffers of channels that this process has open, as worker or as trainer."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.readlink().name.startswith("memfd:tito-channel")
    return found


def state_of(server: Server) -> tuple[int, str]:
    info = server.client.info()
    return info.version, info.digest


@pytest.mark.parametrize("kind", KINDS)
class TestPublishing:
    def test_what_comes_by_a_channel_is_labelled_like_an_upload(
        self, server: Server, kind: Kind, first: Weights, second: Weights
    ) -> None:
        uploaded = server.client.reload(lazy(first.tensors))
        server.client.reset()
        sender = sender_to(server.client, kind, first)
        result = sender.publish(named(first.tensors), None)
        assert (result.version, result.digest) == (uploaded.version + 2, uploaded.digest)
        assert server.engine.worker.loaded == [first.digest]
        assert {"transfer", "verify", "pause", "load", "resume"} <= result.timings.keys()
        again = sender.publish(named(second.tensors), None)
        assert (again.version, again.digest) == (result.version + 1, second.digest)
        assert server.engine.calls.count("tito_channel_open") == 1
        sender.close()

    def test_a_copy_follows_while_generation_goes_on(
        self, server: Server, kind: Kind, first: Weights
    ) -> None:
        sender = sender_to(server.client, kind, first)
        result = sender.publish(named(first.tensors), None)
        eventually(lambda: server.client.policy()["durable"])
        policy = server.client.policy()
        assert policy["durable_version"] == policy["version"] == result.version
        # A delta is made from that copy, and a restore loads it.
        server.engine.load_errors = [OSError("disk"), None]
        with pytest.raises(EngineFailure, match="is live again"):
            server.client.reset()
        assert server.engine.loaded[-1] == first.digest

    def test_durable_waits_for_the_copy(self, server: Server, kind: Kind, first: Weights) -> None:
        sender = sender_to(server.client, kind, first)
        assert sender.publish(named(first.tensors), None, durable=True).durable
        assert server.client.policy()["durable"]

    def test_tensors_are_cast_as_http_casts_them(
        self, server: Server, kind: Kind, first: Weights
    ) -> None:
        wide = {name: tensor.float() * 1.001 for name, tensor in first.tensors.items()}
        uploaded = server.client.reload(lazy(wide))
        sender = sender_to(server.client, kind, first)
        assert sender.publish(named(wide), None).digest == uploaded.digest

    def test_values_that_are_not_finite_are_refused(
        self, server: Server, kind: Kind, first: Weights, second: Weights
    ) -> None:
        sender = sender_to(server.client, kind, first)
        before = sender.publish(named(first.tensors), None)
        for bad in (float("nan"), float("inf")):
            with pytest.raises(WeightsRejected, match="not finite") as caught:
                sender.publish(named(changed(second.tensors, NORM, bad)), None)
            assert [problem.where for problem in caught.value.problems] == [NORM]
        assert state_of(server) == (before.version, before.digest)
        assert not server.engine.paused
        # What was refused has used up no number.
        again = sender.publish(named(second.tensors), None)
        assert (again.version, again.digest) == (before.version + 1, second.digest)

    def test_a_failed_load_restores_the_version_before(
        self, server: Server, kind: Kind, first: Weights, second: Weights
    ) -> None:
        before = make_live(server.client, first)
        sender = sender_to(server.client, kind, first)
        server.engine.channel_errors = [EngineFailure("a worker tripped")]
        with pytest.raises(EngineFailure, match=f"version {before} is live again"):
            sender.publish(named(second.tensors), None)
        assert server.engine.loaded[-1] == first.digest
        assert state_of(server) == (before, first.digest)
        assert sender.publish(named(second.tensors), None).digest == second.digest

    def test_a_trainer_that_fails_half_way_changes_nothing(
        self, server: Server, kind: Kind, first: Weights, second: Weights
    ) -> None:
        before = make_live(server.client, first)
        sender = sender_to(server.client, kind, first)

        def fail() -> torch.Tensor:
            raise ArithmeticError("the trainer's own")

        tensors = [*named(second.tensors)[:-1], (list(second.tensors)[-1], fail)]
        with pytest.raises(ArithmeticError):
            sender.publish(tensors, None)
        assert state_of(server) == (before, first.digest)
        assert sender.publish(named(second.tensors), None).digest == second.digest


@pytest.mark.parametrize("kind", KINDS)
class TestLayout:
    @pytest.mark.parametrize(
        ("change", "where"),
        [
            (lambda t: without(t, [NORM]), NORM),
            (lambda t: {**t, "model.extra": t[NORM]}, "model.extra"),
            (lambda t: {**t, NORM: t[NORM][:-1]}, NORM),
            (lambda t: {**t, NORM: t[NORM].float()}, NORM),
            (lambda t: {**t, "lm_head.weight": t[EMBEDDING]}, "lm_head.weight"),
        ],
        ids=["missing", "extra", "shape", "dtype", "tied"],
    )
    def test_tensors_that_do_not_fit_are_refused(
        self, server: Server, kind: Kind, base: Weights, change: Any, where: str
    ) -> None:
        with pytest.raises(WeightsRejected) as caught:
            server.client.open_channel(kind, specs_of(change(base.tensors)))
        assert [problem.where for problem in caught.value.problems] == [where]
        assert "tito_channel_open" not in server.engine.calls

    def test_a_tensor_is_listed_once(self, server: Server, kind: Kind, base: Weights) -> None:
        specs = specs_of(base.tensors)
        with pytest.raises(WeightsRejected, match="repeated"):
            server.client.open_channel(kind, [*specs, specs[0]])


class TestOwnership:
    def test_only_the_holder_of_the_lease_has_a_channel(
        self, server: Server, first: Weights
    ) -> None:
        sender = sender_to(server.client, "ipc", first)
        with server.client.lease(holder="a") as lease:
            sender.open(lease.fence)
            with pytest.raises(Conflict, match="leased to 'a'"):
                sender_to(server.client, "ipc", first).open(None)
            assert sender.publish(named(first.tensors), lease.fence).digest == first.digest

    def test_a_channel_ends_with_its_lease(
        self, server: Server, first: Weights, second: Weights
    ) -> None:
        before = own_shared_memory()
        with server.client.lease(holder="a") as lease:
            opened = server.client.open_channel("ipc", specs_of(first.tensors), fence=lease.fence)
            assert own_shared_memory() > before
        eventually(lambda: own_shared_memory() == before)
        with pytest.raises(Conflict, match=r"lease \d+ has ended"):
            server.client.await_channel(opened.id, 0.0)
        with pytest.raises(Conflict, match="has ended"):
            server.client.reload_channel(opened.id)
        with server.client.lease(holder="b") as lease:
            sender = sender_to(server.client, "ipc", second)
            assert sender.publish(named(second.tensors), lease.fence).digest == second.digest

    def test_a_later_channel_takes_the_place_of_an_earlier_one(
        self, server: Server, first: Weights
    ) -> None:
        earlier = server.client.open_channel("ipc", specs_of(first.tensors))
        server.client.open_channel("ipc", specs_of(first.tensors))
        with pytest.raises(Conflict, match="another one was opened"):
            server.client.reload_channel(earlier.id)

    def test_a_sender_opens_another_when_its_own_has_ended(
        self, server: Server, first: Weights
    ) -> None:
        sender = sender_to(server.client, "ipc", first)
        sender.open(None)
        server.client.open_channel("ipc", specs_of(first.tensors))
        assert sender.publish(named(first.tensors), None).digest == first.digest

    def test_a_channel_that_never_was(self, server: Server) -> None:
        with pytest.raises(NotFound):
            server.client.reload_channel("0" * 32)
        answer = post(server.url, {"channel": "no hex"}, path="/reload")
        assert answer.status_code == 422
        assert answer.json()["error"]["problems"][0]["where"] == "channel"

    def test_closing_gives_the_memory_back(self, server: Server, first: Weights) -> None:
        before = own_shared_memory()
        sender = sender_to(server.client, "ipc", first)
        sender.publish(named(first.tensors), None)
        sender.close()
        eventually(lambda: own_shared_memory() == before)
        # What was live had its copy first.
        assert server.client.policy()["durable"]

    def test_what_a_tensor_may_say(self, server: Server, first: Weights) -> None:
        tensors: list[dict[str, Any]] = [
            {"name": s.name, "dtype": s.dtype, "shape": list(s.shape)}
            for s in specs_of(first.tensors)
        ]
        tensors[1] = {"name": "n" * 2000, "dtype": "F" * 2000, "shape": [1] * 2000, "offset": 0}
        asked = {"kind": "ipc", "tensors": tensors}
        answer = post(server.url, asked, path="/policies/default/channel")
        assert answer.status_code == 422
        assert len(answer.content) < 2000
        problems = {p["where"]: p["allowed"] for p in answer.json()["error"]["problems"]}
        assert problems["tensors[1].offset"] == "name, dtype, shape"
        assert problems.keys() == {
            f"tensors[1].{field}" for field in ("name", "dtype", "shape", "offset")
        }

    def test_adapters_have_no_channels(self, server: Server, first: Weights) -> None:
        opened = server.client.open_channel("ipc", specs_of(first.tensors))
        answer = post(server.url, {"channel": opened.id}, path="/reload?policy=mine")
        assert answer.status_code == 422


KILLED_TRAINER = """
import sys, time
from tests.rollout_server.channel_support import named, sender_to
from tests.rollout_server.support import base_weights, sharpened
from shared.client import RolloutClient
from pathlib import Path

url, model, kind, fence = sys.argv[1:]
weights = sharpened(base_weights(Path(model)), 1)
sender = sender_to(RolloutClient(url), kind, weights)
def stall():
    print("in the middle", flush=True)
    time.sleep(600)
tensors = named(weights.tensors)
half = len(tensors) // 2
tensors[half] = (tensors[half][0], stall)
import shared.channel, trainer.channel_pieces
shared.channel.PIECE_BYTES = 1 << 12  # so that something is sent before
trainer.channel_pieces._BATCH_BYTES = 1
sender.publish(tensors, int(fence))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_killed_in_the_middle_leaves_nothing_behind(
    server: Server, kind: Kind, tiny_model: Path, first: Weights, second: Weights
) -> None:
    before = make_live(server.client, second)
    memory = own_shared_memory()
    lease = server.client.lease(holder="run")
    lease.__enter__()
    command = [sys.executable, "-c", KILLED_TRAINER, server.url, str(tiny_model), kind]
    trainer = subprocess.Popen([*command, str(lease.fence)], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"in the middle\n"
    if kind == "nccl":
        eventually(lambda: server.client.policy()["state"] == "staging")
    trainer.kill()
    trainer.wait()
    # The same run, resumed: it takes the lease over and goes on at once.
    with server.client.lease(holder="run") as own:
        sender = sender_to(server.client, kind, first)
        eventually(lambda: _opens(sender, own.fence), seconds=30)
        assert state_of(server) == (before, second.digest)
        assert sender.publish(named(first.tensors), own.fence).digest == first.digest
        sender.close()
    lease.__exit__()
    eventually(lambda: own_shared_memory() == memory)
    assert not staged_folders(server.staging)


def _opens(sender: Any, fence: int) -> bool:
    try:
        sender.open(fence)
    except Conflict:  # the server has not noticed yet
        return False
    return True


class TestNobodyWaitsForEver:
    def test_a_trainer_that_never_joins(self, server: Server, first: Weights) -> None:
        server.client.open_channel("nccl", specs_of(first.tensors))
        sender = sender_to(server.client, "ipc", first)
        assert sender.publish(named(first.tensors), None).digest == first.digest

    def test_who_asks_during_a_publish_is_answered_after_it(
        self, server: Server, first: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        goes_on, verify = threading.Event(), WorkerChannel._do_verify

        def later(channel: WorkerChannel) -> dict[str, Any]:
            goes_on.wait(30)
            return verify(channel)

        monkeypatch.setattr(WorkerChannel, "_do_verify", later)
        opened = server.client.open_channel("ipc", specs_of(first.tensors))
        with ThreadPoolExecutor(2) as pool:
            publish = pool.submit(server.client.reload_channel, opened.id)
            eventually(lambda: server.client.await_channel(opened.id, 0.0) == "busy")
            asked = pool.submit(server.client.await_channel, opened.id, 60.0)
            assert not wait([asked], 0.3).done
            goes_on.set()
            assert publish.result(30).version == 1
            assert asked.result(30) == "open"

    def test_a_transfer_that_does_not_come(
        self, tiny_model: Path, tmp_path: Path, first: Weights
    ) -> None:
        settings = ServerSettings(model=str(tiny_model), staging_dir=tmp_path, channel_seconds=0.5)
        with running(settings, lambda _: ChannelEngine()) as at:
            opened = at.client.open_channel("nccl", specs_of(first.tensors))
            with pytest.raises(Conflict, match="did not join"):
                at.client.reload_channel(opened.id)
            with pytest.raises(Conflict, match="did not join"):
                at.client.await_channel(opened.id, 0.0)
            sender = sender_to(at.client, "nccl", first)
            sender.open(None)
            assert at.client.await_channel(sender.id, 60.0) == "open"
            with pytest.raises(EngineFailure, match="worker 0"):
                at.client.reload_channel(sender.id)
            with pytest.raises(Conflict, match="broke off"):
                at.client.await_channel(sender.id, 0.0)
            assert at.client.policy()["history"][0]["state"] == "rejected"

    def test_the_servers_refusal_reaches_a_trainer_that_sends(
        self, server: Server, first: Weights
    ) -> None:
        sender = sender_to(server.client, "nccl", first)
        with server.client.lease(holder="a") as lease:
            sender.open(lease.fence)
            httpx.delete(f"{server.url}/policies/default/lease").raise_for_status()
            with pytest.raises(Conflict):
                sender.publish(named(first.tensors), lease.fence)


class TestClosingInTheMiddle:
    def test_what_is_being_loaded_becomes_live_and_has_its_copy(
        self, server: Server, first: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loads, goes_on, load = threading.Event(), threading.Event(), Worker.tito_buffer_load

        def later(worker: Worker, name: str) -> dict[str, int]:
            loads.set()
            goes_on.wait(30)
            return load(worker, name)

        monkeypatch.setattr(Worker, "tito_buffer_load", later)
        opened = server.client.open_channel("ipc", specs_of(first.tensors))
        with ThreadPoolExecutor(1) as pool:
            publish = pool.submit(server.client.reload_channel, opened.id, durable=True)
            assert loads.wait(30)
            server.client.close_channel(opened.id)
            with pytest.raises(Conflict, match="its owner has closed it"):
                server.client.await_channel(opened.id, 0.0)
            goes_on.set()
            result = publish.result(30)
        assert (result.version, result.durable) == (1, True)
        assert server.engine.calls.count("load") == 0, "nothing had to be restored"
        eventually(lambda: own_shared_memory() == 0)

    def test_before_that_it_is_given_up(
        self, server: Server, first: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        verifies, goes_on, verify = threading.Event(), threading.Event(), WorkerChannel._do_verify

        def later(channel: WorkerChannel) -> dict[str, Any]:
            verifies.set()
            goes_on.wait(30)
            return verify(channel)

        monkeypatch.setattr(WorkerChannel, "_do_verify", later)
        opened = server.client.open_channel("ipc", specs_of(first.tensors))
        with ThreadPoolExecutor(1) as pool:
            publish = pool.submit(server.client.reload_channel, opened.id)
            assert verifies.wait(30)
            server.client.close_channel(opened.id)
            with pytest.raises(Conflict, match="closed; nothing has changed"):
                publish.result(30)
        goes_on.set()
        assert server.client.info().version == 0
        assert "tito_buffer_load" not in server.engine.calls
        eventually(lambda: own_shared_memory() == 0)

    def test_nothing_is_loaded_after_it(
        self, server: Server, first: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It waits for its turn, which another publish has."""
        before = make_live(server.client, first)
        loads, goes_on, load = threading.Event(), threading.Event(), server.engine.load

        async def later(paths: Any) -> None:
            loads.set()
            await asyncio.to_thread(goes_on.wait, 30)
            await load(paths)

        monkeypatch.setattr(server.engine, "load", later)
        opened = server.client.open_channel("ipc", specs_of(first.tensors))
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(server.client.reload, lazy(sharpened(first, 2).tensors))
            assert loads.wait(30)
            publish = pool.submit(server.client.reload_channel, opened.id)
            states = ["verified", "applying"]
            eventually(
                lambda: (
                    sorted(i["state"] for i in server.client.policy()["history"][:2])
                    == sorted(states)
                )
            )
            server.client.close_channel(opened.id)
            goes_on.set()
            assert other.result(30).version == before + 1
            with pytest.raises(Conflict, match="has ended"):
                publish.result(30)
        assert "tito_buffer_load" not in server.engine.calls


class TestCopies:
    def test_a_copy_that_does_not_end_is_given_up(
        self, server: Server, first: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hung = threading.Event()
        monkeypatch.setattr("rollout_server.worker_links._SPILL_S", 0.2)
        monkeypatch.setattr(WorkerChannel, "_do_spill", lambda *_, **__: hung.wait(30))
        sender = sender_to(server.client, "ipc", first)
        result = sender.publish(named(first.tensors), None, durable=True)
        hung.set()
        assert not result.durable
        assert "not written in" in server.client.policy()["history"][0]["reason"]
        assert server.client.reload(lazy(sharpened(first, 2).tensors)).version == 2

    def test_an_engine_that_dies_before_the_copy_goes_back_to_what_there_is(
        self, server: Server, first: Weights, second: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = make_live(server.client, first)
        sender = sender_to(server.client, "ipc", first)
        engine = server.engine
        monkeypatch.setattr(
            "rollout_server.worker_channel.WorkerChannel._do_spill",
            lambda *_, **__: _die(engine),
        )
        lost = sender.publish(named(second.tensors), None)
        assert (lost.durable, lost.version) == (False, before + 1)
        eventually(lambda: len(server.engines) == 2 and server.engine.version == before)
        eventually(lambda: state_of(server) == (before, first.digest))
        history = server.client.policy()["history"]
        assert [item["state"] for item in history[:2]] == ["rolled_back", "live"]
        monkeypatch.undo()
        # Samples were labelled with the number that was lost: it never names other weights.
        third = sharpened(first, 3)
        again = sender.publish(named(third.tensors), None)
        assert (again.version, again.digest) == (lost.version + 1, third.digest)

    def test_a_buffer_that_is_written_too_early_is_not_kept(
        self, server: Server, first: Weights, second: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = make_live(server.client, first)
        sender = sender_to(server.client, "ipc", first)
        from rollout_server.worker_channel import WorkerChannel

        plain = WorkerChannel._do_spill

        def spill(channel: Any, path: str) -> str:
            channel.flat[:2] += 1
            return plain(channel, path)

        monkeypatch.setattr(WorkerChannel, "_do_spill", spill)
        sender.publish(named(second.tensors), None)
        eventually(lambda: state_of(server) == (before, first.digest))
        eventually(lambda: server.engine.loaded[-1] == first.digest)
        eventually(lambda: "wrote into" in str(server.client.policy()["history"][0]["reason"]))
        assert server.client.policy()["history"][0]["state"] == "rolled_back"

    def test_a_full_disk_leaves_the_version_live(
        self, server: Server, first: Weights, second: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = make_live(server.client, first)
        sender = sender_to(server.client, "ipc", first)

        def full(*_: Any, **__: Any) -> str:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("rollout_server.worker_channel.WorkerChannel._do_spill", full)
        result = sender.publish(named(second.tensors), None, durable=True)
        assert not result.durable
        policy = server.client.policy()
        assert (policy["version"], policy["durable_version"]) == (result.version, before)
        assert "No space left" in policy["history"][0]["reason"]
        # The next failure leads back to what there is a copy of.
        server.engine.load_errors = [OSError("torn"), None]
        with pytest.raises(EngineFailure, match=f"version {before} is live again"):
            server.client.reload(lazy(sharpened(first, 3).tensors))
        assert server.engine.loaded[-1] == first.digest


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("ipc", "rollout_server.worker_buffer.os.posix_fallocate"),
     ("nccl", "rollout_server.worker_channel.Receiver")],
)  # fmt: skip
def test_workers_that_refuse_keep_nothing(
    server: Server, kind: Kind, missing: str, first: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = own_shared_memory()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(missing, full)
        with pytest.raises(EngineFailure, match="No space left"):
            server.client.open_channel(kind, specs_of(first.tensors))
    eventually(lambda: own_shared_memory() == before)
    sender = sender_to(server.client, kind, first)
    assert sender.publish(named(first.tensors), None).digest == first.digest
    sender.close()


def test_half_an_answer_is_no_answer() -> None:
    async def ask() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            link = _Link(3, *await asyncio.open_unix_connection(sock=ours))
            theirs.sendall(b'{"ok": ')
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(EngineFailure, match="worker 3 has gone"):
                await link.ask({"do": "verify"})
            link.close()

    asyncio.run(ask())


def _die(engine: ChannelEngine) -> str:
    time.sleep(0.2)
    engine.failure = "killed by the test"
    raise EngineDied("killed by the test")


def test_ipc_is_for_this_host() -> None:
    from starlette.requests import Request

    from rollout_server.routes.channels import _is_local

    def request(client: str, server: str) -> Request:
        return Request({"type": "http", "client": (client, 5), "server": (server, 8300)})

    assert _is_local(request("127.0.0.1", "127.0.0.1"))
    assert _is_local(request("10.1.2.3", "10.1.2.3"))
    assert not _is_local(request("10.1.2.4", "10.1.2.3"))


def test_an_old_number_opens_none(server: Server) -> None:
    headers = {FENCE_HEADER: "7"}
    answer = post(
        server.url,
        {"kind": "ipc", "tensors": [{"name": "a", "dtype": "BF16", "shape": [1]}]},
        path="/policies/default/channel",
        headers=headers,
    )
    assert answer.status_code == 409


class _Plan:
    """A plan that notes what it is asked; it knows one model, at one place."""

    made: ClassVar[list[_Plan]] = []

    def __init__(self, different: list[str]) -> None:
        self.applied = 0
        self.different = different

    @classmethod
    def recorded(cls, model: torch.nn.Module, _: Any) -> _Plan:
        if isinstance(model, torch.nn.Embedding):
            raise ValueError("it is not plain")
        cls.made.append(cls([]))
        return cls.made[-1]

    def apply(self, _: Any) -> None:
        self.applied += 1

    def differing(self, _: Any) -> list[str]:
        return self.different


class TestPlans:
    @pytest.fixture
    def worker(self, monkeypatch: pytest.MonkeyPatch) -> Worker:
        monkeypatch.setattr("rollout_server.load_plan.LoadPlan", _Plan)
        monkeypatch.setattr(_Plan, "made", [])
        worker = Worker()
        worker._tito_plan = None
        return worker

    def test_the_first_load_makes_the_plan_of_the_next(self, worker: Worker) -> None:
        model = torch.nn.Linear(2, 2)
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        assert all(worker._tito_planned({}) for _ in range(3))
        (plan,) = _Plan.made
        assert plan.applied == 2
        # Copies into a place that the model has left would succeed, and change nothing.
        model.weight = torch.nn.Parameter(model.weight.detach().clone())
        assert worker._tito_planned({})
        assert len(_Plan.made) == 2

    def test_a_parameter_that_differs_afterwards_is_an_error(self, worker: Worker) -> None:
        model = torch.nn.Linear(2, 2)
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        assert worker._tito_planned({})
        _Plan.made[0].different = ["weight"]
        with pytest.raises(RuntimeError, match="first weight"):
            worker._tito_planned({})

    def test_a_model_without_a_plan_loads_as_uploads_do(self, worker: Worker) -> None:
        model = torch.nn.Embedding(2, 2)
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        assert not worker._tito_planned({})
        assert not worker._tito_planned({})

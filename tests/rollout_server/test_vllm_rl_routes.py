"""vLLM's own routes for trainers: owners, one writer, versions, and what a vanished trainer leaves.

On an engine in memory, but with the class that writes received tensors being the real one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_server.engine import EngineDied
from rollout_server.settings import ServerSettings
from rollout_server.spool import Spool
from rollout_server.tenure import Tenure
from rollout_server.vllm_control import UpdateInfo
from rollout_server.weight_receiver import Spill
from shared.errors import Conflict, EngineFailure, WeightsRejected
from shared.protocol import FENCE_HEADER, PauseMode
from tests.rollout_server.engines import (
    Running,
    running,
    staged_folders,
)
from tests.rollout_server.fakes import error_of, tokens_file
from tests.rollout_server.support import (
    FakeEngine,
    Tensors,
    Weights,
    eventually,
    lazy,
)

ALICE, BOB, OPS, EVE, ADA = (
    f"{name}-token-0123456789" for name in ("alice", "bob", "ops", "eve", "ada")
)
CALLERS = [
    ("alice", ALICE, ["rollout", "publish:default"]),
    ("bob", BOB, ["rollout", "publish:default"]),
    ("ops", OPS, ["admin", "publish:*", "rollout"]),
    ("eve", EVE, ["rollout"]),
    ("ada", ADA, ["admin"]),
]
WRITES = [
    "/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/start_weight_update",
    "/init_weight_transfer_engine", "/update_weights", "/finish_weight_update",
]  # fmt: skip
ROUTES = {("POST", path) for path in WRITES} | {
    ("GET", path) for path in ("/is_paused", "/is_sleeping", "/get_world_size", "/server_info")
}


@dataclass
class TransferEngine(FakeEngine):
    """Has vLLM's controls too; what arrives is what the test puts on the wire.

    Attributes:
        wire: tensors that a trainer would send.
        hang: receiving waits for it.
        receive_errors: raised by the next receives.
        sleep_errors, wake_errors: raised by the next calls to sleep, and to wake up.
    """

    hands_memory_back = True

    wire: Tensors = field(default_factory=dict)
    hang: threading.Event = field(default_factory=threading.Event)
    receive_errors: list[Exception] = field(default_factory=list)
    sleep_errors: list[Exception] = field(default_factory=list)
    wake_errors: list[Exception] = field(default_factory=list)
    spill: Spill | None = None
    modes: list[PauseMode] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hang.set()

    async def pause(self, *modes: Any) -> None:
        self.modes.extend(modes)
        await super().pause()

    def world_size(self, *, include_dp: bool) -> int:
        return 4 if include_dp else 2

    async def describe(self, *, as_json: bool) -> Any:
        return {"weight_transfer_config": {"backend": "fake"}} if as_json else "config"

    async def reset_prefix_cache(self, *, running: bool, external: bool) -> bool:
        self.calls.append(f"reset {running} {external}")
        return True

    async def sleep(self, level: int, mode: PauseMode) -> None:
        self.calls.append(f"sleep {level} {mode.value}")
        self.paused = True
        if self.sleep_errors:
            raise self.sleep_errors.pop(0)

    async def wake_up(self, tags: Sequence[str]) -> bool:
        self.calls.append(f"wake {' '.join(tags)}")
        if self.wake_errors:
            raise self.wake_errors.pop(0)
        self.paused = tags == ["weights"]
        return not self.paused

    async def init_transfer(self, info: dict[str, Any]) -> None:
        self.calls.append(f"init {info}")

    async def begin_receiving(self, path: Path, header_bytes: int, max_bytes: int) -> None:
        self.spill = Spill(path, header_bytes, max_bytes)

    async def receive(self, info: UpdateInfo) -> None:
        while not self.hang.is_set():  # noqa: ASYNC110 - opened from another thread
            await asyncio.sleep(0.005)
        if self.receive_errors:
            raise self.receive_errors.pop(0)
        assert self.spill is not None
        assert isinstance(info, dict)
        self.spill.load_weights((name, self.wire[name]) for name in info["names"])

    async def end_receiving(self) -> None:
        assert self.spill is not None
        self.spill.finish()
        self.spill = None

    async def abandon_receiving(self) -> None:
        self.calls.append("abandon")
        self.spill = None


@dataclass(frozen=True)
class Server:
    """A server whose engines are in memory; the newest is the one that runs."""

    up: Running
    engines: list[TransferEngine]
    staging: Path

    @property
    def engine(self) -> TransferEngine:
        return self.engines[-1]

    def post(self, path: str, token: str = ALICE, **request: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}", **request.pop("headers", {})}
        return httpx.post(f"{self.up.url}{path}", headers=headers, timeout=60, **request)

    def get(self, path: str, token: str = ALICE) -> Any:
        headers = {"authorization": f"Bearer {token}"}
        answer = httpx.get(f"{self.up.url}{path}", headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def update(self, *names: str, token: str = ALICE) -> httpx.Response:
        body = {"update_info": {"names": list(names)}}
        return self.post("/update_weights", token, json=body)

    @property
    def live(self) -> tuple[int, str]:
        policy = self.get("/policies/default")
        return policy["version"], policy["digest"]

    @property
    def holder(self) -> str | None:
        lease = self.get("/policies/default")["lease"]
        return None if lease is None else lease["owner"]

    def leased(self, seconds: float) -> str:
        """Number of a lease that nobody will renew."""
        asked = {"holder": "dead", "ttl_seconds": seconds}
        headers = {"accept": "application/json"}
        answer = self.post("/policies/default/lease", json=asked, headers=headers)
        return str(answer.json()["fence"])

    def rolls(self) -> bool:
        """Whether a rollout is answered within a moment."""
        body = {"prompts": [[5, 6]], "group_size": 1, "max_tokens": 2}
        try:
            answer = httpx.post(
                f"{self.up.url}/rollout",
                json=body,
                headers={"authorization": f"Bearer {EVE}", "accept": "application/json"},
                timeout=0.5,
            )
        except httpx.ReadTimeout:
            return False
        return answer.status_code == 200


def start(tiny_model: Path, folder: Path, first: Weights, **settings: Any) -> Any:
    """A server with a fake engine that can receive weights."""
    engines: list[TransferEngine] = []

    def build(_: ServerSettings) -> TransferEngine:
        engines.append(TransferEngine(wire=first.tensors))
        return engines[-1]

    chosen: dict[str, Any] = {"weight_transfer": "fake", **settings}
    full = ServerSettings(
        model=str(tiny_model),
        tokens_file=tokens_file(folder, *CALLERS),
        staging_dir=folder / "staging",
        viewer=False,
        **chosen,
    )
    up = running(full, build, token=OPS)
    return up, engines


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path, first: Weights) -> Iterator[Server]:
    up, engines = start(tiny_model, tmp_path, first)
    with up as live:
        yield Server(live, engines, tmp_path / "staging")


@pytest.fixture
def hasty(tiny_model: Path, tmp_path: Path, first: Weights) -> Iterator[Server]:
    """Takes silence of three seconds, a long time even on a busy machine, for the end."""
    up, engines = start(tiny_model, tmp_path, first, rl_silence=3.0)
    with up as live:
        yield Server(live, engines, tmp_path / "staging")


def assert_nothing_is_left(server: Server) -> None:
    assert server.holder is None
    eventually(lambda: not staged_folders(server.staging))
    assert server.post("/start_weight_update").status_code == 200  # another may begin


def test_an_update_that_finds_no_room_is_not_begun(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "stage", full)
        assert server.post("/start_weight_update").status_code == 507
    assert server.holder is None
    assert server.post("/start_weight_update").status_code == 200


class TestAccess:
    def test_every_route_asks_for_its_scope(self, server: Server) -> None:
        for path in [*WRITES, "/server_info"]:
            method = "GET" if path == "/server_info" else "POST"
            url = f"{server.up.url}{path}"
            assert httpx.request(method, url).status_code == 401, path
            headers = {"authorization": f"Bearer {EVE}"}
            assert httpx.request(method, url, headers=headers).status_code == 403, path
        for path in ("/is_paused", "/is_sleeping", "/get_world_size"):
            assert httpx.get(f"{server.up.url}{path}").status_code == 401
            server.get(path, EVE)

    def test_they_can_be_left_out(self, tiny_model: Path, tmp_path: Path, first: Weights) -> None:
        up, _ = start(tiny_model, tmp_path, first, rl_routes=False)
        with up as live:
            for method, path in ROUTES:
                assert httpx.request(method, f"{live.url}{path}").status_code == 404

    def test_without_a_backend_there_are_no_updates(
        self, tiny_model: Path, tmp_path: Path, first: Weights
    ) -> None:
        up, engines = start(tiny_model, tmp_path, first, weight_transfer=None)
        with up as live:
            server = Server(live, engines, tmp_path)
            answer = server.post("/start_weight_update")
            assert answer.status_code == 409
            assert "--weight-transfer" in error_of(answer)["message"]

    @pytest.mark.parametrize(
        ("backend", "why"), [("ipc", "pickles"), ("sparse_nccl", "live weights")]
    )
    def test_backends_that_are_not_safe_are_refused(self, backend: str, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            ServerSettings(model="none", weight_transfer=backend)

    def test_what_trainers_look_up(self, server: Server) -> None:
        assert server.get("/get_world_size") == {"world_size": 4}
        assert server.get("/get_world_size?include_dp=false") == {"world_size": 2}
        info = server.get("/server_info?config_format=json")
        assert info["vllm_config"]["weight_transfer_config"] == {"backend": "fake"}
        assert info.keys() == {"vllm_config", "vllm_env", "system_env"}
        assert server.post("/reset_prefix_cache").json() == {"success": True}
        server.post("/reset_prefix_cache?reset_running_requests=true")
        assert server.engine.calls[-2:] == ["reset False False", "reset True False"]
        wrong = server.post("/pause?mode=gently")
        assert wrong.status_code == 422
        assert error_of(wrong)["problems"][0]["where"] == "mode"


class TestPauses:
    @pytest.mark.parametrize(
        ("mode", "ours"), [("abort", "abort"), ("wait", "drain"), ("keep", "keep")]
    )
    def test_a_pause_has_an_owner(self, server: Server, mode: str, ours: str) -> None:
        assert server.get("/is_paused") == {"is_paused": False}
        assert server.post(f"/pause?mode={mode}&clear_cache=false").json() == {"status": "paused"}
        assert server.engine.modes[-1] == ours
        assert server.get("/is_paused") == {"is_paused": True}
        assert not server.rolls()
        for path in ("/resume", "/pause", "/sleep", "/wake_up"):
            answer = server.post(path, BOB)
            assert answer.status_code == 409, path
            assert error_of(answer)["details"] == {"owner": "alice"}
        assert not server.rolls()
        assert server.post("/resume").json() == {"status": "resumed"}
        assert server.rolls()

    def test_a_resume_without_a_pause_is_fine(self, server: Server) -> None:
        assert server.post("/resume").status_code == 200
        assert server.rolls()

    def test_an_admin_ends_anybodys(self, server: Server) -> None:
        server.post("/pause")
        assert server.post("/pause", ADA).status_code == 403
        assert server.post("/resume", ADA).status_code == 200
        assert server.rolls()

    def test_a_publish_in_between_does_not_end_it(self, server: Server, second: Weights) -> None:
        server.post("/pause?mode=keep")
        server.up.client.reload(lazy(second.tensors))
        assert server.live == (1, second.digest)
        assert not server.rolls()
        server.post("/resume")
        assert server.rolls()

    def test_a_new_engine_comes_up_paused(self, server: Server) -> None:
        server.post("/pause?mode=keep")
        server.engine.failure = "killed"
        eventually(lambda: len(server.engines) == 2 and server.engine.version == 0, 30)
        server.up.client.wait_ready(30)
        assert not server.rolls()
        assert server.post("/resume").status_code == 200
        eventually(server.rolls)

    def test_a_pause_that_fails_holds_nothing(self, server: Server) -> None:
        server.engine.pause_errors.append(EngineFailure("no"))
        assert server.post("/pause").status_code == 500
        assert server.get("/is_paused") == {"is_paused": False}
        assert server.rolls()

    @pytest.mark.parametrize("errors", ["resume", "pause and resume"])
    def test_an_engine_that_does_not_resume_is_replaced(self, server: Server, errors: str) -> None:
        engine, trips = server.engine, RuntimeError("it tripped over a cable")
        if errors == "resume":
            assert server.post("/pause").status_code == 200
        else:
            engine.pause_errors.append(trips)
        engine.resume_errors.append(trips)
        answer = server.post("/resume" if errors == "resume" else "/pause")
        assert answer.status_code == (200 if errors == "resume" else 500)
        assert "shutdown" in engine.calls
        assert len(server.engines) == 2
        assert server.rolls()

    def test_who_is_silent_for_too_long_has_gone(self, hasty: Server) -> None:
        hasty.post("/pause")
        eventually(lambda: not hasty.get("/is_paused", BOB)["is_paused"], 30)
        assert hasty.rolls()

    def test_signs_of_life_put_the_end_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def expire(_: str) -> None:
            raise AssertionError("it has an hour to live")

        async def keep() -> None:
            loop = asyncio.get_running_loop()
            call_later, ends = loop.call_later, list[asyncio.TimerHandle]()

            def noted(*when: Any) -> asyncio.TimerHandle:
                ends.append(call_later(*when))
                return ends[-1]

            monkeypatch.setattr(loop, "call_later", noted)
            tenure = Tenure(3600.0, expire)
            for _ in range(3):
                tenure.keep("alice")
            assert [end.cancelled() for end in ends] == [True, True, False]
            assert ends[0].when() <= ends[-1].when()
            tenure.keep("alice", for_good=True)
            assert len(ends) == 3
            assert ends[-1].cancelled()
            assert tenure.owner == "alice"

        asyncio.run(keep())


class TestSleep:
    def test_nothing_is_answered_while_it_sleeps(self, server: Server, second: Weights) -> None:
        assert server.post("/sleep?level=1&mode=keep").json() == {"status": "sleeping", "level": 1}
        assert server.get("/is_sleeping") == {"is_sleeping": True}
        assert server.engine.calls[-1] == "sleep 1 keep"
        body = {"prompts": [[5]], "max_tokens": 2}
        asleep = server.post("/rollout", json=body)
        assert asleep.status_code == 503
        assert "wake_up" in asleep.text
        assert int(asleep.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.up.url}/readyz").status_code == 503
        assert server.post("/resume").status_code == 409
        assert server.post("/wake_up", BOB).status_code == 409
        assert server.post("/wake_up").json() == {"status": "awake", "tags": None}
        assert server.get("/is_sleeping") == {"is_sleeping": False}
        assert server.rolls()
        server.up.client.reload(lazy(second.tensors))
        assert server.rolls()

    @pytest.mark.parametrize("level", [1, 2])
    def test_sleep_may_be_asked_for_again(
        self, server: Server, second: Weights, level: int
    ) -> None:
        server.up.client.reload(lazy(second.tensors))
        headers = {FENCE_HEADER: server.leased(seconds=60.0)}
        for _ in range(2):
            assert server.post(f"/sleep?level={level}", headers=headers).status_code == 200
        assert server.engine.calls.count(f"sleep {level} abort") == 1
        # Anything else is not what there is already.
        assert server.post(f"/sleep?level={3 - level}", headers=headers).status_code == 503
        assert server.post(f"/sleep?level={level}").status_code == 503
        assert server.post("/wake_up?tags=weights").json()["status"] == "sleeping"
        assert server.post(f"/sleep?level={level}", headers=headers).status_code == 200
        assert server.engine.calls.count(f"sleep {level} abort") == 2
        assert server.post("/wake_up").json()["status"] == "awake"
        assert server.rolls()

    def test_weights_that_were_dropped_come_back_first(
        self, server: Server, second: Weights
    ) -> None:
        server.up.client.reload(lazy(second.tensors))
        server.post("/sleep?level=2")
        server.post("/wake_up")
        assert server.engine.calls[-4:] == ["wake weights", "load", "wake kv_cache", "resume"]
        assert server.engine.loaded[-1] == second.digest

    def test_weights_published_in_between_stay(self, server: Server, first: Weights) -> None:
        server.post("/sleep?level=2")
        early = server.post("/wake_up?tags=kv_cache")
        assert early.status_code == 422
        assert server.post("/wake_up?tags=everything").status_code == 422
        assert server.post("/wake_up?tags=weights").json() == {
            "status": "sleeping", "tags": ["weights"],
        }  # fmt: skip
        server.post("/start_weight_update")
        server.update(*first.tensors)
        assert server.post("/finish_weight_update").status_code == 200
        assert not server.rolls()
        assert server.post("/wake_up?tags=kv_cache").json()["status"] == "awake"
        assert server.engine.loaded == [first.digest]
        assert server.rolls()

    def test_weights_that_do_not_come_back_cost_the_engine(
        self, server: Server, second: Weights
    ) -> None:
        server.up.client.reload(lazy(second.tensors))
        server.post("/sleep?level=2")
        server.engine.load_errors.append(EngineFailure("torn"))
        answer = server.post("/wake_up")
        assert answer.status_code == 500
        assert "replaced" in error_of(answer)["message"]
        assert len(server.engines) == 2
        assert server.engine.loaded == [second.digest]
        assert server.rolls()

    def test_an_engine_that_dies_asleep_is_replaced_by_one_awake(self, server: Server) -> None:
        server.post("/sleep")
        server.engine.failure = "killed"
        eventually(lambda: len(server.engines) == 2 and server.engine.version == 0, 30)
        eventually(lambda: httpx.get(f"{server.up.url}/readyz").status_code == 200)
        assert server.post("/wake_up").json()["status"] == "awake"
        eventually(server.rolls)

    def test_info_tells_whether_it_helps(
        self, server: Server, tiny_model: Path, tmp_path: Path, first: Weights
    ) -> None:
        assert server.up.client.info().limits["max_sleep_level"] == 2
        up, _ = start(tiny_model, tmp_path, first, rl_routes=False)
        with up as live:
            assert live.client.info().limits["max_sleep_level"] == 0

    def test_a_publish_that_is_refused_leaves_the_dropped_weights_to_be_restored(
        self, server: Server, first: Weights, second: Weights
    ) -> None:
        server.up.client.reload(lazy(first.tensors))
        server.post("/sleep?level=2")
        server.post("/wake_up?tags=weights")
        with pytest.raises(WeightsRejected):
            server.up.client.reload(lazy(second.tensors)[1:])
        assert server.engine.loaded == [first.digest]
        server.engine.load_errors.append(EngineFailure("torn"))
        with pytest.raises(EngineFailure, match="version 1 is live again"):
            server.up.client.reload(lazy(second.tensors))
        assert server.live == (1, first.digest)
        assert not server.rolls()
        assert server.post("/wake_up").json()["status"] == "awake"
        assert server.engine.loaded[-1] == first.digest
        assert server.rolls()

    def test_an_engine_that_does_not_wake_up_never_generates_again(self, server: Server) -> None:
        server.post("/sleep?level=1")
        engine = server.engine
        engine.wake_errors.append(RuntimeError("no memory"))
        answer = server.post("/wake_up")
        assert answer.status_code == 500
        assert "no memory" in error_of(answer)["message"]
        assert engine.calls[-2:] == ["wake weights", "shutdown"]
        assert server.rolls()

    def test_an_engine_that_falls_half_asleep_never_generates_again(self, server: Server) -> None:
        engine = server.engine
        engine.sleep_errors.append(EngineFailure("somebody took the memory meanwhile"))
        answer = server.post("/sleep?level=1")
        assert answer.status_code == 500
        assert "took the memory" in error_of(answer)["message"]
        assert engine.calls[-2:] == ["sleep 1 abort", "shutdown"]
        assert len(server.engines) == 2
        assert server.get("/is_sleeping") == {"is_sleeping": False}
        assert server.rolls()

    @pytest.mark.parametrize("level", [1, 2])
    def test_it_ends_with_the_lease_of_a_trainer_that_died(
        self, server: Server, second: Weights, level: int
    ) -> None:
        server.up.client.reload(lazy(second.tensors))
        headers = {FENCE_HEADER: server.leased(seconds=6.0)}
        assert server.post(f"/sleep?level={level}", headers=headers).status_code == 200
        assert not server.rolls()
        eventually(server.rolls, 30)
        assert server.live == (1, second.digest)
        woken = ["wake weights", *(["load"] if level == 2 else []), "wake kv_cache", "resume"]
        assert server.engine.calls[-len(woken) :] == woken
        assert server.get("/is_sleeping") == {"is_sleeping": False}
        late = server.post(f"/sleep?level={level}", headers=headers)
        assert late.status_code == 409
        assert server.rolls()
        assert server.post("/wake_up").json()["status"] == "awake"  # as it would be anyway

    def test_a_trainer_that_died_before_it_published_leaves_the_last_good_weights(
        self, server: Server, second: Weights
    ) -> None:
        server.up.client.reload(lazy(second.tensors))
        headers = {FENCE_HEADER: server.leased(seconds=6.0)}
        server.post("/sleep?level=2", headers=headers)
        server.post("/wake_up?tags=weights")
        assert not server.rolls()
        eventually(server.rolls, 30)
        assert server.engine.calls[-4:] == ["wake weights", "load", "wake kv_cache", "resume"]
        assert server.engine.loaded[-1] == second.digest

    def test_an_engine_that_does_not_wake_with_the_end_of_a_lease_is_replaced(
        self, server: Server
    ) -> None:
        server.post("/sleep", headers={FENCE_HEADER: server.leased(seconds=6.0)})
        server.engine.wake_errors.append(RuntimeError("no memory"))
        eventually(lambda: len(server.engines) == 2, 30)
        eventually(server.rolls, 30)


class TestUpdates:
    def test_an_update_is_a_publish(self, server: Server, first: Weights) -> None:
        names = list(first.tensors)
        assert server.post("/init_weight_transfer_engine", json={"init_info": {"port": 1}}).json()
        assert server.engine.calls[-1] == "init {'port': 1}"
        assert server.post("/start_weight_update", json={}).json() == {
            "message": "Weight update started"
        }
        assert server.holder == "alice"
        assert server.update(*names[:5]).json() == {"message": "Weights updated"}
        assert server.rolls()  # on what was live
        assert server.update(*names[5:]).status_code == 200
        assert server.live[0] == 0
        done = server.post("/finish_weight_update", json={"weight_version": "17"})
        assert done.json() == {
            "message": "Weight update finished", "version": 1, "digest": first.digest,
        }  # fmt: skip
        assert done.headers["x-tito-version"] == "1"
        assert server.live == (1, first.digest)
        assert server.engine.calls[-4:] == ["pause", "load", "stamp 1", "resume"]
        assert server.engine.loaded == [first.digest]
        assert server.get("/policies/default")["history"][0]["publisher"] == "alice"
        assert_nothing_is_left(server)

    def test_float32_becomes_what_is_served(self, server: Server, first: Weights) -> None:
        server.engine.wire = {name: tensor.float() for name, tensor in first.tensors.items()}
        server.post("/start_weight_update")
        server.update(*first.tensors)
        assert server.post("/finish_weight_update").json()["digest"] == first.digest

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "nan"])
    def test_what_does_not_fit_changes_nothing(
        self, server: Server, first: Weights, fault: str
    ) -> None:
        wire = {name: tensor.clone() for name, tensor in first.tensors.items()}
        name = "model.norm.weight"
        match fault:
            case "missing":
                del wire[name]
            case "unknown":
                wire["model.extra.weight"] = wire[name]
            case "shape":
                wire[name] = wire[name][:-1]
            case "nan":
                wire[name][0] = float("nan")
        server.engine.wire = wire
        before = server.live
        server.post("/start_weight_update")
        server.update(*wire)
        answer = server.post("/finish_weight_update")
        assert answer.status_code == 422
        assert error_of(answer)["code"] == "weights_rejected"
        assert error_of(answer)["problems"][0]["where"].startswith("model.")
        assert server.live == before
        assert not server.engine.loaded
        assert server.get("/policies/default")["history"][0]["state"] == "rejected"
        assert_nothing_is_left(server)

    def test_a_load_that_fails_is_rolled_back(
        self, server: Server, first: Weights, second: Weights
    ) -> None:
        server.up.client.reload(lazy(second.tensors))
        server.engine.load_errors.append(EngineFailure("torn"))
        server.post("/start_weight_update")
        server.update(*first.tensors)
        answer = server.post("/finish_weight_update")
        assert answer.status_code == 500
        assert "live again" in error_of(answer)["message"]
        assert server.live == (1, second.digest)
        assert server.engine.loaded[-1] == second.digest
        assert server.rolls()
        assert_nothing_is_left(server)

    def test_one_at_a_time(self, server: Server, first: Weights) -> None:
        for path in ("/update_weights", "/finish_weight_update"):
            body: Any = {"update_info": {}} if path == "/update_weights" else {}
            early = server.post(path, json=body)
            assert early.status_code == 409
            assert "/start_weight_update" in error_of(early)["message"]
        server.post("/start_weight_update")
        for token in (BOB, ALICE):
            second_start = server.post("/start_weight_update", token)
            assert second_start.status_code == 409
            assert error_of(second_start)["details"] == {"owner": "alice"}
        assert server.update(*first.tensors, token=BOB).status_code == 409
        assert server.post("/finish_weight_update", BOB).status_code == 409
        with pytest.raises(Conflict, match="leased"):
            server.up.client.reload(lazy(first.tensors))
        server.update(*first.tensors)
        assert server.post("/finish_weight_update").json()["version"] == 1

    def test_a_lease_of_ones_own_is_used(self, server: Server, first: Weights) -> None:
        lease = server.post("/policies/default/lease", json={"ttl_seconds": 60}).json()
        assert server.post("/start_weight_update", BOB).status_code == 409
        assert server.post("/start_weight_update").status_code == 409  # under another name
        fence = {FENCE_HEADER: str(lease["fence"])}
        assert server.post("/start_weight_update", headers=fence).status_code == 200
        server.update(*first.tensors)
        assert server.post("/finish_weight_update").json()["version"] == 1
        assert server.holder == "alice"  # it was not the update's to give back

    def test_a_lease_that_is_lost_meanwhile_ends_it(self, server: Server, first: Weights) -> None:
        server.post("/start_weight_update")
        headers = {"authorization": f"Bearer {OPS}"}
        httpx.delete(f"{server.up.url}/policies/default/lease", headers=headers)
        assert server.update(*first.tensors).status_code == 409
        assert server.live[0] == 0
        assert_nothing_is_left(server)

    def test_workers_that_refuse_end_it(self, server: Server, first: Weights) -> None:
        server.post("/start_weight_update")
        server.engine.receive_errors.append(EngineFailure("out of order"))
        answer = server.update(*first.tensors)
        assert answer.status_code == 500
        assert "out of order" in answer.text
        assert server.engine.calls[-1] == "abandon"
        assert server.update(*first.tensors).status_code == 409
        assert server.rolls()
        assert_nothing_is_left(server)

    def test_a_next_one_waits_for_the_end_of_one_that_failed(
        self, server: Server, first: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine, leave, abandon = server.engine, threading.Event(), server.engine.abandon_receiving

        async def slow() -> None:
            engine.calls.append("abandoning")
            while not leave.is_set():  # noqa: ASYNC110 - set from another thread
                await asyncio.sleep(0.005)
            await abandon()

        monkeypatch.setattr(engine, "abandon_receiving", slow)
        server.post("/start_weight_update")
        engine.receive_errors.append(EngineFailure("out of order"))
        with ThreadPoolExecutor() as pool:
            failing = pool.submit(server.update, *first.tensors)
            try:
                eventually(lambda: "abandoning" in engine.calls)
                assert server.post("/start_weight_update").status_code == 409
            finally:
                leave.set()
            assert failing.result(60).status_code == 500
        server.post("/start_weight_update")
        server.update(*first.tensors)
        assert server.post("/finish_weight_update").json()["version"] == 1

    def test_a_tensor_that_comes_twice_ends_it(self, server: Server) -> None:
        server.post("/start_weight_update")
        assert server.update("model.norm.weight").status_code == 200
        assert server.update("model.norm.weight").status_code == 500
        assert_nothing_is_left(server)

    def test_more_than_an_upload_may_hold_ends_it(
        self, tiny_model: Path, tmp_path: Path, first: Weights
    ) -> None:
        up, engines = start(tiny_model, tmp_path, first, max_upload_gib=1e-6)
        with up as live:
            server = Server(live, engines, tmp_path / "staging")
            server.post("/start_weight_update")
            assert server.update(*first.tensors).status_code == 500
            assert_nothing_is_left(server)

    def test_pickles_are_refused(self, server: Server) -> None:
        server.post("/start_weight_update")
        for info in ({"ipc_handles_pickled": "gASV"}, [{}, {"ipc_handles_pickled": "gASV"}]):
            answer = server.post("/update_weights", json={"update_info": info})
            assert answer.status_code == 403
            assert "pickle" in error_of(answer)["message"]

    def test_a_trainer_that_vanishes_leaves_nothing(self, hasty: Server, first: Weights) -> None:
        hasty.post("/start_weight_update")
        hasty.update(*list(first.tensors)[:3])
        eventually(lambda: hasty.get("/policies/default", BOB)["lease"] is None, 30)
        eventually(lambda: not staged_folders(hasty.staging))
        assert hasty.live[0] == 0
        assert hasty.update(*first.tensors).status_code == 409
        assert hasty.post("/start_weight_update", BOB).status_code == 200

    def test_workers_that_wait_for_a_vanished_trainer_are_replaced(
        self, hasty: Server, first: Weights, second: Weights
    ) -> None:
        hasty.up.client.reload(lazy(second.tensors))
        hasty.post("/start_weight_update")
        hasty.engine.hang.clear()
        answer = hasty.update(*first.tensors)
        assert answer.status_code == 500
        assert "replaced" in error_of(answer)["message"]
        assert hasty.engines[0].calls[-1] == "shutdown"
        assert hasty.engine.loaded == [second.digest]
        assert hasty.live == (1, second.digest)
        assert hasty.rolls()
        assert_nothing_is_left(hasty)

    def test_an_engine_that_dies_meanwhile_ends_it(self, server: Server, first: Weights) -> None:
        server.post("/start_weight_update")
        server.engine.receive_errors.append(EngineDied("killed"))
        server.engine.failure = "killed"
        answer = server.update(*first.tensors)
        assert answer.status_code in (503, 409)
        eventually(lambda: len(server.engines) == 2 and server.engine.version == 0, 30)
        server.up.client.wait_ready(30)
        assert_nothing_is_left(server)

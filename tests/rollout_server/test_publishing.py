"""Failures that a real engine cannot be asked for: bad loads, lost callers, races."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import safetensors.torch

from rollout_server import lease_file, leases, publishing
from rollout_server.app import create_app
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.delta_sender import DeltaBase
from shared.errors import (
    BodyTooLarge,
    Conflict,
    EngineFailure,
    EngineUnavailable,
    Forbidden,
    InvalidRequest,
    TitoError,
    WeightsRejected,
)
from shared.protocol import DELTA, DIGEST_HEADER, DIGEST_TRAILER, MSGPACK, SAFETENSORS
from shared.weights import stream_checkpoint
from tests.rollout_server.support import (
    EMBEDDING,
    FakeEngine,
    Weights,
    digest_of,
    eventually,
    lazy,
    post,
    serving,
    upload_of,
)

LOAD_FAILED = RuntimeError("the load tripped over a cable")
EARLY_BYTES = 200_000
"""Enough of an upload to see its header."""


@dataclass(frozen=True)
class Staged:
    """A running application around a fake engine."""

    url: str
    engine: FakeEngine
    client: RolloutClient
    staging: Path
    reload_dir: Path
    standing: frozenset[Path]

    def checkpoints(self) -> list[Path]:
        """Weights that the server keeps on disk."""
        return [path for path in everything(self.staging) if path.suffix == ".safetensors"]

    def litter(self) -> list[Path]:
        """Empty folders that were not there when the server came up."""
        new = everything(self.staging)
        parents = {path.parent for path in new}
        return [path for path in new - self.standing - parents if path.is_dir()]


def everything(folder: Path) -> set[Path]:
    """Files and folders below a folder from which the server may be removing some just now."""
    return {
        Path(parent, name)
        for parent, folders, files in os.walk(folder)  # passes over what is gone
        for name in (*folders, *files)
    }


StartStaged = Callable[..., contextlib.AbstractContextManager[Staged]]


@pytest.fixture
def start_staged(tiny_model: Path, tmp_path: Path) -> StartStaged:
    """Starts the application with a fake engine and given settings."""

    @contextlib.contextmanager
    def start(**changes: Any) -> Iterator[Staged]:
        engine, reload_dir = FakeEngine(), tmp_path / "reload"
        reload_dir.mkdir(exist_ok=True)
        settings = ServerSettings(
            model=str(tiny_model),
            staging_dir=tmp_path / "staging",
            reload_dirs=[reload_dir],
            **changes,
        )
        app = create_app(settings, build_engine=lambda _: engine)
        with serving(app) as url, RolloutClient(url, timeout=30) as client:
            client.wait_ready(60)
            engine.calls.clear()
            engine.loaded.clear()
            staging = tmp_path / "staging"
            standing = frozenset(everything(staging))
            yield Staged(url, engine, client, staging, reload_dir, standing)

    return start


@pytest.fixture
def staged(start_staged: StartStaged) -> Iterator[Staged]:
    with start_staged() as staged:
        yield staged


def test_a_publish_pauses_loads_stamps_and_resumes(staged: Staged, first: Weights) -> None:
    result = staged.client.reload(lazy(first.tensors))
    assert result.version == 1
    assert staged.engine.calls == ["pause", "load", "stamp 1", "resume"]


def test_a_refusal_never_pauses(staged: Staged, first: Weights) -> None:
    with pytest.raises(WeightsRejected):
        staged.client.reload(lazy(first.tensors)[1:])
    assert staged.engine.calls == []
    assert staged.checkpoints() == staged.litter() == []


def test_a_failed_load_restores_the_last_good_weights(
    staged: Staged, first: Weights, second: Weights
) -> None:
    staged.client.reload(lazy(first.tensors))
    info = staged.client.info()
    staged.engine.calls.clear()
    staged.engine.load_errors = [LOAD_FAILED]
    with pytest.raises(EngineFailure, match="tripped over a cable") as caught:
        staged.client.reload(lazy(second.tensors))
    assert "version 1" in str(caught.value)
    assert staged.engine.calls == ["pause", "load", "load", "stamp 1", "resume"]
    assert staged.engine.loaded == [first.digest, second.digest, first.digest]
    assert staged.client.info() == info
    assert staged.client.rollout([[5]], group_size=1, max_tokens=2).samples[0].version == 1
    eventually(lambda: len(staged.checkpoints()) == 1)
    assert staged.litter() == []


def test_a_failed_first_load_restores_the_model_itself(
    staged: Staged, first: Weights, base: Weights
) -> None:
    staged.engine.load_errors = [LOAD_FAILED]
    with pytest.raises(EngineFailure, match="version 0"):
        staged.client.reload(lazy(first.tensors))
    assert staged.engine.loaded == [first.digest, base.digest]
    assert staged.client.info().version == 0


def test_a_version_is_not_lost_by_a_failure(staged: Staged, first: Weights) -> None:
    staged.engine.load_errors = [LOAD_FAILED]
    with pytest.raises(EngineFailure):
        staged.client.reload(lazy(first.tensors))
    result = staged.client.reload(lazy(first.tensors))
    assert (result.version, result.digest) == (1, first.digest)
    assert staged.client.rollout([[5]], group_size=1, max_tokens=2).samples[0].version == 1


def closed(staged: Staged) -> None:
    """Neither ready nor generating, and both say why."""
    for response in (
        httpx.get(f"{staged.url}/readyz"),
        post(staged.url, {"prompts": ["a"], "group_size": 1, "max_tokens": 1}, timeout=5),
    ):
        assert response.status_code == 503
        assert "tripped over a cable" in response.json()["error"]["message"]
    assert httpx.get(f"{staged.url}/healthz").status_code == 200
    assert "tito_ready 0.0" in httpx.get(f"{staged.url}/metrics").text


def test_a_failed_restore_is_left_to_a_new_engine(
    staged: Staged, first: Weights, second: Weights
) -> None:
    staged.client.reload(lazy(first.tensors))
    staged.engine.calls.clear()
    staged.engine.load_errors = [LOAD_FAILED, RuntimeError("and again")]
    with pytest.raises(EngineFailure, match="version 1 is live again"):
        staged.client.reload(lazy(second.tensors))
    assert staged.engine.calls == [
        *("pause", "load", "load"),
        *("shutdown", "pause", "load", "stamp 1", "resume"),
    ]
    assert staged.engine.loaded[-3:] == [second.digest, first.digest, first.digest]
    assert httpx.get(f"{staged.url}/readyz").status_code == 200
    assert staged.client.rollout([[5]], group_size=1, max_tokens=2).samples[0].version == 1
    assert staged.client.reload(lazy(second.tensors)).version == 2


def test_a_server_that_cannot_restore_at_all_closes(
    staged: Staged, first: Weights, second: Weights
) -> None:
    staged.client.reload(lazy(first.tensors))
    staged.engine.calls.clear()
    staged.engine.load_errors = [LOAD_FAILED, *(RuntimeError(f"and again {i}") for i in range(4))]
    with pytest.raises(EngineFailure, match="and again 3"):
        staged.client.reload(lazy(second.tensors))
    assert "resume" not in staged.engine.calls
    assert staged.engine.paused
    closed(staged)
    with pytest.raises(EngineUnavailable):
        staged.client.reload(lazy(second.tensors))
    assert "resume" not in staged.engine.calls


def test_an_engine_that_does_not_resume_is_replaced(staged: Staged, first: Weights) -> None:
    staged.engine.resume_errors = [LOAD_FAILED] * 2
    assert staged.client.reload(lazy(first.tensors)).version == 1
    assert staged.engine.calls[-5:] == ["shutdown", "pause", "load", "stamp 1", "resume"]
    assert staged.client.rollout([[5]], group_size=1, max_tokens=2).samples[0].version == 1


def test_a_failed_resume_is_not_passed_over(staged: Staged, first: Weights) -> None:
    # The engine stays paused, so whoever asks must hear of it instead of waiting for ever.
    staged.engine.resume_errors = [LOAD_FAILED] * 10
    with pytest.raises(TitoError, match="tripped over a cable"):
        staged.client.reload(lazy(first.tensors))
    assert staged.engine.paused
    closed(staged)
    assert staged.client.policy()["history"][0]["state"] == "live"


def test_a_resume_that_fails_once_is_tried_again_or_told_of(staged: Staged, first: Weights) -> None:
    staged.engine.resume_errors = [LOAD_FAILED]
    with contextlib.suppress(TitoError):
        staged.client.reload(lazy(first.tensors))
    ready = httpx.get(f"{staged.url}/readyz").status_code == 200
    assert ready != staged.engine.paused


def test_a_failed_pause_leaves_the_engine_running(staged: Staged, first: Weights) -> None:
    staged.engine.pause_errors = [LOAD_FAILED]
    with pytest.raises(EngineFailure, match="tripped over a cable"):
        staged.client.reload(lazy(first.tensors))
    assert staged.client.info().version == 0
    assert staged.engine.calls[-1] == "resume"
    assert staged.checkpoints() == staged.litter() == []
    assert staged.client.rollout([[5]], group_size=1, max_tokens=2).samples[0].version == 0


@contextlib.contextmanager
def begun(url: str, content_type: str, raw: bytes, length: int) -> Iterator[socket.socket]:
    """A connection on which the first part of an upload has been sent."""
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST /reload HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
        f"{DIGEST_HEADER}: {DIGEST_TRAILER}\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + raw[:length])
        yield connection


def test_a_checkpoint_that_does_not_fit_is_refused_at_its_header(
    staged: Staged, first: Weights
) -> None:
    raw = upload_of({**first.tensors, "more": first.tensors[EMBEDDING]})
    with begun(staged.url, SAFETENSORS, raw, EARLY_BYTES) as connection:
        answer = connection.recv(1 << 16)  # although most of it was not sent
    assert answer.startswith(b"HTTP/1.1 422")
    assert b"more" in answer
    eventually(lambda: not staged.checkpoints() and not staged.litter())


def test_a_delta_to_another_version_is_refused_at_its_header(
    staged: Staged, first: Weights, second: Weights
) -> None:
    base = DeltaBase()
    for _ in stream_checkpoint(base.record(lazy(first.tensors))):
        pass
    base.commit()
    raw = b"".join(base.encode(lazy(second.tensors)))
    assert len(raw) > 2 * EARLY_BYTES
    live = staged.client.info().digest
    with begun(staged.url, DELTA, raw, EARLY_BYTES) as connection:
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 409")
    assert live.encode() in answer
    eventually(lambda: not staged.checkpoints() and not staged.litter())


def test_a_caller_gone_in_mid_upload_leaves_nothing(staged: Staged, first: Weights) -> None:
    raw = upload_of(first.tensors)
    with begun(staged.url, SAFETENSORS, raw, len(raw) // 2):
        eventually(lambda: staged.checkpoints() or staged.litter())
    eventually(lambda: not staged.checkpoints() and not staged.litter())
    assert staged.engine.calls == []
    assert staged.client.reload(lazy(first.tensors)).version == 1


def test_an_upload_that_falls_silent_gives_its_place_back(
    start_staged: StartStaged, first: Weights
) -> None:
    raw = upload_of(first.tensors)
    with (
        start_staged(max_uploads=1, body_silence=0.5) as staged,
        begun(staged.url, SAFETENSORS, raw, len(raw) // 2) as connection,
    ):
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")  # it is still open
        eventually(lambda: not staged.checkpoints() and not staged.litter())
        assert staged.client.reload(lazy(first.tensors)).version == 1
        reasons = [item["reason"] for item in staged.client.policy()["history"]]
        assert "cut short: nothing of it came for 0.5 s" in reasons[1]


def test_an_engine_that_neither_pauses_nor_resumes_is_replaced(
    staged: Staged, first: Weights
) -> None:
    staged.engine.pause_errors = [LOAD_FAILED]
    staged.engine.resume_errors = [LOAD_FAILED, LOAD_FAILED]
    with pytest.raises(EngineFailure, match="nothing has changed"):
        staged.client.reload(lazy(first.tensors))
    assert "shutdown" in staged.engine.calls
    assert staged.client.rollout([[5]], group_size=1, max_tokens=2).samples[0].version == 0


def test_a_slow_disk_below_the_leases_holds_nobody_else_up(
    start_staged: StartStaged, tmp_path: Path, first: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, written = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        writing.set()
        written.wait(30)
        lease_file.write_leases(*arguments)

    with start_staged(spool_dir=tmp_path / "spool") as staged, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(leases, "write_leases", slow)
        url = f"{staged.url}/policies/default/lease"
        taken = pool.submit(httpx.post, url, json={"holder": "a"}, timeout=60)
        assert writing.wait(30)
        refused = pool.submit(publish, staged.url, first)
        try:
            time.sleep(0.2)  # the publish has asked by then, and waits
            assert httpx.get(f"{staged.url}/healthz", timeout=10).status_code == 200
        finally:
            written.set()
        assert taken.result(60).status_code == 200
        with pytest.raises(Conflict, match="leased to 'a'"):
            refused.result(60)


def test_a_caller_gone_in_mid_load_gets_its_version_all_the_same(
    staged: Staged, first: Weights
) -> None:
    staged.engine.load_gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{staged.url}/reload",
            content=upload_of(first.tensors),
            headers={"content-type": SAFETENSORS, DIGEST_HEADER: DIGEST_TRAILER},
            timeout=1.0,
        )
    assert staged.engine.calls == ["pause", "load"]
    staged.engine.load_gate.set()
    eventually(lambda: staged.client.info().version == 1)
    assert staged.client.info().digest == first.digest
    eventually(lambda: not staged.engine.paused)
    eventually(lambda: len(staged.checkpoints()) == 1)


def test_two_publishes_at_once_get_consecutive_versions(
    staged: Staged, first: Weights, second: Weights
) -> None:
    staged.engine.load_gate.clear()
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(publish, staged.url, weights) for weights in (first, second)]
        eventually(lambda: staged.engine.calls)
        staged.engine.load_gate.set()
        results = sorted((future.result(30) for future in both), key=lambda item: item.version)
    assert [result.version for result in results] == [1, 2]
    assert {result.digest for result in results} == {first.digest, second.digest}
    assert staged.client.info().digest == results[1].digest
    one, two = (["pause", "load", f"stamp {version}", "resume"] for version in (1, 2))
    assert staged.engine.calls == one + two
    eventually(lambda: len(staged.checkpoints()) == 1)
    assert staged.litter() == []


def publish(url: str, weights: Weights) -> Any:
    with RolloutClient(url, timeout=30) as client:
        return client.reload(lazy(weights.tensors))


def test_a_retired_file_is_written_over(staged: Staged, first: Weights, second: Weights) -> None:
    def publish_and_look(weights: Weights) -> int:
        staged.client.reload(lazy(weights.tensors))
        (live,) = staged.staging.rglob("policies/default/*/*.safetensors")
        assert digest_of(safetensors.torch.load_file(live)) == weights.digest
        return live.stat().st_ino

    inodes = [publish_and_look(first), publish_and_look(second)]
    (spool,) = staged.staging.iterdir()
    for weights, before in ((first, inodes[0]), (second, inodes[1])):
        eventually(lambda: (spool / "spare").exists() and not any((spool / "retired").iterdir()))
        assert publish_and_look(weights) == before
    assert len(set(inodes)) == 2


def test_a_longer_file_is_written_over_too(staged: Staged, first: Weights, second: Weights) -> None:
    (spool,) = staged.staging.iterdir()
    for weights in (first, second):
        (spool / "spare").write_bytes(bytes([255]) * (8 << 20))
        result = staged.client.reload(lazy(weights.tensors))
        (live,) = staged.staging.rglob("policies/default/*/*.safetensors")
        assert live.stat().st_size < 8 << 20
        assert digest_of(safetensors.torch.load_file(live)) == result.digest == weights.digest
        eventually(lambda: not any((spool / "retired").iterdir()))


def test_a_delta_whose_base_is_superseded_meanwhile(
    staged: Staged, first: Weights, second: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = DeltaBase()
    staged.client.reload(lazy(first.tensors), base=base)

    def overtaken(*_: object) -> str:
        publish(staged.url, second)
        raise WeightsRejected("its base is no longer what it was")

    monkeypatch.setattr(publishing, "apply_delta", overtaken)
    raw = b"".join(base.encode(lazy(second.tensors)))
    response = post(staged.url, raw=raw, path="/reload", content_type=DELTA)
    assert response.status_code == 409
    assert response.json()["error"]["details"] == {"version": 2, "digest": second.digest}


def test_a_sample_bears_the_version_that_its_span_names(
    staged: Staged, first: Weights, second: Weights
) -> None:
    digests = {0: staged.client.info().digest}
    for weights in (first, second):
        digests[staged.client.reload(lazy(weights.tensors)).version] = weights.digest
        sample = staged.client.rollout([[5]], group_size=1, max_tokens=3).samples[0]
        assert sample.digest == digests[sample.version] == weights.digest


def test_an_upload_over_the_limit(start_staged: StartStaged, first: Weights) -> None:
    with start_staged(max_upload_gib=0.0005) as staged:
        with pytest.raises(BodyTooLarge):
            staged.client.reload(lazy(first.tensors))
        raw = upload_of(first.tensors)
        pieces = (raw[start : start + 65536] for start in range(0, len(raw), 65536))
        headers = {DIGEST_HEADER: DIGEST_TRAILER}
        response = post(
            staged.url, raw=pieces, path="/reload", content_type=SAFETENSORS, headers=headers
        )
        assert response.status_code == 413
        assert staged.checkpoints() == staged.litter() == []
        assert staged.engine.calls == []


def test_a_path_over_the_limit(start_staged: StartStaged, tiny_model: Path) -> None:
    with start_staged(max_upload_gib=0.0005) as staged:
        raw = (tiny_model / "model.safetensors").read_bytes()
        (staged.reload_dir / "model.safetensors").write_bytes(raw)
        with pytest.raises(BodyTooLarge):
            staged.client.reload_path(staged.reload_dir)
        assert staged.checkpoints() == staged.litter() == []


def test_a_path_that_cannot_be_copied_leaves_nothing(staged: Staged) -> None:
    (staged.reload_dir / "model.safetensors").mkdir()
    with pytest.raises(TitoError):
        staged.client.reload_path(staged.reload_dir)
    assert staged.checkpoints() == staged.litter() == []


def in_background(url: str, body: dict[str, Any]) -> tuple[ThreadPoolExecutor, Future[Any]]:
    pool = ThreadPoolExecutor()
    return pool, pool.submit(post, url, body)


def test_hanging_up_cancels_the_work(staged: Staged) -> None:
    staged.engine.gate.clear()
    body = msgpack.packb({"prompts": [[5], [6], [7]], "group_size": 2, "max_tokens": 2})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{staged.url}/rollout", content=body, headers={"content-type": MSGPACK}, timeout=0.3
        )
    eventually(lambda: staged.engine.cancelled == 3, seconds=1.0)
    assert staged.engine.running == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineFailure("the engine failed on a prompt"), 500),
        (EngineUnavailable("the engine died"), 503),
        (RuntimeError("the engine failed on a prompt"), 500),
    ],
)
def test_one_failing_prompt_ends_its_request_alone(
    staged: Staged, error: Exception, status: int
) -> None:
    staged.engine.poison, staged.engine.generate_error = 13, error
    staged.engine.gate.clear()
    pool, other = in_background(staged.url, {"prompts": [[1]], "group_size": 1, "max_tokens": 1})
    with pool:
        eventually(lambda: staged.engine.running == 1)
        response = post(staged.url, {"prompts": [[5], [13], [6]], "group_size": 2, "max_tokens": 2})
        assert response.status_code == status
        assert str(error) in response.json()["error"]["message"]
        eventually(lambda: staged.engine.cancelled == 2)
        assert staged.engine.running == 1
        staged.engine.gate.set()
        assert other.result(10).status_code == 200


def test_an_engine_that_is_gone_is_not_ready(staged: Staged) -> None:
    staged.engine.failure = "the engine tripped over a cable"
    assert httpx.get(f"{staged.url}/readyz").status_code == 503
    body = {"prompts": ["a"], "group_size": 1, "max_tokens": 1}
    assert post(staged.url, body, timeout=5).status_code == 503


def test_a_rollout_waits_out_a_publish(staged: Staged, first: Weights) -> None:
    staged.engine.load_gate.clear()
    publishing = threading.Thread(target=publish, args=(staged.url, first))
    publishing.start()
    eventually(lambda: "load" in staged.engine.calls)
    pool, waiting = in_background(staged.url, {"prompts": [[1]], "group_size": 1, "max_tokens": 1})
    with pool:
        eventually(lambda: staged.engine.running == 1)
        assert httpx.get(f"{staged.url}/healthz").status_code == 200
        staged.engine.load_gate.set()
        document = waiting.result(10).json()
    publishing.join(10)
    assert document["groups"][0]["samples"][0]["version"] == 1


def test_stopping_removes_what_was_staged(start_staged: StartStaged, first: Weights) -> None:
    with start_staged() as staged:
        staged.client.reload(lazy(first.tensors))
        assert len(staged.checkpoints()) == 1
    assert staged.engine.calls[-1] == "shutdown"
    assert staged.checkpoints() == []


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EACCES, Forbidden), (errno.ENOENT, InvalidRequest)]
)
def test_a_file_that_cannot_be_read(
    staged: Staged,
    first: Weights,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[TitoError],
) -> None:
    """Another user's, say; or it is removed just now. (Who runs this may be allowed everything.)"""
    file = staged.reload_dir / "model.safetensors"
    safetensors.torch.save_file(first.tensors, file)
    plain = Path.open

    def refuse(path: Path, *arguments: Any, **more: Any) -> Any:
        if path == file:
            raise OSError(number, os.strerror(number), str(path))
        return plain(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(kind, match="read"):
            staged.client.reload_path(staged.reload_dir)
    assert staged.client.info().version == 0
    eventually(lambda: staged.checkpoints() == staged.litter() == [])
    assert staged.client.reload_path(staged.reload_dir).version == 1

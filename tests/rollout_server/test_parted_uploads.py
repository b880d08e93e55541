"""Checkpoints in parts: in any order, side by side, broken off, sent again, refused, given up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rollout_server.app import create_app
from rollout_server.settings import ServerSettings
from shared import parts as client_parts
from shared.client import RolloutClient
from shared.protocol import FENCE_HEADER, JSON, SAFETENSORS
from shared.weights import TensorRange, parse_header, stream_tensors
from tests.rollout_server.fakes import tokens_file
from tests.rollout_server.support import (
    EMBEDDING,
    FakeEngine,
    Weights,
    assert_agree,
    eventually,
    lazy,
    serving,
    upload_of,
)

UNKNOWN = "0" * 32


@dataclass(frozen=True)
class File:
    """A checkpoint as bytes, and where its tensors lie in them."""

    raw: bytes
    ranges: list[TensorRange] = field(default_factory=list)

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> File:
        raw = upload_of(tensors)[:-32]
        end = 8 + int.from_bytes(raw[:8], "little")
        return cls(raw, parse_header(raw[8:end]))

    @property
    def head(self) -> bytes:
        return self.raw[: self.ranges[0].start]

    def cuts(self, count: int) -> list[tuple[int, int]]:
        """About so many runs of whole tensors."""
        edges = [self.ranges[i * len(self.ranges) // count].start for i in range(count)]
        return list(zip(edges, [*edges[1:], len(self.raw)], strict=True))


@dataclass
class Sender:
    """Speaks the protocol without the client.

    Attributes:
        engine: behind the server.
        staging: where the server stages.
    """

    http: httpx.Client
    engine: FakeEngine
    staging: Path

    def begin(self, file: File, **request: Any) -> httpx.Response:
        headers = {"content-type": SAFETENSORS, **request.pop("headers", {})}
        return self.http.post("/reload/parts", content=file.head, headers=headers, **request)

    def begun(self, file: File, **request: Any) -> str:
        answer = self.begin(file, **request)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def bring(self, id: str, start: int, content: bytes, **request: Any) -> httpx.Response:
        return self.http.put(
            f"/reload/parts/{id}", params={"start": start}, content=content, **request
        )

    def bring_all(self, id: str, file: File) -> None:
        for start, end in file.cuts(3):
            assert self.bring(id, start, file.raw[start:end]).is_success

    def end(self, id: str, digest: str | None = None) -> httpx.Response:
        return self.http.post(f"/reload/parts/{id}", json={"digest": digest})

    def history(self) -> list[dict[str, Any]]:
        """Of the policy, the newest publish first."""
        found: list[dict[str, Any]] = self.http.get("/policies/default").json()["history"]
        return found

    def folders(self) -> list[Path]:
        """That uploads are staged in."""
        return list(self.staging.glob("**/staging/*"))

    @contextlib.contextmanager
    def half(
        self, id: str, start: int, content: bytes, under_way: int = 1
    ) -> Iterator[socket.socket]:
        """A connection on which half of a part has been sent, so that so many are under way."""
        url = self.http.base_url
        head = (
            f"PUT /reload/parts/{id}?start={start} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        with socket.create_connection((url.host, url.port or 80), 30) as line:
            line.sendall(head.encode() + content[: len(content) // 2])
            told = f"still on their way: {under_way}"
            eventually(lambda: told in self.end(id).text)
            yield line


Start = Callable[..., contextlib.AbstractContextManager[Sender]]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Start:
    """Starts the application around a fake engine, on a real socket."""

    @contextlib.contextmanager
    def started(token: str | None = None, **settings: Any) -> Iterator[Sender]:
        engine = FakeEngine()
        staging = tmp_path / "staging"
        options = ServerSettings(model=str(tiny_model), staging_dir=staging, **settings)
        app = create_app(options, build_engine=lambda _: engine)
        headers = {"accept": JSON} | ({"authorization": f"Bearer {token}"} if token else {})
        with serving(app) as url:
            with RolloutClient(url, token=token, timeout=30) as client:
                client.wait_ready(60)
            engine.calls.clear()
            with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
                yield Sender(http, engine, staging)

    return started


@pytest.fixture
def sender(start: Start) -> Iterator[Sender]:
    with start() as sender:
        yield sender


@pytest.fixture(scope="module")
def file(first: Weights) -> File:
    return File.of(first.tensors)


def test_parts_in_any_order_side_by_side(sender: Sender, first: Weights, file: File) -> None:
    assert sender.http.get("/info").json()["limits"]["max_upload_parts"] >= 1
    id = sender.begun(file)
    (record,) = sender.history()
    assert record["state"] == "staging"
    cuts = file.cuts(2)
    with ThreadPoolExecutor() as pool:
        answers = list(
            pool.map(lambda cut: sender.bring(id, cut[0], file.raw[slice(*cut)]), cuts[::-1])
        )
    assert {answer.status_code for answer in answers} == {200}
    assert min(answer.json()["missing"] for answer in answers) == 0
    assert sender.engine.calls == []
    ended = sender.end(id, first.digest)
    assert ended.status_code == 200, ended.text
    assert (ended.json()["version"], ended.json()["digest"]) == (1, first.digest)
    assert sender.engine.calls == ["pause", "load", "stamp 1", "resume"]
    assert {"upload", "verify", "load"} <= ended.json()["timings"].keys()
    assert [r["state"] for r in sender.history()] == ["live"]
    assert sender.end(id, first.digest).status_code == 404, "it is over"


@pytest.mark.parametrize("count", [1, 5, 9])
def test_any_number_of_parts_one_after_the_other(
    sender: Sender, second: Weights, count: int
) -> None:
    file = File.of(second.tensors)
    id = sender.begun(file, params={"mode": "drain"})
    for start, end in file.cuts(count):
        answer = sender.bring(id, start, file.raw[start:end]).json()
        assert answer["missing"] == len(file.raw) - end
    assert sender.end(id).json()["digest"] == second.digest


def test_a_part_that_breaks_off_can_be_sent_again(
    sender: Sender, first: Weights, file: File
) -> None:
    id = sender.begun(file)
    (a, b), (c, d) = file.cuts(2)
    assert sender.bring(id, a, file.raw[a:b]).is_success
    with sender.half(id, c, file.raw[c:d]):
        assert sender.bring(id, c, file.raw[c:d]).status_code == 409
        early = sender.end(id)
        assert early.status_code == 409
        assert "still on their way: 1" in early.text
    eventually(lambda: sender.bring(id, c, file.raw[c:d]).is_success)
    assert sender.bring(id, a, file.raw[a:b]).is_success, "whole ones may come again, too"
    assert sender.end(id, first.digest).json()["digest"] == first.digest


def test_parts_of_a_version_that_survives_a_restart(
    start: Start, tmp_path: Path, first: Weights, file: File
) -> None:
    with start(spool_dir=tmp_path / "spool") as sender:  # its files are written, not mapped
        id = sender.begun(file)
        with ThreadPoolExecutor() as pool:
            for answer in pool.map(
                lambda cut: sender.bring(id, cut[0], file.raw[slice(*cut)]), file.cuts(2)
            ):
                assert answer.is_success
        assert sender.end(id, first.digest).is_success
    with start(spool_dir=tmp_path / "spool") as sender:
        info = sender.http.get("/info").json()
        assert (info["version"], info["digest"]) == (1, first.digest)


def test_what_comes_last_counts(sender: Sender, first: Weights, file: File) -> None:
    id, damaged = sender.begun(file), bytearray(file.raw)
    item = file.ranges[1]
    damaged[item.start] ^= 1
    for content in (bytes(damaged), file.raw):
        sender.bring_all(id, File(content, file.ranges))
    assert sender.bring(id, item.start, bytes(damaged[item.start : item.end])).is_success
    refused = sender.end(id, first.digest)
    assert refused.status_code == 422
    assert "as announced" in refused.json()["error"]["message"]
    assert sender.engine.calls == []
    assert sender.history()[0]["state"] == "rejected"


def test_what_is_missing_may_still_come(sender: Sender, first: Weights, file: File) -> None:
    id = sender.begun(file)
    item = file.ranges[-1]
    assert sender.bring(id, file.ranges[0].start, file.raw[len(file.head) : item.start]).is_success
    refused = sender.end(id).json()["error"]
    assert refused["problems"] == [
        {"where": item.spec.name, "got": "nothing", "allowed": f"bytes {item.start} to {item.end}"}
    ]
    assert sender.bring(id, item.start, file.raw[item.start :]).json() == {"missing": 0}
    assert sender.end(id).json()["digest"] == first.digest


def test_values_that_are_not_finite(sender: Sender, first: Weights) -> None:
    broken = first.tensors[EMBEDDING].clone()
    broken[3, 1] = float("inf")
    file = File.of(first.tensors | {EMBEDDING: broken})
    id = sender.begun(file)
    sender.bring_all(id, file)
    refused = sender.end(id)
    assert refused.status_code == 422
    assert EMBEDDING in refused.text
    eventually(lambda: not sender.folders())


@pytest.mark.parametrize(
    ("offset", "length", "where"),
    [(1, -1, "start"), (0, -1, "end"), (0, 0, "start"), (10**9, 10, "start"), (-8, 8, "start")],
)
def test_no_whole_tensors(sender: Sender, file: File, offset: int, length: int, where: str) -> None:
    id = sender.begun(file)
    first = file.ranges[0]
    content = bytes(length if length >= 0 else first.end - first.start + length)
    refused = sender.bring(id, first.start + offset, content)
    assert refused.status_code == 422, refused.text
    assert where in {problem["where"] for problem in refused.json()["error"]["problems"]}
    sender.bring_all(id, file)
    assert sender.end(id).is_success


def test_other_bad_input(sender: Sender, first: Weights, file: File) -> None:
    id, cut = sender.begun(file), file.ranges[0]
    content = file.raw[cut.start : cut.end]
    unknown = sender.bring(UNKNOWN, cut.start, content)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert sender.end(UNKNOWN).status_code == 404
    chunked = sender.http.put(
        f"/reload/parts/{id}", params={"start": cut.start}, content=iter([content])
    )
    assert "content-length" in chunked.text
    assert chunked.status_code == 422
    for query in ({}, {"start": "x"}, {"start": -1}, {"start": cut.start, "end": cut.end}):
        assert sender.http.put(f"/reload/parts/{id}", params=query).status_code == 422
    assert sender.http.post(f"/reload/parts/{id}", json={"digest": "x"}).status_code == 422
    missing = File.of(dict(list(first.tensors.items())[1:]))
    refused = sender.begin(missing)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "weights_rejected")
    assert sender.begin(File(file.raw[:-1], file.ranges[1:])).status_code == 400, "goes on"
    assert sender.begin(file, headers={"content-type": JSON}).status_code == 415
    assert sender.begin(file, params={"policy": "mine"}).status_code == 422
    assert sender.http.post("/reload/parts", content=b"PK", headers={"content-type": SAFETENSORS})
    assert len(sender.folders()) == 1, "only that of the upload which goes on"


def test_given_up(start: Start, file: File) -> None:
    with start(max_uploads=1) as sender:
        id = sender.begun(file)
        busy = sender.begin(file)
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "overloaded")
        (a, b), _ = file.cuts(2)
        with sender.half(id, a, file.raw[a:b]) as line:
            assert sender.bring(id, a, file.raw[a:b]).status_code == 409
            assert sender.http.delete(f"/reload/parts/{id}").is_success
            assert b" 409 " in line.recv(1 << 16).partition(b"\r\n")[0], "nobody waits for more"
        eventually(lambda: sender.begin(file).status_code == 201)
        assert sender.bring(id, a, file.raw[a:b]).status_code == 404
        assert [r["state"] for r in sender.history()[-1:]] == ["rejected"]
        assert len(sender.folders()) == 1
        assert sender.engine.calls == []


def test_an_upload_to_which_nothing_comes_ends(start: Start, file: File) -> None:
    with start(body_silence=1.0) as sender:
        id = sender.begun(file)
        (a, b), _ = file.cuts(2)
        assert sender.bring(id, a, file.raw[a:b]).is_success
        eventually(lambda: sender.bring(id, a, b"").status_code == 404)
        (record,) = sender.history()
        assert (record["state"], "nothing of it came" in record["reason"]) == ("rejected", True)
        assert sender.folders() == []


def test_too_many_at_once(sender: Sender, file: File) -> None:
    most = sender.http.get("/info").json()["limits"]["max_upload_parts"]
    id = sender.begun(file)
    with contextlib.ExitStack() as stack:
        for under_way, item in enumerate(file.ranges[:most], 1):
            content = file.raw[item.start : item.end]
            stack.enter_context(sender.half(id, item.start, content, under_way))
        item = file.ranges[most]
        content = file.raw[item.start : item.end]
        assert sender.bring(id, item.start, content).status_code == 429


def test_the_writers_lease(sender: Sender, file: File) -> None:
    def lease(holder: str) -> dict[str, str]:
        asked = {"holder": holder, "ttl_seconds": 60}
        fence = sender.http.post("/policies/default/lease", json=asked).json()["fence"]
        return {FENCE_HEADER: str(fence)}

    old = lease("me")
    assert sender.begin(file).status_code == 409, "somebody holds it"
    left_behind = sender.begun(file, headers=old)
    late = sender.begun(file, headers=old)
    sender.bring_all(late, file)
    new = lease("me")  # the same trainer, started again
    assert sender.end(late).status_code == 409
    id = sender.begun(file, headers=new)
    eventually(lambda: sender.bring(left_behind, 0, b"").status_code == 404)
    sender.bring_all(id, file)
    assert sender.end(id).is_success


def test_whose_it_is(start: Start, tmp_path: Path, file: File) -> None:
    scopes = ["publish:default"]
    tokens = tokens_file(
        tmp_path,
        ("me", "m" * 32, scopes),
        ("other", "o" * 32, scopes),
        ("reader", "r" * 32, ["rollout"]),
    )
    with start(token="m" * 32, tokens_file=tokens) as sender:
        id = sender.begun(file)
        (a, b), _ = file.cuts(2)
        for letter, status in (("o", 404), ("r", 403), ("x", 401)):
            headers = {"authorization": f"Bearer {letter * 32}"}
            assert sender.bring(id, a, file.raw[a:b], headers=headers).status_code == status
            deleted = sender.http.delete(f"/reload/parts/{id}", headers=headers)
            assert deleted.status_code == status
        sender.bring_all(id, file)
        assert sender.end(id).is_success


def test_a_server_that_stops_does_not_wait_for_the_rest(
    start: Start, tmp_path: Path, file: File
) -> None:
    with start() as sender:
        sender.begun(file)
    assert not list(tmp_path.glob("staging/scratch-*"))


# With the client, and vLLM.


def test_the_client_sends_parts_of_large_checkpoints(
    client: RolloutClient, second: Weights, live: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_parts, "_LEAST_BYTES", 1000)
    monkeypatch.setattr("shared.parts.os.cpu_count", lambda: 4)
    names, real = [], stream_tensors

    def watched(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr("shared.parts.stream_tensors", watched)
    before = client.info().version
    result = client.reload(lazy(second.tensors))
    assert (result.version, result.digest) == (before + 1, second.digest)
    assert len(set(names)) > 1
    (sample,) = client.rollout([[5, 6, 7]], group_size=1, max_tokens=12).samples
    assert (sample.version, sample.digest) == (result.version, second.digest)
    assert live is not second
    assert_agree(sample.logprobs, second.logprobs([5, 6, 7], sample.completion_ids.tolist()))

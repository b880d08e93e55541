"""The wire as others see it: fixed bytes, and a client in another language that reads them."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.client import RolloutClient
from shared.codec import decode, group_to_wire, rollout_from_wire, rollout_to_wire
from shared.errors import MalformedBody
from shared.protocol import MSGPACK
from tests.clients import vectors

HERE = Path(__file__).parent
CLIENT = HERE / "rollout.mjs"
VECTORS: dict[str, Any] = json.loads((HERE / "vectors.json").read_text())
NOT_STREAMS = [name for name, item in VECTORS["answers"].items() if "stream" not in name]
FOR_JAVASCRIPT = [name for name in VECTORS["answers"] if "json" not in name]

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")


@contextmanager
def answering(content_type: str, body: bytes) -> Iterator[str]:
    """A server that gives every request the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def javascript(url: str, request: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    """Run the client in JavaScript; it prints groups as JSON."""
    command = ["node", str(CLIENT), url, json.dumps(request), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_codec_makes_the_bytes_of_the_vectors() -> None:
    assert vectors.document() == VECTORS


@pytest.mark.parametrize("name", NOT_STREAMS)
def test_answers_are_read_as_what_they_mean(name: str) -> None:
    item = VECTORS["answers"][name]
    read = rollout_from_wire(decode(bytes.fromhex(item["hex"]), item["content_type"]))
    assert rollout_to_wire(read, packed=False)["groups"] == VECTORS["groups"]


@pytest.mark.parametrize("name", ["packed stream", "plain stream"])
def test_streams_are_read_as_what_they_mean(name: str) -> None:
    item = VECTORS["answers"][name]
    with (
        answering(item["content_type"], bytes.fromhex(item["hex"])) as url,
        RolloutClient(url) as client,
    ):
        read = list(client.rollout_stream(["x"], retries=0))
    assert [group.group_id for group in read] == [2, 1, 0]
    wire = [group_to_wire(group, packed=False) for group in reversed(read)]
    assert wire == VECTORS["groups"]


@pytest.mark.parametrize("name", ["an extension type", "cut off", "something behind"])
def test_broken_answers_are_refused(name: str) -> None:
    with pytest.raises(MalformedBody):
        decode(bytes.fromhex(VECTORS["broken"][name]["hex"]), MSGPACK)


@needs_node
class TestJavaScript:
    """A client of under a hundred lines, written from PROTOCOL.md."""

    def test_it_is_short(self) -> None:
        assert len(CLIENT.read_text().splitlines()) < 100

    @pytest.mark.parametrize("name", FOR_JAVASCRIPT)
    def test_it_reads_the_vectors(self, name: str) -> None:
        item = VECTORS["answers"][name]
        with answering(item["content_type"], bytes.fromhex(item["hex"])) as url:
            done = javascript(url, {"prompts": ["x"], "stream": "stream" in name})
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == VECTORS["groups"]

    @pytest.mark.parametrize("name", VECTORS["broken"])
    def test_it_refuses_broken_answers(self, name: str) -> None:
        item = VECTORS["broken"][name]
        with answering(item["content_type"], bytes.fromhex(item["hex"])) as url:
            done = javascript(url, {"prompts": ["x"], "stream": item["content_type"] != MSGPACK})
        assert done.returncode != 0
        assert done.stdout == ""

    @pytest.mark.parametrize("stream", [False, True])
    def test_it_and_ours_see_the_same_groups(self, server_url: str, stream: bool) -> None:
        request = {"prompts": ["12+7=", [5, 6, 7]], "group_size": 3, "max_tokens": 40}
        key = f"a-key-of-this-test-{stream}"
        done = javascript(server_url, {**request, "stream": stream}, key)
        assert done.returncode == 0, done.stderr
        # Under one key there is one piece of work, whoever asks for it.
        ours = httpx.post(
            f"{server_url}/rollout",
            json=request,
            headers={"accept": MSGPACK, "idempotency-key": key},
            timeout=120,
        )
        assert json.loads(done.stdout) == decode(ours.content, MSGPACK)["groups"]

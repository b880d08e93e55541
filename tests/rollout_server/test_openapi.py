"""The document at ``/openapi.json``: its examples work, and nothing that it allows breaks a server.

The engine is a fake, since it is the handling of requests that is put to the test; schemathesis
makes requests of the document, right ones and wrong ones.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from rollout_server.app import create_app
from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.protocol import JSON, MSGPACK, SAFETENSORS
from tests.rollout_server.support import FakeEngine, serving

TIMEOUT_S = 60
QUICK = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,  # a failure is one for everybody
    suppress_health_check=list(HealthCheck),
)
# The engine has none of what these drive; their own tests use vLLM's.
OTHERS = (
    r"^/(v1|pause|resume|sleep|wake_up|is_paused|is_sleeping|reset_prefix_cache|get_world_size|"
    r"server_info|init_weight|start_weight|update_weight|finish_weight)"
)


@schemathesis.serializer(SAFETENSORS)
def _as_it_is(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openapi")
    options = ServerSettings(
        model=str(tiny_model), staging_dir=folder / "staging", max_body_mib=1, max_samples=4096
    )
    with serving(create_app(options, build_engine=lambda _: FakeEngine())) as url:
        with RolloutClient(url) as client:
            client.wait_ready(30)
        yield url


@pytest.fixture(scope="module")
def document(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/openapi.json").json()
    return answer


def examples(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and example of every operation that has one."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get(JSON, {})
            if "example" in content:
                yield path, method, content["example"]


def test_every_body_has_an_example_and_every_example_works(
    url: str, document: dict[str, Any]
) -> None:
    tried, fence = [], 0
    for path, method, example in examples(document):
        if "fence" in example:
            example["fence"] = fence  # of the lease that was granted a moment ago
        for content_type, body in (
            (JSON, json.dumps(example).encode()),
            (MSGPACK, msgpack.packb(example)),
        ):
            answer = httpx.request(
                method,
                url + path.replace("{name}", "default"),
                content=body,
                headers={"content-type": content_type, "accept": JSON},
                timeout=TIMEOUT_S,
            )
            assert answer.status_code == 200, (path, answer.text)
            fence = answer.json().get("fence", fence)
        tried.append(path)
    assert {"/rollout", "/score", "/policies/{name}/lease", "/rewards"} <= set(tried)


@pytest.mark.parametrize("mode", GenerationMode)
def test_nothing_that_is_sent_breaks_it(url: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json").exclude(path_regex=OTHERS)
    found: Any = schema.get_all_operations()
    operations = [operation.ok() for operation in found]
    assert len(operations) > 10
    for operation in operations:

        @QUICK
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            answer = case.call(base_url=url, timeout=TIMEOUT_S)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text[:2000])
            if answer.status_code >= 400 and answer.status_code != 404:
                assert answer.headers["content-type"][0] in (JSON, MSGPACK)

        with contextlib.suppress(Unsatisfiable):  # where nothing is sent, nothing can be wrong
            send()


@pytest.mark.usefixtures("document")
class TestHostileBodies:
    """What no document describes."""

    @QUICK
    @given(body=st.binary(max_size=300), kind=st.sampled_from([JSON, MSGPACK]))
    def test_any_bytes(self, url: str, body: bytes, kind: str) -> None:
        for path in ("/rollout", "/score"):
            answer = httpx.post(
                url + path, content=body, headers={"content-type": kind}, timeout=TIMEOUT_S
            )
            assert 400 <= answer.status_code < 500, answer.text[:500]

    @QUICK
    @given(
        body=st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_any_document_as_prompts(self, url: str, body: Any) -> None:
        asked = {"prompts": body, "max_tokens": 2, "group_size": 1}
        packed = msgpack.packb(asked, unicode_errors="surrogatepass")
        answer = httpx.post(
            f"{url}/rollout",
            content=packed,
            headers={"content-type": MSGPACK},
            timeout=TIMEOUT_S,
        )
        assert answer.status_code < 500, answer.text[:500]

    @pytest.mark.parametrize("path", ["/rollout", "/score", "/reload", "/policies/default/lease"])
    def test_compressed_bodies_are_refused_unread(self, url: str, path: str) -> None:
        bomb = gzip.compress(b"[" * (256 << 20), compresslevel=1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for encoding in ("gzip", "deflate", "br", "zstd", "gzip, identity"):
            answer = httpx.post(
                url + path,
                content=bomb,
                headers={"content-type": JSON, "content-encoding": encoding},
                timeout=TIMEOUT_S,
            )
            assert answer.status_code == 415, answer.text
            assert encoding in answer.json()["error"]["message"]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 128 << 10, "it was unpacked"  # in KiB; the server runs in this process

    @pytest.mark.parametrize("kind", [JSON, MSGPACK])
    def test_deep_nesting_is_refused(self, url: str, kind: str) -> None:
        body = b"[" * 900_000 if kind == JSON else b"\x91" * 900_000
        answer = httpx.post(
            f"{url}/rollout", content=body, headers={"content-type": kind}, timeout=TIMEOUT_S
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "malformed_body"

"""Spans of a trainer, its requests and the server's publish are one trace, at an OTLP endpoint."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rollout_server.app import create_app
from rollout_server.settings import ServerSettings
from shared import tracing
from shared.client import RolloutClient
from tests.rollout_server.support import FakeEngine, Weights, lazy, serving
from trainer.background import in_background

BASE, EXACT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


class Collector:
    """Receives what is exported; ``spans`` by name, the last of each."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.services: set[str] = set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    collector.receive(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def receive(self, exported: Any) -> None:
        for of_resource in exported.resource_spans:
            for attribute in of_resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in of_resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}

    def parent(self, name: str) -> str | None:
        """Name of the span that encloses one."""
        wanted = self.spans[name].parent_span_id
        return next((n for n, span in self.spans.items() if span.span_id == wanted), None)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setenv(BASE, collector.url + "/")
    monkeypatch.delenv(EXACT, raising=False)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    yield collector
    collector.close()


@pytest.fixture
def client(tiny_model: Path, tmp_path: Path) -> Iterator[RolloutClient]:
    settings = ServerSettings(model=str(tiny_model), spool_dir=tmp_path / "spool")
    app = create_app(settings, build_engine=lambda _: FakeEngine())
    with serving(app) as url, RolloutClient(url) as client:
        client.wait_ready(60)
        yield client


def test_a_step_is_one_trace(collector: Collector, client: RolloutClient, base: Weights) -> None:
    with tracing.exported("tito-trainer"), tracing.span("step", step=3):
        with tracing.span("sampling"):
            rollout = in_background(lambda: client.rollout([[1, 2]], max_tokens=4), "ask")
            rollout.result(60)
        with tracing.span("publishing"):
            client.reload(lazy(base.tensors))
    spans = collector.spans
    assert {span.trace_id for span in spans.values()} == {spans["step"].trace_id}
    assert collector.services == {"tito-trainer"}
    assert collector.parent("step") is None
    assert collector.parent("sampling") == collector.parent("publishing") == "step"
    assert collector.parent("POST /rollout") == "sampling"
    assert collector.parent("POST /reload") == "publishing"
    stages = [name for name in spans if name.startswith("publish ")]
    assert {"publish verify", "publish pause", "publish load", "publish resume"} <= set(stages)
    assert {collector.parent(name) for name in stages} == {"POST /reload"}
    found = {a.key: a.value for a in spans["POST /reload"].attributes}
    assert found["http.route"].string_value == "/reload"
    assert found["http.response.status_code"].int_value == 200
    assert {a.key: a.value.int_value for a in spans["step"].attributes} == {"step": 3}


def test_without_an_endpoint_nothing_happens(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (BASE, EXACT):
        monkeypatch.delenv(name, raising=False)
    with tracing.exported("tito-trainer"), tracing.span("step") as span:
        assert span is None
        assert tracing.headers() == {}
        client.info()
    code = (
        "import sys; from shared import tracing\n"
        "with tracing.exported('x'), tracing.span('y'): pass\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_exact_endpoint_is_taken_before_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BASE, "http://a:4318/")
    assert tracing.endpoint() == "http://a:4318/v1/traces"
    monkeypatch.setenv(EXACT, "http://b/x")
    assert tracing.endpoint() == "http://b/x"


def test_a_collector_that_is_away_costs_nothing(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXACT, "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with tracing.exported("tito-trainer"), tracing.span("step"):
        assert client.rollout([[1, 2]], max_tokens=4).samples

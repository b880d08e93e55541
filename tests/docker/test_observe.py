"""What Prometheus scrapes and Grafana draws: names that the server really exposes."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollout_server.metrics import Metrics
from tests.conftest import free_port
from trainer.config import TrackingConfig
from trainer.metrics import StepMetrics
from trainer.trackers import Prometheus

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARDS = {
    path.name: json.loads(path.read_text())
    for path in sorted((DOCKER / "grafana" / "dashboards").glob("*.json"))
}
TARGETS = [
    (f"{name}-{panel['title']}-{target['refId']}", panel, target)
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel.get("targets", [])
]
_SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def exposed() -> dict[str, set[str]]:
    """Names of series that the server and a trainer have, with their labels."""
    return _series(Metrics()) | _series(_trainer())


def _series(metrics: Any) -> dict[str, set[str]]:
    labels = {
        collector._name: set(collector._labelnames)
        for collector in [*vars(metrics).values(), *getattr(metrics, "_gauges", {}).values()]
        if hasattr(collector, "_labelnames")
    }
    text = generate_latest(metrics._registry).decode()
    return {
        family.name + suffix: labels[family.name] | ({"le"} if suffix == "_bucket" else set())
        for family in text_string_to_metric_families(text)
        if family.name in labels
        for suffix in _SUFFIXES[family.type]
    }


@cache
def _trainer() -> Prometheus:
    """After a step and a measurement."""
    tracker = Prometheus(TrackingConfig(metrics_port=free_port()))
    tracker.log({f"train/{field.name}": 0.0 for field in fields(StepMetrics)}, 1)
    tracker.log({"evaluation/greedy": 0.0}, 1)
    tracker.close()
    return tracker


def provisioned(kind: str) -> Any:
    (path,) = (DOCKER / "grafana" / "provisioning" / kind).glob("*.yml")
    return yaml.safe_load(path.read_text())


def series(query: str) -> list[str]:
    return re.findall(r"\btito_\w+", query)


def labels(query: str, legend: str) -> set[str]:
    grouped = re.findall(r"\bby \(([^)]*)\)", query)
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    shown = re.findall(r"{{\s*(\w+)\s*}}", legend)
    return {name.strip() for group in grouped for name in group.split(",")} | {*selected, *shown}


@pytest.mark.parametrize(("panel", "target"), [t[1:] for t in TARGETS], ids=[t[0] for t in TARGETS])
def test_a_panel_asks_for_what_the_server_exposes(
    panel: dict[str, Any], target: dict[str, Any]
) -> None:
    query, legend = target["expr"], target.get("legendFormat", "")
    names, known = series(query), exposed()
    assert names, "a panel without a metric of ours"
    assert set(names) <= known.keys()
    assert labels(query, legend) <= set.union(*(known[name] for name in names))
    assert panel["datasource"]["uid"] == provisioned("datasources")["datasources"][0]["uid"]


def test_the_check_sees_what_is_wrong() -> None:
    assert series('sum(rate(tito_sample_total{a="x"}[5m]))') == ["tito_sample_total"]
    assert "tito_sample_total" not in exposed()
    assert labels('sum by (le, b) (x{a="x", c!~"y"})', "{{ d }}") == {"le", "a", "b", "c", "d"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert taken.isdisjoint(cells)
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARDS[name]["panels"]}) == len(
        DASHBOARDS[name]["panels"]
    )


def test_compose_mounts_what_is_provisioned() -> None:
    compose = yaml.safe_load((DOCKER.parent / "docker-compose.yml").read_text())["services"]
    folder = provisioned("dashboards")["providers"][0]["options"]["path"]
    assert f"./docker/grafana/dashboards:{folder}:ro" in compose["grafana"]["volumes"]
    url = provisioned("datasources")["datasources"][0]["url"]
    assert url == "http://prometheus:9090"
    assert compose["prometheus"]["ports"][0].endswith(":9090")
    scraped = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    job, training = scraped["scrape_configs"]
    alias = compose["server"]["networks"]["default"]["aliases"][0]
    port = compose["server"]["ports"][0].rsplit(":", 1)[1]
    assert job["static_configs"][0]["targets"] == [f"{alias}:{port}"]
    assert job["authorization"]["credentials_file"] == "/run/secrets/metrics_token"
    command = compose["trainer-gpu"]["command"]
    (port,) = (part.split("=")[1] for part in command if part.startswith("tracking.metrics_port"))
    assert training["static_configs"][0]["targets"] == [f"trainer-gpu:{port}"]

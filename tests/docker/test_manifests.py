"""What is deployed: manifests that a cluster would accept, and lock files that are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rollout_server.settings import ServerSettings, settings_from_args
from trainer.cli import build_parser

DOCKER = Path(__file__).parents[2] / "docker"
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
DOCUMENTS = [(path.name, item) for path in MANIFESTS for item in yaml.safe_load_all(path.open())]
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER.parent / "docker-compose.yml").open())


@pytest.mark.parametrize(
    "document",
    [item for _, item in DOCUMENTS],
    ids=[f"{name}-{d['kind']}" for name, d in DOCUMENTS],
)
def test_a_cluster_would_accept_it(document: Any) -> None:
    kubernetes_validate.validate(document, "1.34", strict=True)


def test_a_cluster_would_not_accept_anything() -> None:
    spoilt = {**DOCUMENTS[1][1], "spec": {**DOCUMENTS[1][1]["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoilt, "1.34", strict=True)


def containers() -> dict[str, list[str]]:
    """The arguments of every container, by its name, defaults in the place of variables."""
    found = {
        name: service["command"]
        for name, service in COMPOSE["services"].items()
        if "command" in service
    }
    for _, document in DOCUMENTS:
        if document["kind"] in ("Deployment", "Job"):
            (container,) = document["spec"]["template"]["spec"]["containers"]
            found[document["kind"]] = container["args"]
    return found


def is_server(name: str) -> bool:
    return name == "Deployment" or "server" in name


@pytest.mark.parametrize("name", [name for name in containers() if is_server(name)])
def test_the_server_takes_these_flags(name: str) -> None:
    assert isinstance(settings_from_args(containers()[name]), ServerSettings)


@pytest.mark.parametrize("name", [name for name in containers() if not is_server(name)])
def test_the_trainer_takes_these_arguments(name: str) -> None:
    build_parser().parse_known_args(containers()[name])


def test_the_locks_of_the_images_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("lock", DOCKER / "lock.py")
    assert spec
    assert spec.loader
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    for image, root in lock.IMAGES.items():
        assert (DOCKER / f"{image}.lock").read_text() == lock.render(root), "run docker/lock.py"

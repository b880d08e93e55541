"""What is deployed: manifests that a cluster would accept, and lock files that are up to date."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rollout_server.settings import ServerSettings, settings_from_args
from trainer.arguments import parse_arguments

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


def with_defaults(text: str) -> str:
    """Variables of Compose replaced by what they are if nobody sets them."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def containers() -> dict[str, list[str]]:
    """The arguments of every container, by its name, defaults in the place of variables."""
    found = {
        name: [with_defaults(word) for word in service["command"]]
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
    parse_arguments(containers()[name])


IMAGES = {
    name: service for name, service in COMPOSE["services"].items() if "tito-" in service["image"]
}
JOB = next(item for _, item in DOCUMENTS if item["kind"] == "Job")["spec"]["template"]["spec"]
HOME = "/home/tito"  # where the images run


@pytest.mark.parametrize("image", ["server", "trainer"])
def test_images_for_gpus_have_a_compiler(image: str) -> None:
    """Triton compiles with it what starts a kernel."""
    stage = (DOCKER / f"{image}.Dockerfile").read_text().partition("FROM runtime AS gpu\n")[2]
    assert re.search(r"apt-get install .*\bgcc libc6-dev\b", stage)


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_compiled_can_be_loaded(name: str) -> None:
    """Triton and Inductor load libraries from these, and Docker forbids that unless told."""
    mounts = dict(mount.split(":", 1) for mount in IMAGES[name]["tmpfs"])
    assert {path for path, options in mounts.items() if "exec" in options.split(",")} == {
        "/tmp",
        HOME,
    }


@pytest.mark.parametrize("name", IMAGES)
def test_who_runs_an_image_for_gpus_gets_some(name: str) -> None:
    image, service = IMAGES[name]["image"], IMAGES[name]
    assert image.endswith((":cpu", ":gpu")), "an image of which nobody knows what it needs"
    assert service["build"]["target"] == image[-3:]
    assert ("deploy" in service) == image.endswith(":gpu")


def default_config() -> str:
    """The configuration that trainers on GPUs run unless they are given another."""
    mounts = [with_defaults(volume) for volume in IMAGES["trainer-gpu"]["volumes"]]
    (source,) = (m.split(":")[0] for m in mounts if ":/config/train.toml" in m)
    config = (DOCKER.parent / source).read_text()
    assert source.removeprefix("./") in (DOCKER / "kubernetes" / "trainer.yaml").read_text()
    return config


def mounted() -> dict[str, set[str]]:
    """Paths in each trainer that come from outside."""
    compose = [with_defaults(volume).split(":")[1] for volume in IMAGES["trainer-gpu"]["volumes"]]
    (container,) = JOB["containers"]
    job = [m["mountPath"] for m in container["volumeMounts"] if not is_empty(m["name"])]
    return {"compose": set(compose), "kubernetes": set(job)}


def is_empty(volume: str) -> bool:
    """Whether a volume of the Job begins with nothing in it."""
    return any("emptyDir" in item for item in JOB["volumes"] if item["name"] == volume)


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_the_files_that_the_default_configuration_reads_are_mounted(where: str) -> None:
    config = tomllib.loads(default_config())
    paths = [Path(HOME, config[part]["path"]) for part in ("data", "evaluation")]
    for path in paths:
        assert any(path.is_relative_to(mount) for mount in mounted()[where]), path


@pytest.mark.parametrize("name", ["server-gpu", "Deployment"])
def test_the_server_is_what_the_default_configuration_asks_for(name: str) -> None:
    (asked,) = re.findall(r"#.*-m rollout_server (.*)", default_config())
    wanted = settings_from_args(asked.split())
    assert settings_from_args(containers()[name]).max_model_len >= wanted.max_model_len
    assert wanted.max_model_len > ServerSettings.model_fields["max_model_len"].default


def test_the_locks_of_the_images_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("lock", DOCKER / "lock.py")
    assert spec
    assert spec.loader
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    for image, root in lock.IMAGES.items():
        assert (DOCKER / f"{image}.lock").read_text() == lock.render(root), "run docker/lock.py"

"""The contract installs and imports without the heavy halves of the system."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

HEAVY = ["torch", "vllm", "fastapi", "transformers", "uvicorn", "safetensors", "huggingface_hub"]
MODULES = [
    "byte_link", "channel", "client", "codec", "cuda", "errors", "nccl", "protocol", "requests",
    "tokens", "weights",
]  # fmt: skip


def modules_after(statement: str) -> set[str]:
    """Names of the top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_nothing_heavy_comes_along(module: str) -> None:
    loaded = modules_after(f"import shared.{module}")
    assert "shared" in loaded
    assert loaded.isdisjoint([*HEAVY, "rollout_server", "trainer"])


def test_the_client_waits_with_what_takes_long_to_import() -> None:
    slow = ["asyncio", "httpx", "numpy", "pydantic", "zstandard"]
    assert modules_after("import shared.client").isdisjoint(slow)
    made = "from shared.client import RolloutClient; RolloutClient('http://127.0.0.1:9').close()"
    loaded = modules_after(made)
    assert "httpx" in loaded
    assert loaded.isdisjoint(["numpy", "pydantic", *HEAVY])


def test_both_clients_come_from_one_module() -> None:
    asked = "from shared.client import AsyncRolloutClient; assert AsyncRolloutClient.rollout"
    assert "asyncio" in modules_after(asked)
    with pytest.raises(AttributeError, match="has no attribute 'RolloutClients'"):
        importlib.import_module("shared.client").RolloutClients  # noqa: B018

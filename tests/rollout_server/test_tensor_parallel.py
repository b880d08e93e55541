"""Two workers that hold half of the model each: both are checked, and one bad bit is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from shared.errors import EngineFailure
from tests.rollout_server.engines import LONG_PROMPT, PATIENCE_S, greedy, running
from tests.rollout_server.faulty_worker import FAULT_VARIABLE, FaultyEngine
from tests.rollout_server.support import EMBEDDING, Weights, lazy, make_live

Reports = list[list[dict[str, int]]]


class ReportingEngine(FaultyEngine):
    """Keeps what the workers say of each load, the failed ones left out."""

    def __init__(self, settings: ServerSettings) -> None:
        self.reports: Reports = []
        super().__init__(settings)

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        answers = await super().call_workers(method, **arguments)
        if method == "tito_load_weights":
            self.reports.append(answers)
        return answers


@dataclass(frozen=True)
class Pair:
    """A server with two workers.

    Attributes:
        fault: what the second worker's next load is told by; see ``faulty_worker.py``.
    """

    client: RolloutClient
    engine: ReportingEngine
    fault: Path


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    settings = ServerSettings(
        model=str(tiny_model),
        tensor_parallel=2,
        staging_dir=folder / "staging",
        recovery_seconds=PATIENCE_S,
    )
    engines: list[ReportingEngine] = []

    def build(settings: ServerSettings) -> ReportingEngine:
        engines.append(ReportingEngine(settings))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT_VARIABLE, str(folder / "fault"))
        # vLLM gives each worker a NUMA node of its own, or will not start.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        with running(settings, build) as server:
            yield Pair(server.client, engines[0], folder / "fault")


@pytest.mark.timeout(1200)
def test_every_parameter_of_both_workers_is_compared(
    pair: Pair, first: Weights, second: Weights
) -> None:
    for weights in (first, second):
        version = pair.client.info().version
        assert pair.client.reload(lazy(weights.tensors)).version == version + 1
        assert greedy(pair.client) == weights.greedy(LONG_PROMPT, 10)
        reports = pair.engine.reports[-1]
        assert len(reports) == 2
        assert all(report["checked"] == report["parameters"] > 10 for report in reports), reports


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        EMBEDDING,
        "model.norm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
    ],
)
def test_one_bit_of_one_worker(pair: Pair, first: Weights, second: Weights, name: str) -> None:
    version = make_live(pair.client, first)
    pair.fault.write_text(f"corrupt {name}")
    with pytest.raises(EngineFailure, match=f"version {version} is live again"):
        pair.client.reload(lazy(second.tensors))
    assert not pair.fault.exists(), "nothing went wrong, so the test proves nothing"
    assert pair.client.info().digest == first.digest
    assert greedy(pair.client) == first.greedy(LONG_PROMPT, 10)

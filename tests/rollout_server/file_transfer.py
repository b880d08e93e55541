"""A weight-transfer backend for vLLM that runs on CPU: the trainer sends names of files.

It does between start and finish what vLLM's NCCL backend does, and it is registered with vLLM and
created, pointed at a model and called by vLLM's worker like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rollout_server.vllm_engine import VLLMEngine
from rollout_server.worker_plugin import WeightLoader

BACKEND = "files"


@dataclass
class Folder(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
    """Where the trainer's files lie."""

    folder: str


@dataclass
class Tensors(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
    """Which tensors of which file come."""

    file: str
    names: list[str]


class FileTransfer(WeightTransferEngine):  # type: ignore[misc, unused-ignore]
    """Receives tensors from files."""

    init_info_cls = Folder
    update_info_cls = Tensors
    folder: Path

    def init_transfer_engine(self, init_info: Folder) -> None:
        self.folder = Path(init_info.folder)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator, which there is not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Tensors) -> None:
        with safe_open(self.folder / update_info.file, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in update_info.names)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is no connection."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


class FileLoader(WeightLoader):
    """Brings this module, and so the backend, into vLLM's workers."""


class FileEngine(VLLMEngine):
    """vLLM with that backend."""

    worker_extension = f"{__name__}.FileLoader"

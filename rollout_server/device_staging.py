"""Worker methods for what lies on the device before it is loaded: channels, and copies of uploads.

Opening and loading are calls of the engine. All else is done by a thread of its own, see
:mod:`rollout_server.worker_buffer`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout_server.worker_buffer import WorkerBuffer
from rollout_server.worker_channel import WorkerChannel
from rollout_server.worker_upload import WorkerUpload
from shared.channel import Layout
from shared.weights import TensorSpec

log = logging.getLogger("tito.staging")


class StagedTensors:
    """What a buffer holds, in the form in which checkpoints are loaded."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def read(self, name: str) -> Tensor | None:
        """The tensor of a name, if there is one."""
        return self.tensors.get(name)


class _Places:
    """Where a model's parameters are. Looking for them in all modules takes longer than a load.

    Args:
        model: its modules stay what they are; their parameters may be replaced, or moved.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = [
            (module._parameters, name, parameter, parameter.data_ptr())
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def __len__(self) -> int:
        return len(self._found)

    def are_still_there(self) -> bool:
        """Whether all parameters are where they were."""
        return all(
            owner.get(name) is parameter and parameter.data_ptr() == place
            for owner, name, parameter, place in self._found
        )


class DeviceStaging:
    """Worker methods for buffers on the device; ``self`` is vLLM's worker."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any
    _tito_buffers: dict[str, WorkerBuffer] | None = None
    _tito_plan: Any = None
    _tito_places: _Places | None = None

    def tito_channel_open(
        self, channel: str, folder: str, kind: str, tensors: list[Any], interface: str, secret: str
    ) -> dict[str, Any]:
        """Allocate a buffer and wait for commands at ``FOLDER/RANK``.

        Args:
            channel: its name.
            folder: of the sockets.
            kind: ``ipc`` or ``nccl``.
            tensors: name, dtype and shape of each.
            interface, secret: of the sockets that stand in for NCCL without GPUs.

        Returns:
            ``rank``, and how the trainer reaches the buffer.
        """
        layout = Layout.of(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors)
        rank = self._tito_rank()
        address = Path(folder) / str(rank)
        opened = WorkerChannel(
            address,
            kind,
            layout,
            self.device,
            interface,
            secret,
            self._tito_prepare,
            self._tito_forget,
        )
        try:
            described = opened.described(leads=rank == 0)
        except BaseException:
            opened.end()  # or its memory would stay for as long as the worker lives
            raise
        self._tito_keep(channel, opened)
        return {"rank": rank, **described}

    def tito_copies_uploads(self) -> bool:
        """Whether uploads can be loaded from the device: by a plan, and after a copy to a GPU."""
        if self.device.type != "cuda" or self._tito_plan is False:
            return False
        from rollout_server.load_plan import check_plain

        try:
            check_plain(self.model_runner.get_model())
        except ValueError as error:
            log.info("uploads are loaded from the host's memory: %s", error)
            return False
        return True

    def tito_upload_open(self, upload: str, folder: str) -> dict[str, Any]:
        """Wait for commands at ``FOLDER/RANK``; the copy is allocated when one is made.

        Args:
            upload: names it.
            folder: of the sockets.

        Returns:
            ``rank``.
        """
        rank = self._tito_rank()
        # What the first steps of a large batch take is counted as the engine's from its start.
        reserved = int(getattr(self, "peak_activation_memory", 0))
        address = Path(folder) / str(rank)
        opened = WorkerUpload(address, self.device, reserved, self._tito_prepare, self._tito_forget)
        self._tito_keep(upload, opened)
        return {"rank": rank}

    def _tito_rank(self) -> int:
        parallel = self.vllm_config.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + self.rank)

    def _tito_keep(self, name: str, opened: WorkerBuffer) -> None:
        opened.start()
        known = {name: old for name, old in (self._tito_buffers or {}).items() if old.is_alive()}
        self._tito_buffers = {**known, name: opened}

    def tito_buffer_load(self, name: str) -> dict[str, int]:
        """Replace every weight of this worker's model by what a buffer holds, and check it.

        On a GPU the first load is vLLM's own, from which a plan of copies is made for the next.

        Raises:
            RuntimeError: some parameters are not those of the buffer. The model is then
                half-written: load a complete checkpoint before any forward pass.
        """
        found = (self._tito_buffers or {}).get(name)
        tensors = None if found is None else found.tensors
        if tensors is None:
            raise RuntimeError("the buffer has gone; nothing has been loaded")
        if count := self._tito_planned(tensors):
            self.model_runner.reset_lora_state()
            return {"parameters": count, "checked": count}
        return self._tito_replace(StagedTensors(tensors))

    def _tito_planned(self, tensors: Mapping[str, Tensor]) -> int:
        """Load by the plan of copies, which the first load makes.

        Returns:
            How many parameters were loaded and checked; 0 if there can be no plan.
        """
        if self._tito_plan is False:
            return 0
        from rollout_server.load_plan import LoadPlan

        places = self._tito_places
        if self._tito_plan is None or places is None or not places.are_still_there():
            # Made anew should the parameters have moved: copies into the old ones would go unseen.
            model = self.model_runner.get_model()
            try:
                self._tito_plan = LoadPlan.recorded(model, tensors)
                self._tito_places = places = _Places(model)
            except ValueError as error:
                # As text: a log that kept the error itself would keep the memory, too.
                log.info("there is no plan of copies: %s", f"{error}")
                self._tito_plan = False
                return 0
        else:
            self._tito_plan.apply(tensors)
        if different := self._tito_plan.differing(tensors):
            raise RuntimeError(
                f"{len(different)} parameters differ from the buffer after the load, "
                f"first {different[0]}"
            )
        return len(places)

    def _tito_prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Do what can be done for a load while generation goes on."""
        if self._tito_plan:
            self._tito_plan.prepare(tensors)

    def _tito_forget(self) -> None:
        """Nothing of a buffer's memory is in use any more."""
        if self._tito_plan:
            self._tito_plan.forget_sources()

    def _tito_replace(self, staged: Any) -> dict[str, int]:
        raise NotImplementedError

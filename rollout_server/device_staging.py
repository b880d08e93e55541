"""Worker methods for channels: opening one, and loading what it has brought.

Both are calls of the engine. All else that happens in a channel is done by a thread of its own, see
:mod:`rollout_server.worker_channel`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_server.worker_channel import WorkerChannel
from shared.channel import Layout
from shared.weights import TensorSpec

log = logging.getLogger("tito.staging")


class StagedTensors:
    """What a channel has brought, in the form in which checkpoints are loaded."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def read(self, name: str) -> Tensor | None:
        """The tensor of a name, if there is one."""
        return self.tensors.get(name)


class DeviceStaging:
    """Worker methods for channels; ``self`` is vLLM's worker."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any
    _tito_channels: dict[str, WorkerChannel] | None = None
    _tito_plan: Any = None
    _tito_places: list[int] | None = None

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
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        address = Path(folder) / str(rank)
        opened = WorkerChannel(
            address, kind, layout, self.device, interface, secret, self._tito_forget
        )
        try:
            described = opened.described(leads=rank == 0)
        except BaseException:
            opened.end()  # or its memory would stay for as long as the worker lives
            raise
        opened.start()
        known = {name: old for name, old in (self._tito_channels or {}).items() if old.is_alive()}
        self._tito_channels = {**known, channel: opened}
        return {"rank": rank, **described}

    def tito_channel_load(self, channel: str) -> dict[str, int]:
        """Replace every weight of this worker's model by what a channel holds, and check it.

        On a GPU the first load is vLLM's own, from which a plan of copies is made for the next.

        Raises:
            RuntimeError: some parameters are not those of the channel. The model is then
                half-written: load a complete checkpoint before any forward pass.
        """
        found = (self._tito_channels or {}).get(channel)
        tensors = None if found is None else found.tensors
        if tensors is None:
            raise RuntimeError("the channel was closed; nothing has been loaded")
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

        model = self.model_runner.get_model()
        places = [parameter.data_ptr() for parameter in model.parameters()]
        if self._tito_plan is None or places != self._tito_places:
            # Made anew should the parameters have moved: copies into the old ones would go unseen.
            try:
                self._tito_plan, self._tito_places = LoadPlan.recorded(model, tensors), places
            except ValueError as error:
                log.info("channels load as uploads do: %s", error)
                self._tito_plan = False
                return 0
        else:
            self._tito_plan.apply(tensors)
        if different := self._tito_plan.differing(tensors):
            raise RuntimeError(
                f"{len(different)} parameters differ from the channel after the load, "
                f"first {different[0]}"
            )
        return len(places)

    def _tito_forget(self) -> None:
        """Nothing of a channel's memory is in use any more."""
        if self._tito_plan:
            self._tito_plan.forget_sources()

    def _tito_replace(self, staged: Any) -> dict[str, int]:
        raise NotImplementedError

"""Inside a worker: weights that a trainer sends by vLLM's weight transfer, into a file.

vLLM's transfer engines hand what arrives to ``load_weights`` of the model that they are pointed at,
and load it into a model that may be generating. Here they are pointed at one that has no layers and
appends each tensor to a safetensors file. The live model is not touched, so the file can be
verified, loaded and rolled back like any other checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor, nn

from shared.weights import PREFIX_BYTES

SAFETENSORS_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class Spill(nn.Module):
    """What stands in for the model: keeps tensors instead of loading them.

    Args:
        path: of the safetensors file; None drops the tensors, for all ranks but the first, which
            receive the same.
        header_bytes: room for the header, which is known last but comes first.
        max_bytes: of all tensors together.
    """

    def __init__(self, path: Path | None, header_bytes: int, max_bytes: int) -> None:
        super().__init__()
        self._file = path.open("wb") if path else None
        self._header_bytes = header_bytes
        self._max_bytes = max_bytes
        self._end = 0
        self._header: dict[str, Any] = {}
        if self._file:
            self._file.seek(PREFIX_BYTES + header_bytes)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Append tensors to the file; vLLM's engines call this, with buffers that they reuse.

        Raises:
            ValueError: a tensor comes a second time, has a dtype that safetensors lacks, or is too
                much.
        """
        names = set()
        for name, tensor in weights:
            names.add(name)
            if self._file:
                self._append(name, tensor)
        return names

    def _append(self, name: str, tensor: Tensor) -> None:
        if name in self._header or tensor.dtype not in SAFETENSORS_NAMES:
            raise ValueError(f"tensor {name} came twice, or has a dtype unknown: {tensor.dtype}")
        content = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        end = self._end + content.nbytes
        if end > self._max_bytes:
            raise ValueError(f"the tensors exceed {self._max_bytes} bytes")
        assert self._file is not None
        self._file.write(content.data)
        self._header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, end],
        }
        self._end = end

    def finish(self) -> None:
        """Write the header and close the file.

        Raises:
            ValueError: there are far more tensors than the model has.
        """
        if self._file is None:
            return
        with self._file as file:
            header = orjson.dumps(self._header)
            if len(header) > self._header_bytes:
                raise ValueError(f"{len(self._header)} tensors came, more than the model has")
            file.seek(0)
            file.write(self._header_bytes.to_bytes(PREFIX_BYTES, "little"))
            file.write(header.ljust(self._header_bytes))

    def abandon(self) -> None:
        """Close the file as it is."""
        if self._file:
            self._file.close()


class WeightReceiver:
    """Worker methods for one update at a time; ``self`` is vLLM's worker."""

    rank: int
    vllm_config: Any
    weight_transfer_engine: Any
    _tito_spill: Spill | None = None

    def tito_receive_begin(self, path: str, header_bytes: int, max_bytes: int) -> None:
        """Send whatever arrives from now on to a new file."""
        self.tito_receive_abandon()
        engine = self.weight_transfer_engine
        self._tito_spill = Spill(None if self.rank else Path(path), header_bytes, max_bytes)
        engine.set_weight_update_target(self._tito_spill, engine.model_config)
        with self._tito_config():
            engine.start_weight_update()

    def tito_receive(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive the tensors that ``update_info`` announces; blocks until they are there."""
        if isinstance(update_info, list):
            parallel = self.vllm_config.parallel_config
            update_info = update_info[
                parallel.data_parallel_index * parallel.world_size + self.rank
            ]
        with self._tito_config():
            self.weight_transfer_engine.update_weights(update_info)

    def tito_receive_end(self) -> None:
        """No more tensors come: complete the file."""
        engine = self.weight_transfer_engine
        with self._tito_config():
            engine.finish_weight_update()
        engine.reset_weight_update_target()
        assert self._tito_spill is not None
        self._tito_spill.finish()
        self._tito_spill = None

    def tito_receive_abandon(self) -> None:
        """Forget an update that was begun, if there is one."""
        if self._tito_spill is not None:
            self.weight_transfer_engine.reset_weight_update_target()
            self._tito_spill.abandon()
            self._tito_spill = None

    def _tito_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)

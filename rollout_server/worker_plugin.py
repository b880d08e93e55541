"""What runs inside vLLM's worker processes: reading staged weights into the live model.

vLLM mixes :class:`WeightLoader` into its worker class (``worker_extension_cls``), so ``self`` is
the worker. Methods are called by name through ``AsyncLLM.collective_rpc`` and take and return plain
data only, so nothing needs pickling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

if TYPE_CHECKING:
    import torch


def _read(paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of safetensors files, each read when it is asked for."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


class WeightLoader:
    """Worker methods of Tito; the names are prefixed because they share the worker's namespace."""

    vllm_config: Any
    model_runner: Any

    def tito_load_weights(self, paths: list[str]) -> int:
        """Replace every weight of this worker's model, in place.

        Args:
            paths: safetensors files that together hold a complete checkpoint.

        Returns:
            the number of parameters that were written.

        Raises:
            RuntimeError: the model has parameters that the checkpoint did not fill. The model is
                then half-written: load a complete checkpoint before any forward pass.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(_read(paths))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        self.model_runner.reset_lora_state()
        # vLLM takes a partial set of tensors without a word, so completeness is checked here.
        if missing := sorted(expected - loaded):
            raise RuntimeError(f"{len(missing)} parameters were not loaded, first {missing[0]}")
        return len(expected)

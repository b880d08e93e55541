"""Low-rank adapters: train little, publish the whole.

The adapter's layers are put into the model by ``peft``; its base is frozen and serves as the
reference for the KL, so none is loaded. What is published are the merged weights, one tensor at a
time, so that any rollout server can load them and a version says everything. Checkpoints hold the
adapter alone, in PEFT's format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig as PeftLora
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from trainer.masters import master_of
from trainer.sharding import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.config import LoraConfig

ADAPTER = "default"


def add_lora(model: PreTrainedModel, options: LoraConfig) -> None:
    """Freeze the model and put a fresh adapter into it, which changes nothing yet.

    Raises:
        ValueError: ``target_modules`` names nothing in the model.
    """
    targets = list(options.target_modules)
    untyped: Any = model
    untyped.add_adapter(
        PeftLora(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=0.0,  # dropout would make the trainer another policy than the sampler
            target_modules=targets or "all-linear",
            task_type="CAUSAL_LM",
        )
    )


def base_of(adapter: Path) -> str | None:
    """The model that a directory's adapter belongs to; None when it holds a whole model."""
    path = adapter / "adapter_config.json"
    if not path.is_file():
        return None
    base: str = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return base


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before training."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@dataclass(frozen=True)
class Merged:
    """A tensor of the merged model, computed when it is asked for.

    Attributes:
        base: the frozen weight.
        layer: the adapter's layer around it; None where there is none.
    """

    base: Tensor
    layer: LoraLinear | None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        if self.layer is None:
            return whole(master_of(self.base))
        # So wide that the order of summing, in which devices differ, is lost in rounding: weights
        # are known by their digest, which must be the same wherever they are merged again.
        down = master_of(self.layer.get_parameter(f"lora_A.{ADAPTER}.weight")).double()
        up = master_of(self.layer.get_parameter(f"lora_B.{ADAPTER}.weight")).double()
        scale: float = self.layer.scaling[ADAPTER]
        return self.base.double() + scale * (up @ down)


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Merged]]:
    """Every tensor of the checkpoint that the model with its adapter stands for, in order.

    Works for models without an adapter too.
    """
    layers = {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    # keep_vars leaves the parameters themselves in the dict, so that identity shows what is tied.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_A." not in name and ".lora_B." not in name:
            yield name.replace(".base_layer.", "."), Merged(tensor, layers.get(name))

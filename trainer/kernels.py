"""What makes a model's layers faster or smaller: Liger's kernels, compilation, checkpointing.

Liger (Hsu et al. 2024, 2410.10989) has fused GPU kernels for norms, rotary embeddings and SwiGLU.
Its fused losses are not used: each computes one objective from the hidden states, while every
objective here is computed from log-probabilities, which :mod:`trainer.head` gives without logits.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.config import ModelConfig
from trainer.errors import ConfigError

_PROBE_TOKENS = 64
_TOLERANCE = 0.02
_ADVICE = "set model.liger = false"


def choose_liger(model: PreTrainedModel, options: ModelConfig) -> None:
    """Use Liger's kernels if the configuration wants them, or leaves it open and they are there.

    Raises:
        ConfigError: as :func:`use_liger` does.
    """
    if options.liger is True or (
        options.liger == "auto" and not options.compile and _liger_suits(model)
    ):
        use_liger(model)


def _liger_suits(model: PreTrainedModel) -> bool:
    if model.device.type != "cuda" or find_spec("liger_kernel") is None:
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    return model.config.model_type in KNOWN


def compile_layers(model: PreTrainedModel, again: float = 0.0) -> None:
    """Let torch compile each layer by itself, when it first runs, for any number of tokens.

    Layers are alike, so that one compilation serves them all.

    Args:
        again: share of the activations that are computed again in the backward pass, from 0 to 1;
            torch chooses them, the cheapest first: norms and products before matrix products. It
            holds for all that this process compiles.

    Raises:
        ConfigError: the model does not say what its layers are.
    """
    torch._functorch.config.activation_memory_budget = 1 - again
    for layer in _layers(model, "model.compile"):
        layer.compile(dynamic=True)


def checkpoint_layers(model: PreTrainedModel, share: float) -> None:
    """Keep the activations of the last layers alone, and compute the others' again.

    Memory is at its highest when the backward pass begins, whichever layers are chosen. The first
    ones are computed again when it is nearly done, and the others' activations are gone.

    Args:
        share: of the layers that are computed again, from 0 to 1.

    Raises:
        ConfigError: the model does not say what its layers are.
    """
    if share == 0:
        return
    layers = _layers(model, "model.activation_checkpointing")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers[round(share * len(layers)) :]:
        layer.gradient_checkpointing = False


def _layers(model: PreTrainedModel, wanted_by: str) -> list[GradientCheckpointingLayer]:
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{wanted_by}: {type(model).__name__} does not say what its layers are",
            advice=f"leave {wanted_by} out",
        )
    return layers


def use_liger(model: PreTrainedModel) -> None:
    """Replace what Liger has kernels for, in this model.

    Raises:
        ConfigError: there is no GPU, no package, or no kernels for this architecture; or the model
            computes something else with them.
    """
    if model.device.type != "cuda":
        raise ConfigError(
            f"model.liger needs a GPU, and the model is on {model.device}", advice=_ADVICE
        )
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN
    except ImportError as error:
        raise ConfigError(f"model.liger needs liger-kernel: {error}", advice=_ADVICE) from error
    if model.config.model_type not in KNOWN:
        raise ConfigError(f"Liger has no kernels for {model.config.model_type}", advice=_ADVICE)
    before = _states(model)
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    off = (_states(model) - before).norm() / before.norm()
    if not off.item() <= _TOLERANCE:  # NaN is refused too
        raise ConfigError(
            f"with Liger the model's states differ by {off.item():.2g}", advice=_ADVICE
        )


@torch.no_grad()
def _states(model: PreTrainedModel) -> torch.Tensor:
    """Last hidden states of a few tokens, float32."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(_PROBE_TOKENS, device=model.device).remainder(vocabulary)[None]
    base: Any = model.base_model
    states: torch.Tensor = base(input_ids=ids, use_cache=False).last_hidden_state
    return states.float()

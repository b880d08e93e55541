"""What makes a model's layers faster or smaller: fused kernels, compilation, checkpointing.

Liger (Hsu et al. 2024, 2410.10989) has fused GPU kernels for rotary embeddings and SwiGLU; those
for norms are :mod:`trainer.norm_kernels`, or Liger's where a model's norm is another. Its losses
are not used: each computes one objective from the hidden states, while every objective here is
computed from log-probabilities, which :mod:`trainer.head` gives without logits.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
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
    """Compute some activations again in the backward pass, instead of keeping them.

    An MLP holds about half of a layer's activations, and its last product need not be computed
    again. So up to a share of one half it is the MLPs of the first layers, and beyond it those of
    all and, of the first ones, the whole layer. Memory is at its highest when the backward pass
    begins; it comes to the first layers when the others' activations are gone.

    Args:
        share: from 0 to 1, which is everything.

    Raises:
        ConfigError: the model does not say what its layers are.
    """
    if share == 0:
        return
    layers = _layers(model, "model.activation_checkpointing")
    parts = all(isinstance(getattr(layer, "mlp", None), nn.Module) for layer in layers)
    whole = round((2 * share - 1 if parts else share) * len(layers))
    # No dropout is active, so that there is no random state to be kept.
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    model.gradient_checkpointing_enable(how)
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index < whole
        if parts and whole <= index < round(2 * share * len(layers)):
            mlp: Any = layer.mlp
            mlp.forward = partial(checkpoint, mlp.forward, **how)


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
    from trainer.norm_kernels import use_norm_kernels

    use_norm_kernels(model)
    off = (_states(model) - before).norm() / before.norm()
    if not off.item() <= _TOLERANCE:  # NaN is refused too
        raise ConfigError(
            f"with Liger the model's states differ by {off.item():.2g}", advice=_ADVICE
        )


@torch.no_grad()
def _states(model: PreTrainedModel) -> torch.Tensor:
    """States of a few tokens after the first layer, float32.

    Layers are alike, and what half precision rounds differently grows from one to the next.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(_PROBE_TOKENS, device=model.device).remainder(vocabulary)[None]
    base: Any = model.base_model
    states: torch.Tensor = base(
        input_ids=ids, use_cache=False, output_hidden_states=True
    ).hidden_states[1]
    return states.float()

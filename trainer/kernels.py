"""Fused GPU kernels of Liger (Hsu et al. 2024, 2410.10989) for norms, rotary embeddings and SwiGLU.

Liger's fused losses are not used: each computes one objective from the hidden states, while every
objective here is computed from log-probabilities, which :mod:`trainer.head` gives without logits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from trainer.errors import ConfigError

_PROBE_TOKENS = 64
_TOLERANCE = 0.02
_ADVICE = "set model.liger = false"


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

"""Float32 masters of weights that the model computes with in half precision.

A step of AdamW moves a weight by about the learning rate, which is usually less than half the
distance to the next bfloat16: the step would round away. So the optimizer moves a float32 copy of
each trained weight, its master, and the weight becomes the master, rounded. A backward pass leaves
its gradients in half precision. Each is added to the float32 gradient of its master as soon as it
is there and then let go, so that sums over micro-batches lose nothing, and no second gradient of
the whole model is ever held.

With several ranks there are no copies: what is spread are the float32 weights themselves, and what
is gathered from them is rounded, see :mod:`trainer.sharding`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

Finer = dict[nn.Parameter, Tensor]
"""Float32 values on the host, by the parameter that has them rounded. Who uses one takes it out, so
that neither is held longer than needed."""

_MASTER = "tito_master"
_HALF = (torch.bfloat16, torch.float16)


def halves(module: nn.Module) -> list[nn.Parameter]:
    """The trained parameters that are in half precision."""
    return [p for p in module.parameters() if p.requires_grad and p.dtype in _HALF]


def finer_values(model: nn.Module, source: str) -> Finer:
    """What a checkpoint says of trained weights beyond what they are rounded to.

    Args:
        model: in half precision, as it was loaded from ``source``; may have a fresh adapter.
        source: checkpoint directory or hub name.

    Returns:
        Nothing for weights that are not in the checkpoint, or in no higher precision.
    """
    rounded = {id(parameter) for parameter in halves(model)}
    named = {n: p for n, p in model.named_parameters() if id(p) in rounded}
    adapter = Path(source) / "adapter_model.safetensors"
    if adapter.is_file():
        saved = load_file(adapter)
        names = {n: f"base_model.model.{n.replace('.default.', '.')}" for n in named}
        return {p: saved[names[n]].float() for n, p in named.items() if names[n] in saved}
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if frozen or {p.dtype for p in named.values()} == {AutoConfig.from_pretrained(source).dtype}:
        return {}
    whole: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    stored = dict(whole.named_parameters())
    return {parameter: stored[name].detach() for name, parameter in named.items()}


def widened(parameter: nn.Parameter, finer: Finer) -> Tensor:
    """A parameter's value in float32, on its device; taken out of ``finer``."""
    return finer.pop(parameter, parameter).detach().to(parameter.device, torch.float32)


def keep_masters(model: nn.Module, finer: Finer) -> None:
    """Give every trained half-precision weight a master, which gets its gradients from now on."""
    for parameter in halves(model):
        setattr(parameter, _MASTER, nn.Parameter(widened(parameter, finer)))
        untyped: Any = parameter
        untyped.register_post_accumulate_grad_hook(_hand_on)
    round_masters(model)


def master_of(tensor: Tensor) -> Tensor:
    """What the optimizer updates in place of a parameter; the tensor itself if it has no master."""
    found: Tensor = getattr(tensor, _MASTER, tensor)
    return found


def has_masters(model: nn.Module) -> bool:
    """Whether weights are updated in copies of them."""
    return any(hasattr(parameter, _MASTER) for parameter in model.parameters())


@torch.no_grad()
def round_masters(model: nn.Module) -> None:
    """Let the model compute with its masters as they are now."""
    pairs = [(p, master_of(p)) for p in model.parameters() if hasattr(p, _MASTER)]
    if pairs:
        torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])


def _hand_on(parameter: Tensor) -> None:
    """Add the gradient of one backward pass to the master's, and let it go."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    master = master_of(parameter)
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)

"""One model over several ranks: FSDP2, so that each holds a part of every weight and its moments.

Each decoder layer is gathered when it runs and let go again; embedding, final norm and head, which
may be one tensor, form a group that is there while log-probabilities are computed. Gradients are
summed over ranks, not averaged: the denominator in the loss is that of the whole step already.

Nothing else in the trainer knows of it. To who publishes or saves, the parameters look whole and
``whole`` puts one of them together when it is asked for, with the help of the other ranks. So rank
0 may ask in any order, from any thread, and stop in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.masters import Finer, halves, has_masters, master_of, widened
from trainer.ranks import Ranks

T = TypeVar("T")

GATHER = "gather"
_INSIDE = "tito_inside"
_PLACE = "tito_place"


def shard(model: nn.Module, ranks: Ranks, finer: Finer | None = None) -> None:
    """Spread a model that every rank holds whole; to be called before there is an optimizer.

    Args:
        finer: spread float32 weights with these values, and let the model compute with them
            rounded to what it is in; None spreads the weights as they are.

    Raises:
        ConfigError: the model has no layers that could be spread, or weights of several dtypes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    device, dtype, trained = _alike(model)
    how: dict[str, Any] = {
        "mesh": init_device_mesh(device, (ranks.size,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if finer is None else dtype,
            # A sum over ranks in half precision would lose what each has computed.
            reduce_dtype=torch.promote_types(dtype, torch.float32),
            cast_forward_inputs=False,  # they are what the model makes them on one rank
        ),
    }
    for layer in _layers(model):
        _widen(layer, finer)
        fully_shard(layer, **how)
    _widen(model, finer)
    # A frozen model has no backward pass, after which it would let its own group go.
    fully_shard(model, **how, reshard_after_forward=not trained)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # not every backend scales sums
    setattr(model, _INSIDE, MethodType(_run, model))
    register_fsdp_forward_method(model, _INSIDE)
    for index, parameter in enumerate(model.parameters()):
        setattr(parameter, _PLACE, (ranks, index))


def _alike(model: nn.Module) -> tuple[str, torch.dtype, bool]:
    """What all weights have in common: device, dtype, and whether they are trained."""
    kinds = {(p.device.type, p.dtype, p.requires_grad) for p in model.parameters()}
    if len(kinds) > 1:
        raise ConfigError(f"{type(model).__name__} has weights that are not of one dtype: train it "
                          f"with one process")  # fmt: skip
    (kind,) = kinds
    return kind


def _widen(module: nn.Module, finer: Finer | None) -> None:
    """Make weights of half precision float32, just before they are spread: all do not fit whole."""
    if finer is not None:
        for parameter in halves(module):
            parameter.data = widened(parameter, finer)


def _layers(model: nn.Module) -> list[nn.Module]:
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ConfigError(f"{type(model).__name__} does not say which layers can be spread over "
                          f"ranks: train it with one process")  # fmt: skip
    return layers


def _run(model: Any, work: Callable[..., T], *arguments: Any) -> T:
    return work(model, *arguments)


def inside(model: Any, work: Callable[..., T], *arguments: Any) -> T:
    """``work(model, *arguments)``, a forward pass, during which the model's own weights are there.

    Those of its layers are there while each runs, as always.
    """
    entered: Callable[..., T] | None = getattr(model, _INSIDE, None)
    return work(model, *arguments) if entered is None else entered(work, *arguments)


def whole(parameter: Tensor) -> Tensor:
    """A parameter as if there were one rank; of a model that is spread, for rank 0 alone."""
    return _gathered(parameter, parameter, None)


def _gathered(parameter: Tensor, sharded: Any, slot: str | None) -> Tensor:
    """A parameter, or the optimizer's ``slot`` for it, with the help of the other ranks."""
    place: tuple[Ranks, int] | None = getattr(parameter, _PLACE, None)
    if place is None or not hasattr(sharded, "full_tensor"):
        return sharded  # type: ignore[no-any-return]
    ranks, index = place
    with ranks.turn:
        ranks.tell_all(GATHER, index=index, slot=slot)
        return put_together(sharded)


@torch.no_grad()
def put_together(sharded: Any) -> Tensor:
    """The whole of a tensor of which each rank has a part; all ranks at the same time."""
    full: Tensor = sharded.full_tensor()
    return full


def whole_model(model: nn.Module) -> dict[str, Tensor] | None:
    """The state dict as it is to be saved; None for that of the model as it is.

    That of a model that is spread comes to this process's host memory. Masters stand in for what
    is rounded from them.
    """
    spread = hasattr(model, _INSIDE)
    if not spread and not has_masters(model):
        return None
    found: dict[int, Tensor] = {}  # tied weights stay tied
    state = model.state_dict(keep_vars=True)
    for tensor in state.values():
        if id(tensor) not in found:
            saved = whole(master_of(tensor)).detach()
            found[id(tensor)] = saved.cpu() if spread else saved
    return {name: found[id(tensor)] for name, tensor in state.items()}


def whole_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state as if there were one rank; what is spread comes to host memory."""
    state: dict[str, Any] = optimizer.state_dict()
    parameters = _parameters(optimizer)
    return state | {
        "state": {
            index: {
                slot: _gathered(parameters[index], value, slot).cpu()
                if hasattr(value, "full_tensor")
                else value
                for slot, value in slots.items()
            }
            for index, slots in state["state"].items()
        }
    }


def spread_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Inverse of :func:`whole_optimizer`: this rank's part of a state that every rank has read."""
    parameters = _parameters(optimizer)
    return state | {
        "state": {
            index: {slot: _like(value, parameters[index]) for slot, value in slots.items()}
            for index, slots in state["state"].items()
        }
    }


def _like(value: Any, parameter: Any) -> Any:
    """``value`` spread as ``parameter`` is, if it has a number for each of its."""
    if not hasattr(parameter, "full_tensor") or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_gradient(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Scale the gradient down to ``max_norm``; returns its norm before, over all ranks."""
    parameters = _parameters(optimizer)
    norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = put_together(norm) if hasattr(norm, "full_tensor") else norm
    if norm > max_norm:  # most are not, and are left alone
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    found: Tensor = norm
    return found

"""Inside a worker: do the live weights equal the checkpoint that was just loaded?

A load that returns is no proof. vLLM fuses projections, pads vocabularies, and on CPU repacks
matrices for its kernels and drops the originals; a layer that such a step forgot goes on with old
weights and no error. So every parameter is compared bit by bit with the tensors it consists of, and
a repacked matrix by what it computes: the same kernel, freshly packed from the checkpoint, must
give the same bits for the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PROBE_ROWS = 16


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the comparison found.

    Attributes:
        checked: parameters that equal the checkpoint.
        unknown: parameters whose checkpoint tensors could not be told from their names.
        different: parameters that do not equal the checkpoint.
    """

    checked: list[str]
    unknown: list[str]
    different: list[str]


def check_weights(model: nn.Module, read: Callable[[str], Tensor | None]) -> CheckReport:
    """Compare a whole, unsharded model with a checkpoint.

    Args:
        model: vLLM's model; parameters may be fused, padded or repacked.
        read: gives the checkpoint's tensor of a name, or None if there is none.
    """
    report = CheckReport([], [], [])
    names_of = {id(p): name for name, p in model.named_parameters()}
    for module, name, parameter in _parameters(model):
        # A tied parameter is found under the name of the one that the checkpoint holds.
        expected = _expected(model, name, read)
        if expected is None:
            expected = _expected(model, names_of[id(parameter)], read)
        if expected is None:
            report.unknown.append(name)
        elif _is_live(module, parameter, expected):
            report.checked.append(name)
        else:
            report.different.append(name)
    return report


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter of every module, also where two modules share one."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, f"{prefix}.{name}".replace(".base_layer.", "."), parameter


def _expected(
    model: nn.Module, name: str, read: Callable[[str], Tensor | None]
) -> list[Tensor] | None:
    """The checkpoint tensors that, one below the other, make up a parameter."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    module_name, _, leaf = name.rpartition(".")
    parent, _, module_leaf = module_name.rpartition(".")
    parts = [f"{parent}.{part}.{leaf}" for part in packed.get(module_leaf, [])] or [name]
    tensors = [tensor for part in parts if (tensor := read(part)) is not None]
    return tensors if len(tensors) == len(parts) else None


def _is_live(module: nn.Module, parameter: nn.Parameter, expected: list[Tensor]) -> bool:
    if parameter.numel() and not _same_rows(parameter, expected):
        return False
    return not hasattr(module, "cpu_linear") or _computes_same(module, torch.cat(expected))


def _same_rows(parameter: Tensor, expected: list[Tensor]) -> bool:
    start = 0
    for tensor in expected:
        rows = parameter[start : start + len(tensor)]
        same = tensor.to(device=parameter.device, dtype=parameter.dtype)
        if rows.shape != same.shape or not torch.equal(rows, same):
            return False
        start += len(tensor)
    return True  # rows beyond are padding


def _computes_same(module: Any, weight: Tensor) -> bool:
    """Whether a repacked matrix gives the bits that the checkpoint's matrix gives when packed."""
    fresh = nn.Module()
    fresh.weight = nn.Parameter(_padded(weight, module), requires_grad=False)
    module.quant_method.process_weights_after_loading(fresh)
    generator = torch.Generator().manual_seed(0)
    shape = (_PROBE_ROWS, weight.shape[1])
    probe = torch.randn(shape, generator=generator).to(fresh.weight.dtype)
    live, wanted = (module.quant_method.apply(m, probe, None) for m in (module, fresh))
    return torch.equal(live, wanted)


def _padded(weight: Tensor, module: Any) -> Tensor:
    """A vocabulary matrix with the rows of zeros that vLLM adds."""
    dtype = next(iter(module.parameters())).dtype
    missing = getattr(module, "num_embeddings_padded", len(weight)) - len(weight)
    return nn.functional.pad(weight, (0, 0, 0, missing)).to(dtype)

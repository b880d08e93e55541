"""Inside a worker: do the live weights equal the checkpoint that was just loaded?

A load that returns is no proof. vLLM fuses projections, pads vocabularies, and on CPU repacks
matrices for its kernels and drops the originals; a layer that such a step forgot goes on with old
weights and no error. So every parameter is compared bit by bit with the tensors it consists of.

A repacked matrix cannot be read back, and packing it once more to compare would double the pause.
It is proved in three steps instead: the plain matrix from which its kernel was built had every bit
of the checkpoint (:class:`Repacking` looks at it when vLLM lets go of it), the layer computes with
that very kernel and no older one, and the kernel gives some of the columns back, exactly.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Read = Callable[[str], Tensor | None]
"""Gives the checkpoint's tensor of a name, or None if there is none."""

_RANDOM_COLUMNS = 2
_RANDOM = random.Random()  # torch's own decides what is sampled, and is left alone
_SMALLEST = torch.finfo(torch.bfloat16).tiny  # kernels may take what is smaller for zero
_WORD = 8


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the comparison found.

    Attributes:
        checked: parameters that equal the checkpoint.
        unknown: parameters whose checkpoint tensors could not be told from their names.
        different: parameters that do not equal the checkpoint.
    """

    checked: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


class Repacking:
    """Watches a load, and remembers which kernels were built from the checkpoint's bits.

    Args:
        model: vLLM's model, whole and unsharded.
        read: of the checkpoint that is being loaded.
    """

    def __init__(self, model: nn.Module, read: Read) -> None:
        self._model = model
        self._read = read
        self._names = {module: _plain(name) for name, module in model.named_modules()}
        self._proved: dict[nn.Module, object] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at every matrix that is repacked meanwhile."""
        found: list[Any] = [getattr(module, "quant_method", None) for module in self._names]
        methods = {id(m): m for m in found if hasattr(m, "process_weights_after_loading")}.values()
        for method in methods:
            plain = method.process_weights_after_loading
            method.process_weights_after_loading = partial(self._repack, plain)
        try:
            yield
        finally:
            for method in methods:
                del method.process_weights_after_loading

    def _repack(self, repack: Callable[[nn.Module], None], module: nn.Module) -> None:
        self._proved.pop(module, None)
        weight = getattr(module, "weight", None)
        matrix = weight.detach() if isinstance(weight, Tensor) else None
        repack(module)
        kernel = getattr(module, "cpu_linear", None)
        if kernel is None or matrix is None or module not in self._names:
            return
        expected = _expected(self._model, f"{self._names[module]}.weight", weight, self._read)
        if expected is not None and _same_rows(matrix, expected):
            self._proved[module] = kernel

    def is_proved(self, module: nn.Module) -> bool:
        """Whether a layer computes with a kernel that was built from the checkpoint's matrix."""
        kernel = getattr(module, "cpu_linear", None)
        return kernel is not None and self._proved.get(module) is kernel


def check_weights(model: nn.Module, read: Read, repacking: Repacking) -> CheckReport:
    """Compare a whole, unsharded model with a checkpoint.

    Args:
        model: vLLM's model; parameters may be fused, padded or repacked.
        read: of the checkpoint.
        repacking: has watched the load.
    """
    report = CheckReport()
    for module, name, parameter in _parameters(model):
        expected = _expected(model, name, parameter, read)
        if expected is None:
            report.unknown.append(name)
        elif _is_live(module, parameter, expected, repacking):
            report.checked.append(name)
        else:
            report.different.append(name)
    return report


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter of every module, also where two modules share one."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, _plain(f"{prefix}.{name}"), parameter


def _plain(name: str) -> str:
    """The name without the layers that LoRA wraps around others."""
    return name.replace(".base_layer", "")


def _expected(model: nn.Module, name: str, parameter: Any, read: Read) -> list[Tensor] | None:
    """The checkpoint tensors that, one below the other, make up a parameter."""
    if (tensors := _named(model, name, read)) is not None:
        return tensors
    # A tied parameter is found under the name of the one that the checkpoint holds.
    names = [other for other, tied in model.named_parameters() if tied is parameter]
    return _named(model, _plain(names[0]), read) if names else None


def _named(model: nn.Module, name: str, read: Read) -> list[Tensor] | None:
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    module_name, _, leaf = name.rpartition(".")
    parent, _, module_leaf = module_name.rpartition(".")
    fused = packed.get(module_leaf, [])
    parts = [f"{parent}.{part}.{leaf}".removeprefix(".") for part in fused] or [name]
    tensors = [tensor for part in parts if (tensor := read(part)) is not None]
    return tensors if len(tensors) == len(parts) else None


def _is_live(
    module: nn.Module, parameter: nn.Parameter, expected: list[Tensor], repacking: Repacking
) -> bool:
    if parameter.numel() and not _same_rows(parameter, expected):
        return False
    if not hasattr(module, "cpu_linear") or parameter is not module.weight:
        return True
    return repacking.is_proved(module) and _gives_back(module, parameter.dtype, expected)


def _same_rows(parameter: Tensor, expected: list[Tensor]) -> bool:
    start = 0
    for tensor in expected:
        rows = parameter[start : start + len(tensor)]
        same = tensor.to(device=parameter.device, dtype=parameter.dtype)
        if rows.shape != same.shape or not _same_bits(rows, same):
            return False
        start += len(tensor)
    return True  # rows beyond are padding


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype agree in every bit."""
    pair = [tensor.detach().contiguous().view(-1) for tensor in (one, other)]
    # Whole words compare several times faster than bfloat16, which is compared as float32.
    in_words = all(
        size * t.itemsize % _WORD == 0 for t in pair for size in (t.numel(), t.storage_offset())
    )
    kind = torch.int64 if in_words else torch.uint8
    return torch.equal(pair[0].view(kind), pair[1].view(kind))


def _gives_back(module: Any, dtype: torch.dtype, expected: list[Tensor]) -> bool:
    """Whether a repacked matrix, asked for its first, its last and random columns, has them.

    The product with a unit vector is a column: one times each value, plus zeros, which is exact.
    """
    width = expected[0].shape[1]
    columns = [0, width - 1, *_RANDOM.choices(range(width), k=_RANDOM_COLUMNS)]
    units = nn.functional.one_hot(torch.tensor(columns), width).to(dtype)
    got = module.quant_method.apply(module, units, None).float()
    wanted = torch.cat([_columns(tensor, columns) for tensor in expected], 1).to(dtype).float()
    # The operator may have allowed kernels to round float32 to bfloat16.
    slack = 2.0**-7 if dtype == torch.float32 else 0.0
    return torch.allclose(got[:, : wanted.shape[1]], wanted, rtol=slack, atol=_SMALLEST)


def _columns(matrix: Tensor, which: list[int]) -> Tensor:
    """Some columns, as rows; one by one, which is several times faster than by a list of them."""
    return torch.stack([matrix[:, column] for column in which])

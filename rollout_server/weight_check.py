"""Inside a worker: do the live weights equal the checkpoint that was just loaded?

A load that returns is no proof. vLLM fuses projections, pads vocabularies, and on CPU repacks
matrices for its kernels and drops the originals; a layer that such a step forgot goes on with old
weights and no error. So every parameter is compared bit by bit with the tensors it consists of.

Which they are follows from the names where a worker holds the whole model. A worker that holds a
shard is compared with those regions of the checkpoint that its loaders sliced out of it, as
:class:`~rollout_server.load_recorder.LoadRecorder` saw them do.

A repacked matrix cannot be read back, and packing it once more to compare would double the pause.
It is proved in three steps instead: the plain matrix from which its kernel was built had every bit
of the checkpoint (:class:`Repacking` looks at it when vLLM lets go of it), the layer computes with
that very kernel and no older one, and the kernel gives some of the columns back, exactly.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollout_server.load_recorder import Copy, LoadRecorder, Write
from rollout_server.tensor_bits import same_bits

Read = Callable[[str], Tensor | None]
"""Gives the checkpoint's tensor of a name, or None if there is none."""

_RANDOM_COLUMNS = 2
_RANDOM = random.Random()  # torch's own decides what is sampled, and is left alone
_SMALLEST = torch.finfo(torch.bfloat16).tiny  # kernels may take what is smaller for zero


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
    """Watches a load: what goes where, and which kernels are built from the checkpoint's bits.

    Args:
        model: vLLM's model.
        read: of the checkpoint that is being loaded.
        sharded: the model holds but a part of some tensors.
    """

    def __init__(self, model: nn.Module, read: Read, *, sharded: bool = False) -> None:
        self._model = model
        self._read = read
        self._sharded = sharded
        self._recorder: LoadRecorder | None = None
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

    @contextlib.contextmanager
    def recorded(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Iterable[tuple[str, Tensor]]]:
        """Look at every copy meanwhile; the model's loaders must be given what this yields.

        The model has plain parameters now, or stand-ins for them on the meta device.
        """
        parameters = {_plain(name): tensor for name, tensor in self._model.named_parameters()}
        self._recorder = LoadRecorder(parameters)
        with self._recorder:
            yield self._recorder.tracked(tensors)

    def expected(self, name: str, parameter: Any) -> list[Tensor] | None:
        """The tensors that, one after the other, make up a parameter; None if that is unknown."""
        if (tensors := self._of(name)) is not None:
            return tensors
        # A tied parameter is found under the name of the one that the checkpoint holds.
        names = [other for other, tied in self._model.named_parameters() if tied is parameter]
        return self._of(_plain(names[0])) if names else None

    def _of(self, name: str) -> list[Tensor] | None:
        tensors = None if self._sharded else _named(self._model, name, self._read)
        if tensors is None and self._recorder is not None:
            return _stacked(self._recorder.writes(name), self._read)
        return tensors

    def _repack(self, repack: Callable[[nn.Module], None], module: nn.Module) -> None:
        self._proved.pop(module, None)
        weight = getattr(module, "weight", None)
        matrix = weight.detach() if isinstance(weight, Tensor) else None
        repack(module)
        kernel = getattr(module, "cpu_linear", None)
        if kernel is None or matrix is None or module not in self._names:
            return
        expected = self.expected(f"{self._names[module]}.weight", weight)
        if expected is not None and _same_elements(matrix, expected):
            self._proved[module] = kernel

    def is_proved(self, module: nn.Module) -> bool:
        """Whether a layer computes with a kernel that was built from the checkpoint's matrix."""
        kernel = getattr(module, "cpu_linear", None)
        return kernel is not None and self._proved.get(module) is kernel


def check_weights(model: nn.Module, repacking: Repacking) -> CheckReport:
    """Compare a model with the checkpoint that was loaded into it.

    Args:
        model: vLLM's model; parameters may be fused, padded, sliced or repacked.
        repacking: has watched the load.
    """
    report = CheckReport()
    for module, name, parameter in _parameters(model):
        expected = repacking.expected(name, parameter)
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


def _named(model: nn.Module, name: str, read: Read) -> list[Tensor] | None:
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    module_name, _, leaf = name.rpartition(".")
    parent, _, module_leaf = module_name.rpartition(".")
    fused = packed.get(module_leaf, [])
    parts = [f"{parent}.{part}.{leaf}".removeprefix(".") for part in fused] or [name]
    tensors = [tensor for part in parts if (tensor := read(part)) is not None]
    return tensors if len(tensors) == len(parts) else None


def _stacked(writes: list[Write] | None, read: Read) -> list[Tensor] | None:
    """What was written into a parameter, from its first element to its last."""
    tensors: list[Tensor] = []
    position = 0
    for write in sorted(writes or [], key=lambda write: write.target.offset):
        if write.target.offset != position or not write.target.is_dense:
            return None
        tensors.append(_written(write, read))
        position += write.target.numel
    return tensors or None


def _written(write: Write, read: Read) -> Tensor:
    if not isinstance(write, Copy):
        return torch.full((), write.value).expand(write.target.size)
    tensor = read(write.name)
    assert tensor is not None, "it was copied a moment ago"
    return write.source.of(tensor)


def _is_live(
    module: nn.Module, parameter: nn.Parameter, expected: list[Tensor], repacking: Repacking
) -> bool:
    if parameter.numel() and not _same_elements(parameter, expected):
        return False
    if not hasattr(module, "cpu_linear") or parameter is not module.weight:
        return True
    return repacking.is_proved(module) and _gives_back(module, parameter.dtype, expected)


def _same_elements(parameter: Tensor, expected: list[Tensor]) -> bool:
    elements, start = parameter.detach().reshape(-1), 0
    for tensor in expected:
        some = elements[start : start + tensor.numel()]
        same = tensor.to(device=parameter.device, dtype=parameter.dtype).reshape(-1)
        as_wide = parameter.dim() < 2 or tensor.shape[-1:] == parameter.shape[-1:]
        if not as_wide or some.shape != same.shape or not same_bits(some, same):
            return False
        start += tensor.numel()
    return True  # what is beyond is padding


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

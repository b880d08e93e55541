"""Inside a worker: which element of which checkpoint tensor goes where, learnt by watching a load.

Where vLLM puts a tensor is known to its weight loaders alone: they fuse projections, pad
vocabularies, and with tensor parallelism keep a slice. But they all end in ``copy_`` of a view of
the checkpoint's tensor into a view of a parameter, and a view says which elements it covers. So
whoever sees every ``copy_`` of a load knows the layout exactly, for any model and any rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


@dataclass(frozen=True, slots=True)
class Region:
    """Some elements of a tensor.

    Attributes:
        size: of the view that covers them.
        stride: of that view, in elements.
        offset: of its first element from the tensor's first, in elements.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a contiguous tensor that covers the region."""
        start = tensor.storage_offset() + self.offset
        return tensor.detach().as_strided(self.size, self.stride, start)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.size).numel()

    @property
    def is_dense(self) -> bool:
        """Whether it has no gaps, and its elements are in order."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def end(self) -> int:
        """One more than the offset of its last element."""
        steps = zip(self.size, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)


@dataclass(frozen=True, slots=True)
class Copy:
    """A region of a parameter that was copied from a region of a checkpoint's tensor.

    Attributes:
        name: of the checkpoint's tensor.
        source: what of it was copied.
        target: where to, in the parameter.
    """

    name: str
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Fill:
    """A region of a parameter that was given one value: padding."""

    value: float
    target: Region


Write = Copy | Fill


class LoadRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is written into parameters while it is the active mode.

    Args:
        parameters: by name; contiguous; may lie on the meta device, where a load costs nothing.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self._name_of = {_storage(tensor): name for name, tensor in parameters.items()}
        self._sources: dict[int, list[tuple[str, Tensor]]] = {}
        self._writes: dict[str, dict[Region, Write | None]] = {name: {} for name in parameters}

    def tracked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hand on a checkpoint's tensors, and recognise copies from them afterwards."""
        for name, tensor in tensors:
            self._sources.setdefault(_storage(tensor), []).append((name, tensor))
            yield name, tensor

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._sources.clear()  # the layout is known now, and tensors take memory

    def writes(self, parameter: str) -> list[Write] | None:
        """What a parameter consists of, or None unless that is known of all of its elements.

        It is not known of elements that were not written, that came from something computed, or
        that were written twice as parts of different regions.
        """
        written = self._writes.get(parameter, {})
        found = [write for write in written.values() if write is not None]
        whole = self._parameters[parameter].numel() if parameter in self._parameters else -1
        if len(found) != len(written) or sum(write.target.numel for write in found) != whole:
            return None
        return found if _disjoint([write.target for write in found], whole) else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and not _onto_itself(func, args):
            for target in _written(func, args):
                name = self._name_of.get(_storage(target))
                if name is not None and target.numel():
                    region = _region(target, self._parameters[name])
                    self._writes[name][region] = self._write(func, args, region)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], target: Region) -> Write | None:
        if func is torch.ops.aten.copy_.default:
            return self._copy(args[1].expand(target.size), target)
        if func in _FILLS:
            return Fill(float(args[1]) if len(args) > 1 else 0.0, target)
        return None

    def _copy(self, source: Tensor, target: Region) -> Copy | None:
        for name, tensor in self._sources.get(_storage(source), []):
            region = _region(source, tensor)
            inside = region.offset >= 0 and region.end <= tensor.numel()
            if inside and source.dtype == tensor.dtype and tensor.is_contiguous():
                return Copy(name, region, target)
        return None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _region(view: Tensor, base: Tensor) -> Region:
    offset = int(view.storage_offset()) - int(base.storage_offset())
    return Region(tuple(view.shape), view.stride(), offset)


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from value if isinstance(value, list | tuple) else [value]


def _onto_itself(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether nothing changes: vLLM's reload copies what it loaded in place to the same place."""
    if func is not torch.ops.aten.copy_.default:
        return False
    target, source = args[:2]
    return _storage(target) == _storage(source) and _region(target, target) == _region(
        source, target
    )


def _disjoint(regions: list[Region], whole: int) -> bool:
    ordered = sorted(regions, key=lambda region: region.offset)
    if all(one.end <= other.offset for one, other in itertools.pairwise(ordered)):
        return True
    # Interleaved, as columns are: mark each element.
    seen = torch.zeros(whole, dtype=torch.bool)
    for region in ordered:
        region.of(seen).fill_(True)
    return bool(seen.all())

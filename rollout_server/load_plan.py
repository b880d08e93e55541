"""Inside a worker: the same load again and again, without vLLM's Python for each parameter.

A load of vLLM's looks every tensor up by name, slices it and copies it: tens of microseconds for
each, while the copies themselves take a few milliseconds for billions of parameters. Where each
element goes never changes, so it is recorded once (``load_recorder.py``), and a later load is a
few launches over views that exist already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollout_server.load_recorder import Copy, LoadRecorder
from rollout_server.tensor_bits import in_words

_Layout = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(slots=True)
class _Views:
    """Every region of one set of tensors beside the region of a parameter where it goes.

    Attributes:
        dense: targets and sources, for each kind of source; all contiguous.
        strided: targets and sources that are not.
    """

    dense: dict[Any, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    strided: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    words: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    cast: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def add(self, name: str, target: Tensor, source: Tensor) -> None:
        if source.is_contiguous() and target.is_contiguous():
            targets, sources = self.dense.setdefault((source.dtype, source.device), ([], []))
            targets.append(target)
            sources.append(source)
        else:
            self.strided.append((target, source))
        if source.dtype == target.dtype and source.device == target.device:
            self.words.append((name, *in_words(target, source)))
        else:
            self.cast.append((name, target, source))


class LoadPlan:
    """Where each element of a checkpoint goes in one worker's model; see :meth:`recorded`."""

    def __init__(self, layout: _Layout, copies: list[tuple[Copy, Tensor]]) -> None:
        self._layout = layout
        self._copies = copies
        self._seen: list[Any] = []
        self._views = _Views()

    @classmethod
    def recorded(cls, model: nn.Module, tensors: Mapping[str, Tensor]) -> LoadPlan:
        """Load a complete checkpoint by the model's own loaders, and remember what went where.

        Args:
            model: its parameters must be plain: neither quantised nor repacked for some kernel.
            tensors: contiguous, on any device.

        Raises:
            ValueError: the parameters are not plain, or not all of them come from ``tensors``. In
                the latter case the model is half-written: load a complete checkpoint before any
                forward pass.
        """
        _check_plain(model)
        parameters = dict(model.named_parameters())
        recorder = LoadRecorder(parameters)
        with torch.no_grad(), recorder:
            model.load_weights(recorder.tracked(tensors.items()))  # type: ignore[operator]
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        return cls(layout, list(_copies(recorder, parameters)))

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Load other values; returns before a GPU has done so.

        Args:
            tensors: with the names, shapes and dtypes of those that were recorded, contiguous.

        Raises:
            ValueError: they have not; nothing was loaded.
        """
        views = self._viewed(tensors)
        for targets, sources in views.dense.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        # Among the others, one of these would cost the whole batch its fast path.
        for target, source in views.strided:
            target.copy_(source, non_blocking=True)

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of tensors that the parameters do not hold, bit by bit; waits once, at the end.

        Args:
            tensors: as for :meth:`apply`.

        Raises:
            ValueError: as there.
        """
        views = self._viewed(tensors)
        names = [name for name, _, _ in views.words + views.cast]
        verdicts = [target.ne(source).any() for _, target, source in views.words]
        for _, target, source in views.cast:
            served = source.to(device=target.device, dtype=target.dtype)
            one, other = in_words(target, served)
            verdicts.append(one.ne(other).any())
        flags = torch.stack(verdicts).tolist() if verdicts else []
        return sorted({name for name, differs in zip(names, flags, strict=True) if differs})

    def forget_sources(self) -> None:
        """Let go of the tensors that were given last, so that their memory can be freed."""
        self._seen, self._views = [], _Views()

    def _viewed(self, tensors: Mapping[str, Tensor]) -> _Views:
        seen = [(n, t.data_ptr(), t.shape, t.dtype, t.stride()) for n, t in tensors.items()]
        if seen != self._seen:
            self._check(tensors)
            views = _Views()
            for copy, target in self._copies:
                views.add(copy.name, target, copy.source.of(tensors[copy.name]))
            self._seen, self._views = seen, views
        return self._views

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        if unlike := self._layout.keys() ^ tensors.keys():
            raise ValueError(f"{len(unlike)} tensors are missing or unknown, first {min(unlike)}")
        for name, tensor in tensors.items():
            if (tensor.shape, tensor.dtype) != self._layout[name] or not tensor.is_contiguous():
                shape, dtype = self._layout[name]
                raise ValueError(
                    f"tensor {name} is {tensor.dtype}{list(tensor.shape)} with strides "
                    f"{tensor.stride()}; allowed: {dtype}{list(shape)}, contiguous"
                )


def _check_plain(model: nn.Module) -> None:
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        # Attention over latents, and kernels of the CPU, compute with matrices that they derive.
        derives = isinstance(module, MLAAttention) or hasattr(module, "cpu_linear")
        if derives or type(method) not in plain:
            raise ValueError(f"the weights of {name} are not plain: {type(method).__name__}")
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.is_contiguous():
            raise ValueError(f"parameter {name} is not a contiguous tensor")


def _copies(
    recorder: LoadRecorder, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[Copy, Tensor]]:
    for name, parameter in parameters.items():
        writes = recorder.writes(name)
        if writes is None:
            raise ValueError(f"parameter {name} does not consist of the checkpoint's tensors")
        for write in writes:
            if isinstance(write, Copy):
                yield write, write.target.of(parameter)

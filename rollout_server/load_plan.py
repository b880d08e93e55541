"""Inside a worker: the same load again and again, without vLLM's Python for each parameter.

A load of vLLM's looks every tensor up by name, slices it and copies it: tens of microseconds for
each, while the copies themselves take a few milliseconds for billions of parameters. Where each
element goes never changes, so it is recorded once (``load_recorder.py``), and a later load is a
few launches over views that exist already.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rollout_server.load_recorder import Copy, LoadRecorder
from rollout_server.tensor_bits import in_words

_Layout = dict[str, tuple[torch.Size, torch.dtype]]


class _Views:
    """Every region of one set of tensors beside the region of a parameter where it goes.

    Args:
        regions: names, targets and sources.
    """

    def __init__(self, regions: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        self._regions = list(regions)
        self._names: list[str] = []
        self._batch: Any = None
        self._others = self._regions
        if any(target.is_cuda for _, target, _ in self._regions):
            self._others = self._batched()
        self._names += [name for name, _, _ in self._others]

    def _batched(self) -> list[tuple[str, Tensor, Tensor]]:
        """Take what can be done by one launch; what cannot is returned."""
        from rollout_server import region_kernels

        suits = [region_kernels.suits(target, source) for _, target, source in self._regions]
        chosen = list(itertools.compress(self._regions, suits))
        if chosen:
            self._batch = region_kernels.Batch([(target, source) for _, target, source in chosen])
            self._names = [name for name, _, _ in chosen]
        return [region for region, suit in zip(self._regions, suits, strict=True) if not suit]

    def copy(self) -> None:
        if self._batch is not None:
            self._batch.copy()
        for _, target, source in self._others:
            target.copy_(source, non_blocking=True)

    def differing(self) -> list[str]:
        verdicts = [] if self._batch is None else [self._batch.differs()]
        for _, target, source in self._others:
            served = source.to(device=target.device, dtype=target.dtype)
            one, other = in_words(target, served)
            verdicts.append(one.ne(other).any().view(1).int())
        flags = torch.cat(verdicts).tolist() if verdicts else []
        return sorted(set(itertools.compress(self._names, flags)))


def warm_up(device: torch.device) -> None:
    """Have ready what a plan launches on a GPU, so that no load under a pause waits for it."""
    if device.type == "cuda":
        from rollout_server import region_kernels

        region_kernels.warm_up(device)


class LoadPlan:
    """Where each element of a checkpoint goes in one worker's model; see :meth:`recorded`."""

    def __init__(self, layout: _Layout, copies: list[tuple[Copy, Tensor]]) -> None:
        self._layout = layout
        self._copies = copies
        # In one piece, since another thread may let go of them during a load.
        self._last: tuple[Mapping[str, Tensor], list[Any], _Views] = ({}, [], _Views([]))

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
        check_plain(model)
        parameters = dict(model.named_parameters())
        recorder = LoadRecorder(parameters)
        with torch.no_grad(), recorder:
            model.load_weights(recorder.tracked(tensors.items()))  # type: ignore[operator]
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        return cls(layout, list(_copies(recorder, parameters)))

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Have ready what :meth:`apply` needs for these tensors; another thread may do so.

        Raises:
            ValueError: as there.
        """
        self._viewed(tensors)

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Load other values; returns before a GPU has done so.

        Args:
            tensors: with the names, shapes and dtypes of those that were recorded, contiguous.

        Raises:
            ValueError: they have not; nothing was loaded.
        """
        self._viewed(tensors).copy()

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of tensors that the parameters do not hold, bit by bit; waits once, at the end.

        Args:
            tensors: as for :meth:`apply`.

        Raises:
            ValueError: as there.
        """
        return self._viewed(tensors).differing()

    def forget_sources(self) -> None:
        """Let go of the tensors that were given last, so that their memory can be freed."""
        self._last = {}, [], _Views([])

    def _viewed(self, tensors: Mapping[str, Tensor]) -> _Views:
        given, known, views = self._last
        if tensors is given:  # a channel's, which never change places
            return views
        seen = [(n, t.data_ptr(), t.shape, t.dtype, t.stride()) for n, t in tensors.items()]
        if seen != known:
            self._check(tensors)
            views = _Views(
                (copy.name, target, copy.source.of(tensors[copy.name]))
                for copy, target in self._copies
            )
        self._last = tensors, seen, views
        return views

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


def check_plain(model: nn.Module) -> None:
    """Raise ValueError if a model computes with anything but the parameters that it loads."""
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

"""Weights as they are published: by name, in bfloat16; and where checkpoints lie."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shared.weights import LazyTensor, TensorSpec
from trainer.channel_pieces import Named
from trainer.lora import Merged
from trainer.publish import lazy_tensors

Tensors = dict[str, torch.Tensor]


def specs_of(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """In bfloat16, whatever they are in now."""
    return [TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in named_tensors]


def specs_of_model(folder: Path) -> list[TensorSpec]:
    """The checkpoint of a model, of which there need not be weights."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return specs_of(AutoModelForCausalLM.from_config(config).named_parameters())


def random_weights(specs: list[TensorSpec], device: torch.device, seed: int) -> Tensors:
    """Of about the size that weights have."""
    draw: Callable[..., torch.Tensor] = partial(
        torch.randn,
        generator=torch.Generator(device).manual_seed(seed),
        device=device,
        dtype=torch.bfloat16,
    )
    return {spec.name: draw(spec.shape).mul_(0.02) for spec in specs}


def size_of(weights: Tensors) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in weights.values())


def lazy(weights: Tensors) -> list[LazyTensor]:
    """As the trainer sends them by HTTP; those in host memory are not copied."""
    tensors = [(name, Merged(tensor, None)) for name, tensor in weights.items()]
    return lazy_tensors(tensors, torch.bfloat16)


def named(weights: Tensors) -> list[Named]:
    """As the trainer sends them through a channel."""

    def give(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    return [(name, partial(give, tensor)) for name, tensor in weights.items()]


def write(weights: Tensors, folder: Path) -> None:
    """The file of a Hugging Face directory."""
    on_host = {name: tensor.cpu() for name, tensor in weights.items()}
    save_file(on_host, folder / "model.safetensors", {"format": "pt"})


@functools.cache
def staging_folder() -> Path:
    """Where servers put what arrives; in shared memory, if it has room for the copies."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 32 << 30
    return (shared if roomy else Path(tempfile.gettempdir())) / f"bench-channels-{os.getpid()}"


def written_root() -> Path:
    """Where checkpoints are written for others to read."""
    return staging_folder().with_suffix(".written")


@contextlib.contextmanager
def written_folder(name: str) -> Iterator[Path]:
    """A folder there, which is gone after the block."""
    folder = written_root() / name
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)

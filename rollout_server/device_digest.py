"""Digests, and a look for NaN, of tensors wherever they lie.

Weights that come from another process of the same GPU never pass through the host's memory, and
their digests must not make them: the bytes are reduced where they are (``digest_kernels.py``), and
a few hundred bytes for each tensor are enough to finish on the host (``xxh3.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from rollout_server import xxh3

_SMALL_BYTES = 64 << 10  # as cheap to copy as to launch anything for
_BATCH_BYTES = 8 << 30  # their sums take a sixteenth of this for a moment
_BLOCKS_PER_PROGRAM = 64
_UNROLL = 128
_ALIGNMENT = 16


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """XXH3-128 of each tensor's bytes, in hex, as in ``shared/weights.py``; waits for a device.

    Args:
        tensors: contiguous, on any devices.

    Raises:
        ValueError: one is not contiguous.
    """
    flat = {name: _bytes(name, tensor) for name, tensor in tensors.items()}
    digests = {
        name: xxhash.xxh3_128_hexdigest(content.numpy().data)
        for name, content in flat.items()
        if not content.is_cuda
    }
    for device in {content.device for content in flat.values() if content.is_cuda}:
        here = {name: content for name, content in flat.items() if content.device == device}
        with torch.cuda.device(device):
            digests |= reduced_digests(here)
    return {name: digests[name] for name in tensors}


def reduced_digests(
    contents: Mapping[str, Tensor], small_bytes: int = _SMALL_BYTES
) -> dict[str, str]:
    """The digests of bytes on one device, of which but few are brought to the host.

    Args:
        contents: one-dimensional, uint8.
        small_bytes: what has no more is brought to the host whole; at least 1088.
    """
    digests: dict[str, str] = {}
    for batch in _batches(contents):
        long = {name: content for name, content in batch.items() if len(content) > small_bytes}
        short = {name: content for name, content in batch.items() if name not in long}
        digests |= _finished(long) if long else {}
        if short:
            host = torch.cat(list(short.values())).cpu()  # one copy for all
            parts = torch.split(host, [len(content) for content in short.values()])
            for name, part in zip(short, parts, strict=True):
                digests[name] = xxhash.xxh3_128_hexdigest(part.numpy().data)
    return digests


def _finished(contents: Mapping[str, Tensor]) -> dict[str, str]:
    """The digests of contents whose blocks are reduced on their device."""
    states = _states(list(contents.values()))
    tails = [content[-xxh3.TAIL_BYTES :] for content in contents.values()]
    # One copy for all.
    host = torch.cat([states.view(-1).view(torch.uint8), *tails]).cpu().numpy()
    lanes = host[: states.nbytes].view(np.uint64).reshape(-1, xxh3.LANES)
    ends = host[states.nbytes :].reshape(-1, xxh3.TAIL_BYTES)
    lengths = np.array([len(content) for content in contents.values()])
    return dict(zip(contents, xxh3.finish(lanes, ends, lengths), strict=True))


def _bytes(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"tensor {name} has strides {tensor.stride()}; allowed: contiguous")
    return tensor.detach().view(-1).view(torch.uint8)


def _batches(contents: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    room = _BATCH_BYTES
    for name, content in contents.items():
        if batch and len(content) > room:
            yield batch
            batch, room = {}, _BATCH_BYTES
        batch[name] = content
        room -= len(content)
    if batch:
        yield batch


def _states(contents: Sequence[Tensor]) -> Tensor:
    """The accumulators after all whole blocks, ``[len(contents), 8]``."""
    from rollout_server import digest_kernels

    device = contents[0].device
    aligned = [c if c.data_ptr() % _ALIGNMENT == 0 else c.clone() for c in contents]
    blocks = np.array([xxh3.blocks_of(len(content)) for content in contents])
    programs = -(-blocks // _BLOCKS_PER_PROGRAM)
    table = np.stack([
        np.array([content.data_ptr() for content in aligned]),
        blocks, np.cumsum(blocks) - blocks, programs, np.cumsum(programs) - programs,
    ])  # fmt: skip
    address, count, first_block, program_count, first_program = torch.from_numpy(table).to(device)
    total = int(programs.sum())
    owner = torch.repeat_interleave(program_count, output_size=total)
    secret, initial, key = _constants(device)
    sums = torch.empty((int(blocks.sum()), xxh3.LANES), dtype=torch.uint64, device=device)
    states = torch.empty((len(contents), xxh3.LANES), dtype=torch.uint64, device=device)
    digest_kernels.block_sums[(total,)](
        address, count, first_block, first_program, owner, secret, sums,
        BLOCKS=_BLOCKS_PER_PROGRAM,
    )  # fmt: skip
    digest_kernels.scan_blocks[(len(contents),)](
        sums, count, first_block, initial, key, states, UNROLL=_UNROLL, num_warps=1
    )
    return states


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, ...]:
    words = np.frombuffer(xxh3.SECRET, "<u8").astype(np.uint64)
    arrays: list[Any] = [words, xxh3.INITIAL, xxh3.SCRAMBLE_KEY.copy()]
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors with NaN or infinite values, in order; waits for a device once.

    Args:
        tensors: of any dtype, on one device; integers are finite.
    """
    floats = {
        name: tensor.detach().float() if tensor.itemsize == 1 else tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    }
    if not floats:
        return []
    # The largest magnitude is NaN or infinite if any value is.
    largest = torch._foreach_norm(list(floats.values()), float("inf"))
    flags = torch.stack(largest).isfinite().tolist()
    return sorted(name for name, finite in zip(floats, flags, strict=True) if not finite)

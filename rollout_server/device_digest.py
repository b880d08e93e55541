"""Digests and a look for NaN, of tensors wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """XXH3-128 of each tensor's bytes, in hex, as in ``shared/weights.py``.

    Args:
        tensors: contiguous, on any device.
    """
    return {name: _hash(tensor) for name, tensor in tensors.items()}


def _hash(tensor: Tensor) -> str:
    content = tensor.detach().view(-1).view(torch.uint8).cpu().numpy()
    return xxhash.xxh3_128_hexdigest(content.data)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors with NaN or infinite values, in order; waits for a device once.

    Args:
        tensors: of any dtype; integers are finite.
    """
    floats = {name: t.detach() for name, t in tensors.items() if t.is_floating_point()}
    if not floats:
        return []
    # The largest magnitude is NaN or infinite if any value is.
    largest = torch._foreach_norm(list(floats.values()), float("inf"))
    flags = torch.stack([norm.isfinite() for norm in largest]).tolist()
    return sorted(name for name, finite in zip(floats, flags, strict=True) if not finite)

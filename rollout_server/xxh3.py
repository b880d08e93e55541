"""XXH3-128 of long inputs in two halves: blocks, which a GPU can do, and the few bytes at the end.

The algorithm for more than 240 bytes, with its default secret (XXH3 specification,
github.com/Cyan4973/xxHash, doc/xxhash_spec.md): eight accumulators of 64 bits take in stripes of 64
bytes. Each adds the product of the halves of its own word, after that was mixed with the secret,
and its neighbour's word as it is. After every block of 16 stripes they are scrambled. At the end
come the stripes of the last, partial block, and the last 64 bytes once more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LONGER_THAN = 240
"""Shorter inputs are hashed by other formulas."""
BLOCK_BYTES = 1024
STRIPE_BYTES = 64
LANES = 8
STRIPES = BLOCK_BYTES // STRIPE_BYTES
TAIL_BYTES = BLOCK_BYTES + STRIPE_BYTES
"""As many bytes from the end hold the partial block and the last stripe."""

_MASK = (1 << 64) - 1
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
_AVALANCHE = 0x165667919E3779F9
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def blocks_of(length: int) -> int:
    """Whole blocks, after each of which the accumulators are scrambled."""
    return (length - 1) // BLOCK_BYTES


def keys(offset: int, stripes: int = 1) -> NDArray[np.uint64]:
    """The secret as successive stripes meet it, ``[stripes, 8]``; it moves on by eight bytes."""
    words = np.frombuffer(SECRET[offset : offset + 8 * (LANES + stripes - 1)], "<u8")
    return np.lib.stride_tricks.sliding_window_view(words, LANES)


INITIAL = np.array(
    [_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]], np.uint64
)  # fmt: skip
SCRAMBLE_KEY = keys(len(SECRET) - STRIPE_BYTES)[0]
PRIME32_1 = np.uint64(_PRIME32[0])


def lane_sums(words: NDArray[np.uint64], secret: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What stripes add to the accumulators.

    Args:
        words: ``[..., stripes, 8]``.
        secret: ``[stripes, 8]``, of :func:`keys`.

    Returns:
        ``[..., 8]``.
    """
    keyed = words ^ secret
    product = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
    neighbours = words.reshape(*words.shape[:-1], LANES // 2, 2)[..., ::-1].reshape(words.shape)
    total: NDArray[np.uint64] = (product + neighbours).sum(-2, dtype=np.uint64)
    return total


def finish(state: NDArray[np.uint64], tail: bytes | memoryview, length: int) -> str:
    """The digest, in hex.

    Args:
        state: ``[8]``, the accumulators after all whole blocks.
        tail: the last ``TAIL_BYTES`` of the input, or all of it if it is shorter.
        length: of the input, more than ``LONGER_THAN`` bytes.
    """
    rest = length - blocks_of(length) * BLOCK_BYTES
    stripes = (rest - 1) // STRIPE_BYTES
    start = len(tail) - rest
    body = np.frombuffer(tail[start : start + stripes * STRIPE_BYTES], "<u8").reshape(-1, LANES)
    last = np.frombuffer(tail[len(tail) - STRIPE_BYTES :], "<u8").reshape(1, LANES)
    with np.errstate(over="ignore"):
        state = state + lane_sums(body, keys(0, STRIPES)[:stripes])
        state = state + lane_sums(last, keys(len(SECRET) - STRIPE_BYTES - 7))
    lanes = [int(lane) for lane in state]
    low = _merge(lanes, 11, length * _PRIME64[0] & _MASK)
    high = _merge(lanes, len(SECRET) - STRIPE_BYTES - 11, ~(length * _PRIME64[1]) & _MASK)
    return f"{high:016x}{low:016x}"


def _merge(lanes: list[int], offset: int, start: int) -> int:
    mixed = [lane ^ int(key) for lane, key in zip(lanes, keys(offset)[0], strict=True)]
    products = [one * other for one, other in zip(mixed[::2], mixed[1::2], strict=True)]
    total = (start + sum((product & _MASK) ^ (product >> 64) for product in products)) & _MASK
    total = ((total ^ (total >> 37)) * _AVALANCHE) & _MASK
    return total ^ (total >> 32)

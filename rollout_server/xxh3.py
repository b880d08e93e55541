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

_LOW32, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
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


def lane_sums(
    words: NDArray[np.uint64], secret: NDArray[np.uint64], where: NDArray[np.bool_] | bool = True
) -> NDArray[np.uint64]:
    """What stripes add to the accumulators.

    Args:
        words: ``[..., stripes, 8]``.
        secret: ``[stripes, 8]``, of :func:`keys`.
        where: ``[..., stripes]``, which of them count.

    Returns:
        ``[..., 8]``.
    """
    keyed = words ^ secret
    product = (keyed & _LOW32) * (keyed >> _HALF)
    neighbours = words.reshape(*words.shape[:-1], LANES // 2, 2)[..., ::-1].reshape(words.shape)
    counts = np.asarray(where)[..., None]
    total: NDArray[np.uint64] = (product + neighbours).sum(-2, dtype=np.uint64, where=counts)
    return total


def finish(
    states: NDArray[np.uint64], tails: NDArray[np.uint8], lengths: NDArray[np.int64]
) -> list[str]:
    """The digests of N inputs, in hex.

    Args:
        states: ``[N, 8]``, the accumulators after all whole blocks.
        tails: ``[N, TAIL_BYTES]``, the last bytes of each, with anything before a shorter one.
        lengths: ``[N]``, more than ``LONGER_THAN`` bytes each.
    """
    rests = lengths - (lengths - 1) // BLOCK_BYTES * BLOCK_BYTES
    # Behind the rest come bytes that count for nothing, so that every row has a whole block.
    places = (TAIL_BYTES - rests)[:, None] + np.arange(BLOCK_BYTES)
    block = np.take_along_axis(tails, np.minimum(places, TAIL_BYTES - 1), axis=1)
    body = block.view("<u8").reshape(-1, STRIPES, LANES)
    last = tails[:, -STRIPE_BYTES:].copy().view("<u8").reshape(-1, 1, LANES)
    counts = np.arange(STRIPES) < ((rests - 1) // STRIPE_BYTES)[:, None]
    states = states + lane_sums(body, keys(0, STRIPES), counts)
    states = states + lane_sums(last, keys(len(SECRET) - STRIPE_BYTES - 7))
    sizes = lengths.astype(np.uint64)
    low = _merge(states, 11, sizes * np.uint64(_PRIME64[0]))
    high = _merge(states, len(SECRET) - STRIPE_BYTES - 11, ~(sizes * np.uint64(_PRIME64[1])))
    halves = zip(high.tolist(), low.tolist(), strict=True)
    return [f"{upper:016x}{lower:016x}" for upper, lower in halves]


def _merge(
    states: NDArray[np.uint64], offset: int, start: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    mixed = states ^ keys(offset)[0]
    total: NDArray[np.uint64] = start + _folded(mixed[:, ::2], mixed[:, 1::2]).sum(1)
    total = (total ^ (total >> np.uint64(37))) * np.uint64(_AVALANCHE)
    return total ^ (total >> _HALF)


def _folded(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Both halves of the 128-bit product, combined by exclusive or; by long multiplication."""
    low, high = one & _LOW32, one >> _HALF
    low_other, high_other = other & _LOW32, other >> _HALF
    lowest, middle = low * low_other, high * low_other
    carried = (lowest >> _HALF) + (middle & _LOW32) + low * high_other
    upper = (middle >> _HALF) + (carried >> _HALF) + high * high_other
    lower: NDArray[np.uint64] = (carried << _HALF) + (lowest & _LOW32)
    return upper ^ lower

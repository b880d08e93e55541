"""The constants of XXH3-128 for long inputs, as the kernels of ``digest_kernels.py`` take them.

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
_LANES = 8
_STRIPE_BYTES = 64
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_INITIAL = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])


def secrets() -> NDArray[np.uint64]:
    """The secret at every eighth byte, 24 words, and behind it five times eight words.

    These are the key of the scrambling, accumulators that become the initial ones when they are
    scrambled, and the keys of the last 64 bytes and of the low and the high half of the result.
    """
    scramble = _words(len(_SECRET) - _STRIPE_BYTES)
    keys = [
        np.frombuffer(_SECRET, "<u8"), scramble, _unscrambled(scramble),
        _words(len(_SECRET) - _STRIPE_BYTES - 7), _words(11), _words(len(_SECRET) - 64 - 11),
    ]  # fmt: skip
    table: NDArray[np.uint64] = np.concatenate(keys).astype(np.uint64)
    return table


def _words(offset: int) -> NDArray[np.uint64]:
    words: NDArray[np.uint64] = np.frombuffer(_SECRET[offset : offset + 8 * _LANES], "<u8")
    return words


def _unscrambled(key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What scrambling makes the initial accumulators of."""
    mixed = np.array(_INITIAL, np.uint64) * np.uint64(pow(_PRIME32[0], -1, 1 << 64)) ^ key
    unmixed: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(47))
    return unmixed

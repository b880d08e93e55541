"""XXH3-128 of many pieces on a GPU, in Triton, and which tensors hold values that are not finite.

Each piece is taken by a warp of its own, in one pass at the speed of memory: a few blocks of 1024
bytes at once, each summed by all threads, and then one after the other mixed into the accumulators.
"""

# Triton reads annotations as part of its own language.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

# What a kernel reads from outside must be a constant of the language.
_LANES = tl.constexpr(8)
_STRIPES = tl.constexpr(16)
_STRIPE_BYTES = tl.constexpr(64)
_BLOCK_WORDS = tl.constexpr(128)
_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_ALL_BITS = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_AVALANCHE = tl.constexpr(0x165667919E3779F9)
# Where the keys begin that `secrets` holds one after the other.
_SCRAMBLE, _START, _LAST = tl.constexpr(24), tl.constexpr(32), tl.constexpr(40)
_LOW, _HIGH = tl.constexpr(48), tl.constexpr(56)
COLUMNS = 8
_COLUMNS = tl.constexpr(COLUMNS)
SHORT_WORDS = 32
_SHORT_BYTES = tl.constexpr(8 * SHORT_WORDS)
_LONGER_THAN = tl.constexpr(240)


@triton.jit
def digest_pieces(work, secrets, results, flags, AT_ONCE: tl.constexpr):
    """Digests of pieces, one for each program; begin at multiples of 16 bytes.

    Args:
        work: ``[pieces, 8]``, int64: address and length in bytes, the word of ``results`` and the
            one of ``flags`` that it has, and three that tell values that are not finite.
        secrets: the secret at every eighth byte, and other keys behind it.
        results: written: the high and the low half of the digest; of a piece too short for the
            formula its bytes.
        flags: int32, set where a value is not finite.
        AT_ONCE: how many blocks are loaded before the first is summed.
    """
    row = work + tl.program_id(0).to(tl.int64) * _COLUMNS
    address, length = tl.load(row), tl.load(row + 1).to(tl.int32)
    out = results + tl.load(row + 2)
    if length > _LONGER_THAN:
        finite = (tl.load(row + 4), tl.load(row + 5), tl.load(row + 6))
        x, bad = _summed(address, length, finite, secrets, AT_ONCE)
        x, bad_at_the_end = _with_last_stripe(x, address + length, finite, secrets)
        bad = tl.maximum(bad, bad_at_the_end)
        tl.store(flags + tl.load(row + 3), 1, mask=bad != 0)
        lanes, size = tl.arange(0, _LANES), length.to(tl.uint64)
        high, low = tl.load(secrets + _HIGH + lanes), tl.load(secrets + _LOW + lanes)
        tl.store(out, _merged(x, high, size * _PRIME64_2 ^ _ALL_BITS))
        tl.store(out + 1, _merged(x, low, size * _PRIME64_1))
    else:
        at = tl.arange(0, _SHORT_BYTES)
        source = address.to(tl.pointer_type(tl.uint8)) + at
        content = tl.load(source, mask=at < length, other=0)
        tl.store(out.to(tl.pointer_type(tl.uint8)) + at, content, mask=at < length)


@triton.jit
def _summed(address, length, finite, secrets, AT_ONCE: tl.constexpr):
    """Accumulators after all stripes but the last 64 bytes, and whether a value is not finite."""
    base = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    stripes, lanes = tl.arange(0, _STRIPES)[:, None], tl.arange(0, _LANES)
    words = stripes * _LANES + lanes[None, :]
    key = tl.load(secrets + stripes + lanes[None, :])
    scramble = tl.load(secrets + _SCRAMBLE + lanes)
    x = tl.load(secrets + _START + lanes)
    bad = tl.zeros((_STRIPES, _LANES), tl.uint64)
    count = (length - 1) // _STRIPE_BYTES
    last = count // _STRIPES  # block, of less than 16 stripes; perhaps of none
    first = 0
    while first <= last:
        blocks = ()
        for i in tl.static_range(AT_ONCE):
            inside = (first + i) * _STRIPES + stripes < count
            value = tl.load(base + (first + i) * _BLOCK_WORDS + words, mask=inside, other=0)
            blocks += (value,)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            inside = (first + i) * _STRIPES + stripes < count
            bad |= _not_finite(blocks[i], finite)
            product = _product(blocks[i] ^ key)
            # A value is added to the neighbour's lane.
            added = tl.where(inside, product, 0) + _swapped(blocks[i], _STRIPES)
            mixed = _scrambled(x, scramble) + tl.sum(added, axis=0)
            x = tl.where(first + i <= last, mixed, x)
        first += AT_ONCE
    return x, tl.max((bad != 0).to(tl.int32))


@triton.jit
def _with_last_stripe(x, end, finite, secrets):
    """Take in the last 64 bytes, which begin anywhere: words are put together from aligned ones."""
    lanes = tl.arange(0, _LANES)
    start = end - _STRIPE_BYTES
    nearest = (start // 8 * 8).to(tl.pointer_type(tl.uint64)) + lanes
    shift = (start % 8 * 8).to(tl.uint64)
    crossing = lanes < start % 8 * 8  # all lanes, or none
    low, high = tl.load(nearest), tl.load(nearest + 1, mask=crossing, other=0)
    value = tl.where(shift == 0, low, (low >> shift) | (high << ((64 - shift) % 64)))
    x += _product(value ^ tl.load(secrets + _LAST + lanes))
    x += tl.reshape(_swapped(tl.reshape(value, (1, _LANES)), 1), (_LANES,))
    return x, tl.max((_not_finite(value, finite) != 0).to(tl.int32))


@triton.jit
def _not_finite(value, finite):
    """Bits that are set where a value is not finite: its exponent, plus one in the last place."""
    exponents, one, overflown = finite
    return ((value & exponents.to(tl.uint64)) + one.to(tl.uint64)) & overflown.to(tl.uint64)


@triton.jit
def _swapped(values, ROWS: tl.constexpr):
    """``[ROWS, 8]`` with neighbours in each other's place."""
    even, odd = tl.split(tl.reshape(values, (ROWS, 4, 2)))
    return tl.reshape(tl.join(odd, even), (ROWS, 8))


@triton.jit
def _product(keyed):
    return keyed.to(tl.uint32).to(tl.uint64) * (keyed >> 32)


@triton.jit
def _scrambled(x, key):
    return (x ^ (x >> 47) ^ key) * _PRIME32_1


@triton.jit
def _merged(x, key, start):
    even, odd = tl.split(tl.reshape(x ^ key, (4, 2)))
    total = start + tl.sum(_folded(even, odd), axis=0)
    total = (total ^ (total >> 37)) * _AVALANCHE
    return total ^ (total >> 32)


@triton.jit
def _folded(one, other):
    """Both halves of the 128-bit product, combined by exclusive or; by long multiplication."""
    low, high = one & 0xFFFFFFFF, one >> 32
    low_other, high_other = other & 0xFFFFFFFF, other >> 32
    lowest, middle = low * low_other, high * low_other
    carried = (lowest >> 32) + (middle & 0xFFFFFFFF) + low * high_other
    upper = (middle >> 32) + (carried >> 32) + high * high_other
    return upper ^ ((carried << 32) | (lowest & 0xFFFFFFFF))

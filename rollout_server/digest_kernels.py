"""XXH3-128 of many tensors on a GPU, in Triton, and which of them hold values that are not finite.

Within a block of 1024 bytes the stripes only add to the accumulators, so all blocks are summed in
parallel, at the speed of memory; that pass looks for NaN and infinities, too. Between blocks the
accumulators are scrambled, which cannot be reordered: one warp for each tensor walks over the sums
of its blocks, a sixteenth of the bytes, and finishes the digest.

Tables are ``int64``; their columns are told where they are read.
"""

# Triton reads annotations as part of its own language.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

# What a kernel reads from outside must be a constant of the language.
_LANES = tl.constexpr(8)
_STRIPES = tl.constexpr(16)
_STRIPES_AT_ONCE = tl.constexpr(4)
_BLOCK_WORDS = tl.constexpr(128)
_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_AVALANCHE = tl.constexpr(0x165667919E3779F9)
# Columns of a tensor: its address, its length in bytes, and three words that tell whether a word
# of its values holds one that is not finite, see `_not_finite`.
_COLUMNS = tl.constexpr(5)
# Where the keys begin that `secrets` holds one after the other.
_SCRAMBLE, _START, _LAST = tl.constexpr(24), tl.constexpr(32), tl.constexpr(40)
_LOW, _HIGH = tl.constexpr(48), tl.constexpr(56)
ROW_WORDS = 32
_ROW_WORDS = tl.constexpr(ROW_WORDS)
_ROW_BYTES = tl.constexpr(8 * ROW_WORDS)
_LONGER_THAN = tl.constexpr(240)
# How far ahead of itself the walk over sums looks, in stretches.
_AHEAD = tl.constexpr(3)


@triton.jit
def _not_finite(value, tensor):
    """Bits that are set where a value is not finite: its exponent, plus one in the last place."""
    exponents = tl.load(tensor + 2).to(tl.uint64)
    one = tl.load(tensor + 3).to(tl.uint64)
    overflown = tl.load(tensor + 4).to(tl.uint64)
    return ((value & exponents) + one) & overflown


@triton.jit
def _swapped(values, ROWS: tl.constexpr):
    """``[ROWS, 8]`` with neighbours in each other's place."""
    pairs = tl.reshape(values, (ROWS, 4, 2))
    return tl.reshape(tl.sum(pairs, axis=2, keep_dims=True) - pairs, (ROWS, 8))


@triton.jit
def _product(keyed):
    return keyed.to(tl.uint32).to(tl.uint64) * (keyed >> 32)


@triton.jit
def block_sums(work, tensors, secrets, sums, flags, BLOCKS: tl.constexpr):
    """What each block adds to each lane; up to ``BLOCKS`` blocks of one tensor for each program.

    Args:
        work: ``[programs, 4]``: address of the first block, how many blocks, the row of ``sums``
            for the first of them, and which tensor they belong to.
        tensors: ``[tensors, 5]``, see above.
        secrets: the secret at every eighth byte, and other keys behind it.
        sums: ``[blocks, 8]``, written.
        flags: ``[tensors]``, int32, set where a value is not finite.
    """
    row = work + tl.program_id(0).to(tl.int64) * 4
    base = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.uint64)), 16)
    blocks = tl.arange(0, BLOCKS)
    lanes = tl.arange(0, _LANES)
    inside = (blocks < tl.load(row + 1).to(tl.int32))[:, None]
    index = tl.load(row + 3)
    tensor = tensors + index * _COLUMNS
    words = base + blocks[:, None] * _BLOCK_WORDS + lanes[None, :]
    products = tl.zeros((BLOCKS, _LANES), tl.uint64)
    values = tl.zeros((BLOCKS, _LANES), tl.uint64)
    bad = tl.zeros((BLOCKS, _LANES), tl.uint64)
    # All at once would take too many registers.
    for some in range(0, _STRIPES, _STRIPES_AT_ONCE):
        for one in tl.static_range(_STRIPES_AT_ONCE):
            stripe = some + one
            value = tl.load(words + stripe * _LANES, mask=inside, other=0)
            products += _product(value ^ tl.load(secrets + stripe + lanes)[None, :])
            values += value
            bad |= _not_finite(value, tensor)
    # A value is added to the neighbour's lane.
    out = sums + (tl.load(row + 2) + blocks)[:, None] * _LANES + lanes[None, :]
    tl.store(out, products + _swapped(values, BLOCKS), mask=inside)
    found = tl.max(tl.max((bad != 0).to(tl.int32), axis=1), axis=0)
    tl.store(flags + index, 1, mask=found != 0)


@triton.jit
def _scrambled(x, key, more):
    """The accumulators ``x`` scrambled, plus ``more``.

    Each block waits for the one before it. With what comes after the product in the same line, that
    is a chain of four instructions.
    """
    return (x ^ (x >> 47) ^ key) * _PRIME32_1 + more


@triton.jit
def scan_blocks(
    work,
    tensors,
    secrets,
    sums,
    states,
    flags,
    results,
    UNROLL: tl.constexpr,
):
    """Walk over blocks of a tensor, and finish its digest if they are the last; one warp for each.

    Args:
        work: ``[programs, 4]``: which tensor, the row of ``sums`` for its first block here, how
            many blocks, and 1 if they are the tensor's first, plus 2 if they are its last.
        tensors, secrets, sums, flags: as for :func:`block_sums`.
        states: ``[tensors, 8]``, where the walk goes on from one call to the next.
        results: ``[tensors, ROW_WORDS]``: the low and the high half of the digest; of a tensor too
            short for them its bytes.
    """
    row = work + tl.program_id(0).to(tl.int64) * 4
    index = tl.load(row)
    count = tl.load(row + 2)
    kind = tl.load(row + 3)
    lanes = tl.arange(0, _LANES)
    key = tl.load(secrets + _SCRAMBLE + lanes)
    before = tl.where(kind % 2 == 1, secrets + _START, states + index * _LANES)
    x = tl.load(before + lanes)
    first = sums + tl.load(row + 1) * _LANES
    # Nobody else would bring later sums nearer. What was looked at a stretch ago is added up, so
    # that looking waits for nothing and is not left out; nobody reads the sum.
    sectors = tl.arange(0, 2 * UNROLL)
    last_sector = 2 * count
    seen = tl.zeros((2 * UNROLL,), tl.uint64)
    ahead = seen
    block = first + lanes
    for stretch in range(count // UNROLL):
        seen += ahead
        at = (stretch + _AHEAD) * (2 * UNROLL) + sectors
        ahead = tl.load(first + at * 4, mask=at < last_sector, other=0)
        for step in tl.static_range(UNROLL):
            x = _scrambled(x, key, tl.load(block + step * _LANES))
        block += UNROLL * _LANES
    for _ in range(count % UNROLL):
        x = _scrambled(x, key, tl.load(block))
        block += _LANES
    tl.store(states + index * _LANES + lanes, x)
    out = results + index * _ROW_WORDS
    tl.store(out + _ROW_WORDS - 1, tl.sum(seen + ahead, axis=0))
    if kind >= 2:
        tensor = tensors + index * _COLUMNS
        length = tl.load(tensor + 1)
        if length > _LONGER_THAN:
            _finish(_scrambled(x, key, 0), tensor, length, secrets, flags + index, out)
        else:
            _copy_short(tensor, length, out)


@triton.jit
def _copy_short(tensor, length, out):
    at = tl.arange(0, _ROW_BYTES)
    source = tl.load(tensor).to(tl.pointer_type(tl.uint8))
    content = tl.load(source + at, mask=at < length, other=0)
    tl.store(out.to(tl.pointer_type(tl.uint8)) + at, content, mask=at < length)


@triton.jit
def _finish(x, tensor, length, secrets, flag, out):
    """Take in the stripes after the last whole block, and the last 64 bytes; write the digest."""
    lanes = tl.arange(0, _LANES)
    stripes = tl.arange(0, _STRIPES)
    address = tl.load(tensor)
    blocks = (length - 1) // 1024
    whole = (length - 1 - blocks * 1024) // 64
    base = tl.multiple_of((address + blocks * 1024).to(tl.pointer_type(tl.uint64)), 16)
    words = base + stripes[:, None] * _LANES + lanes[None, :]
    inside = (stripes < whole)[:, None]
    value = tl.load(words, mask=inside, other=0)
    product = _product(value ^ tl.load(secrets + stripes[:, None] + lanes[None, :]))
    x += tl.sum(tl.where(inside, product, 0) + _swapped(value, _STRIPES), axis=0)
    bad = tl.max((_not_finite(value, tensor) != 0).to(tl.int32))
    # The last stripe begins anywhere: its words are put together from aligned ones.
    end = address + length - 64
    nearest = (end // 8 * 8).to(tl.pointer_type(tl.uint64)) + lanes
    shift = (end % 8 * 8).to(tl.uint64)
    crossing = lanes < end % 8 * 8  # all lanes, or none
    low, high = tl.load(nearest), tl.load(nearest + 1, mask=crossing, other=0)
    value = tl.where(shift == 0, low, (low >> shift) | (high << ((64 - shift) % 64)))
    x += _product(value ^ tl.load(secrets + _LAST + lanes))
    x += tl.reshape(_swapped(tl.reshape(value, (1, 8)), 1), (8,))
    bad = tl.maximum(bad, tl.max((_not_finite(value, tensor) != 0).to(tl.int32)))
    tl.store(flag, 1, mask=bad != 0)
    size = length.to(tl.uint64)
    tl.store(out, _merged(x, tl.load(secrets + _LOW + lanes), size * _PRIME64_1))
    tl.store(out + 1, _merged(x, tl.load(secrets + _HIGH + lanes), ~(size * _PRIME64_2)))


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

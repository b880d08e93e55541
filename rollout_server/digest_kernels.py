"""XXH3 on a GPU, in Triton: the part that reads the bytes. The arithmetic is that of ``xxh3.py``.

Within a block of 1024 bytes the stripes only add to the accumulators, so all blocks are summed in
parallel, at the speed of memory. Between blocks the accumulators are scrambled, which cannot be
reordered, so one warp for each tensor walks over the sums of its blocks, a sixteenth of the bytes.
"""

# Triton reads annotations as part of its own language.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

# What a kernel reads from outside must be a constant of the language.
_LANES = tl.constexpr(8)
_STRIPES = tl.constexpr(16)
_BLOCK_WORDS = tl.constexpr(128)
_SCRAMBLE_SHIFT = tl.constexpr(47)
_PRIME32_1 = tl.constexpr(0x9E3779B1)


@triton.jit
def block_sums(
    addresses,
    blocks,
    first_block,
    first_program,
    tensor_of_program,
    secret_words,
    sums,
    BLOCKS: tl.constexpr,
):
    """What each block adds to each lane; ``BLOCKS`` blocks of one tensor for each program.

    Args:
        addresses: of the tensors' first bytes, multiples of 16.
        blocks: of each tensor.
        first_block: of each tensor, among all.
        first_program: of each tensor.
        tensor_of_program: its index.
        secret_words: the secret at every eighth byte.
        sums: ``[all blocks, 8]``, written.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensor_of_program + program)
    base = tl.load(addresses + tensor).to(tl.pointer_type(tl.uint64))
    base = tl.multiple_of(base, 16)
    rows = (program - tl.load(first_program + tensor)).to(tl.int64) * BLOCKS
    rows += tl.arange(0, BLOCKS)
    lanes = tl.arange(0, _LANES)
    inside = (rows < tl.load(blocks + tensor))[:, None]
    words = base + rows[:, None] * _BLOCK_WORDS + lanes[None, :]
    products = tl.zeros((BLOCKS, _LANES), tl.uint64)
    values = tl.zeros((BLOCKS, _LANES), tl.uint64)
    for stripe in tl.static_range(_STRIPES):
        value = tl.load(words + stripe * _LANES, mask=inside, other=0)
        keyed = value ^ tl.load(secret_words + stripe + lanes)[None, :]
        low = keyed.to(tl.uint32).to(tl.uint64)
        products += low * (keyed >> 32)
        values += value
    # A value is added to the neighbour's lane: the sum of the two without one's own.
    pairs = tl.reshape(values, (BLOCKS, 4, 2))
    swapped = tl.reshape(tl.sum(pairs, axis=2, keep_dims=True) - pairs, (BLOCKS, _LANES))
    out = sums + (tl.load(first_block + tensor) + rows)[:, None] * _LANES + lanes[None, :]
    tl.store(out, products + swapped, mask=inside)


@triton.jit
def scan_blocks(
    sums,
    blocks,
    first_block,
    initial,
    scramble_key,
    accumulators,
    UNROLL: tl.constexpr,
):
    """The accumulators after all blocks of a tensor; one program for each.

    Args:
        sums: of :func:`block_sums`.
        initial: ``[8]``, what they start as.
        scramble_key: ``[8]``.
        accumulators: ``[tensors, 8]``, written.
    """
    tensor = tl.program_id(0)
    lanes = tl.arange(0, _LANES)
    count = tl.load(blocks + tensor)
    block = sums + tl.load(first_block + tensor) * _LANES + lanes
    key = tl.load(scramble_key + lanes)
    state = tl.load(initial + lanes)
    # Loads depend on nothing, so those of an unrolled stretch are under way together.
    for _ in range(count // UNROLL):
        for step in tl.static_range(UNROLL):
            state += tl.load(block + step * _LANES)
            state = (state ^ (state >> _SCRAMBLE_SHIFT) ^ key) * _PRIME32_1
        block += UNROLL * _LANES
    for _ in range(count % UNROLL):
        state += tl.load(block)
        state = (state ^ (state >> _SCRAMBLE_SHIFT) ^ key) * _PRIME32_1
        block += _LANES
    tl.store(accumulators + tensor * _LANES + lanes, state)

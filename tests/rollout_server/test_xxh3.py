"""XXH3-128 by blocks, against the xxhash package."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from rollout_server import xxh3

LENGTHS = [
    241, 255, 256, 257, 1023, 1024, 1025, 1026, 1087, 1088, 1089, 2047, 2048, 2049, 2112, 3000,
    4096, 65536, 65537, 100_003,
]  # fmt: skip


def digest(content: bytes) -> str:
    """All of it in numpy: sums of blocks, then the scan over them, then the end."""
    blocks = xxh3.blocks_of(len(content))
    words = np.frombuffer(content[: blocks * xxh3.BLOCK_BYTES], "<u8")
    words = words.reshape(blocks, xxh3.STRIPES, xxh3.LANES)
    state = xxh3.INITIAL.copy()
    for added in xxh3.lane_sums(words, xxh3.keys(0, xxh3.STRIPES)):
        state += added
        state = (state ^ (state >> np.uint64(47)) ^ xxh3.SCRAMBLE_KEY) * xxh3.PRIME32_1
    return xxh3.finish(state, content[-xxh3.TAIL_BYTES :], len(content))


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_ends_in_its_own_way(length: int) -> None:
    for content in (
        np.random.default_rng(length).bytes(length), bytes(length), b"\xff" * length
    ):  # fmt: skip
        assert digest(content) == xxhash.xxh3_128_hexdigest(content)


def test_lengths_at_random() -> None:
    generator = np.random.default_rng(0)
    for length in generator.integers(xxh3.LONGER_THAN + 1, 20_000, 200).tolist():
        content = generator.bytes(length)
        assert digest(content) == xxhash.xxh3_128_hexdigest(content), length

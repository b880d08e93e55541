"""XXH3-128 by blocks, against the xxhash package."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from rollout_server import xxh3

LENGTHS = [
    241, 255, 256, 257, 1023, 1024, 1025, 1026, 1087, 1088, 1089, 2047, 2048, 2049, 2112, 3000,
    4096, 65536, 65537, 100_003,
]  # fmt: skip


def scanned(content: bytes, blocks: int) -> NDArray[np.uint64]:
    """The accumulators after so many blocks."""
    words = np.frombuffer(content[: blocks * xxh3.BLOCK_BYTES], "<u8")
    words = words.reshape(blocks, xxh3.STRIPES, xxh3.LANES)
    state = xxh3.INITIAL.copy()
    for added in xxh3.lane_sums(words, xxh3.keys(0, xxh3.STRIPES)):
        state += added
        state = (state ^ (state >> np.uint64(47)) ^ xxh3.SCRAMBLE_KEY) * xxh3.PRIME32_1
    return state


def digest(content: bytes) -> str:
    """All of it in numpy: sums of blocks, then the scan over them, then the end."""
    state = scanned(content, xxh3.blocks_of(len(content)))
    tail = np.frombuffer(content[-xxh3.TAIL_BYTES :].rjust(xxh3.TAIL_BYTES, b"?"), np.uint8)
    (found,) = xxh3.finish(state[None], tail[None], np.array([len(content)]))
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_ends_in_its_own_way(length: int) -> None:
    for content in (
        np.random.default_rng(length).bytes(length), bytes(length), b"\xff" * length
    ):  # fmt: skip
        assert digest(content) == xxhash.xxh3_128_hexdigest(content)


def test_inputs_that_end_differently_are_finished_together() -> None:
    contents = [np.random.default_rng(length).bytes(length) for length in (241, 1024, 1025, 1087)]
    tails = [content[-xxh3.TAIL_BYTES :].rjust(xxh3.TAIL_BYTES) for content in contents]
    states = [xxh3.INITIAL] * 2 + [scanned(content, 1) for content in contents[2:]]
    lengths = np.array([len(content) for content in contents])
    found = xxh3.finish(
        np.stack(states), np.stack([np.frombuffer(tail, np.uint8) for tail in tails]), lengths
    )
    assert found == [xxhash.xxh3_128_hexdigest(content) for content in contents]


def test_lengths_at_random() -> None:
    generator = np.random.default_rng(0)
    for length in generator.integers(xxh3.LONGER_THAN + 1, 20_000, 200).tolist():
        content = generator.bytes(length)
        assert digest(content) == xxhash.xxh3_128_hexdigest(content), length

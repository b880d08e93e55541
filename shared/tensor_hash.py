"""The hash of a tensor's bytes: that of their pieces' hashes, so that nobody has to go in order.

XXH3 takes in its input block after block, each of which waits for the one before it. Pieces do not
wait for each other: threads share a large tensor, and a GPU takes all of its pieces at once.
"""

from __future__ import annotations

import xxhash

HASH_PIECE_BYTES = 256 << 10
"""A tensor is cut into pieces of this many bytes; the last one is what is left."""

Buffer = bytes | bytearray | memoryview


class TensorHash:
    """Takes a tensor's bytes as they come."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._begin()

    def _begin(self) -> None:
        # This lets other threads run while it takes in a piece; hashing in one call does not.
        self._piece, self._missing = xxhash.xxh3_128(), HASH_PIECE_BYTES

    def update(self, data: Buffer) -> None:
        """Take the next bytes, which may begin and end within a piece."""
        rest = memoryview(data)
        while len(rest) >= self._missing:
            self._piece.update(rest[: self._missing])
            rest = rest[self._missing :]
            self._digests += self._piece.digest()
            self._begin()
        self._piece.update(rest)
        self._missing -= len(rest)

    def hexdigest(self) -> str:
        """Hash of what has come so far."""
        ends_here = bool(self._digests) and self._missing == HASH_PIECE_BYTES
        return combined_hash(self._digests + (b"" if ends_here else self._piece.digest()))


def tensor_hash(data: Buffer) -> str:
    """Hash of a tensor's bytes."""
    whole = TensorHash()
    whole.update(data)
    return whole.hexdigest()


def combined_hash(digests: Buffer) -> str:
    """Hash of a tensor, from those of its pieces.

    Args:
        digests: XXH3-128 of each piece as 16 bytes, big-endian, in their order. A tensor without
            bytes has one piece without any.
    """
    one = len(digests) == xxhash.xxh3_128().digest_size
    return bytes(digests).hex() if one else xxhash.xxh3_128_hexdigest(digests)

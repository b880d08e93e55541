"""Which policies exist, and which version of each is live.

A version is a number that only the server hands out, one higher for each publish. It is bound to
the digest of the weights that were verified, so a sample's version always leads to its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Policy:
    """A named, versioned set of weights.

    Attributes:
        name: ``default`` is the model that the engine was started with, and its successors.
        version: number of the live weights; 0 is the checkpoint the engine started from.
        files: canonical checkpoint of the live version, from which it can be restored.
        digests: digest of each version so far.
    """

    name: str
    version: int
    files: tuple[Path, ...]
    digests: dict[int, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of the live version."""
        return self.digests[self.version]

    def advance(self, files: tuple[Path, ...], digest: str) -> None:
        """Make the next version live."""
        self.version += 1
        self.files = files
        self.digests[self.version] = digest

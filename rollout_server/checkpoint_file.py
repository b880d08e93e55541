"""A checkpoint that is being staged: its header is known, its tensors come in runs.

A run is one tensor or more that follow each other in the file. Runs may come side by side; each
tensor is hashed and looked at as soon as it is whole, so that hardly anything is left to be
verified when the last byte is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from rollout_server.checkpoints import Checkpoint, Manifest, Verified, reject_unfit, verify
from rollout_server.staged_files import FilePart, StagedFile
from rollout_server.tensor_check import TensorCheck, TensorLook
from shared.errors import BodyTooLarge, Conflict, InvalidRequest, Problem
from shared.weights import PREFIX_BYTES, TensorRange, parse_header

CANONICAL_FILE = "canonical.safetensors"

OpenFile = Callable[[Path, int], StagedFile]
"""Opens a file that will have so many bytes."""


class CheckpointFile:
    """A safetensors file that is filled.

    Args:
        path: where it is staged.
        open_file: opens the file there.
        manifest: what the model needs.
        head: the file's first bytes, to the end of its header.
        max_bytes: largest file.

    Attributes:
        start, end: where the tensors' bytes begin and end.
        checks: of the tensors that are whole, by name.

    Raises:
        MalformedBody, WeightsRejected, BodyTooLarge: no checkpoint for this model begins so.
    """

    def __init__(
        self, path: Path, open_file: OpenFile, manifest: Manifest, head: bytes, max_bytes: int
    ) -> None:
        self._path, self._manifest = path, manifest
        self._ranges = parse_header(head[PREFIX_BYTES:])
        reject_unfit({item.spec.name: item.spec for item in self._ranges}, manifest)
        self.start = len(head)
        self.end = max((item.end for item in self._ranges), default=self.start)
        if self.end > max_bytes:
            raise BodyTooLarge(f"the upload exceeds {max_bytes} bytes")
        empty = [item for item in self._ranges if item.start == item.end]
        self.checks = {item.spec.name: self._look(item).result() for item in empty}
        self._filling: set[str] = set()
        self._file = open_file(path, self.end)
        _place(self._file.part(0, self.start), memoryview(head))

    def _look(self, item: TensorRange) -> TensorLook:
        return TensorLook(item.spec, self._manifest.served_dtype(item.spec.name))

    def run(self, start: int, end: int) -> TensorRun:
        """The tensors in ``[start, end)``, which are to be filled, if need be once more.

        Raises:
            InvalidRequest: there is no tensor, or only part of one, at an end of it.
            Conflict: somebody else is filling one of them.
        """
        items = [item for item in self._ranges if start <= item.start < item.end <= end]
        if not items or (items[0].start, items[-1].end) != (start, end):
            self._refuse_range(start, end)
        names = {item.spec.name for item in items}
        if both := sorted(names & self._filling):
            raise Conflict(f"another request is bringing {both[0]}")
        for name in names:
            self.checks.pop(name, None)
        self._filling |= names
        looks = deque((item, self._look(item)) for item in items)
        return TensorRun(self._file.part(start, end), start, looks, self.checks, self._filling)

    def _refuse_range(self, start: int, end: int) -> None:
        edges = [self.start, *(item.end for item in self._ranges)]
        near = {
            "start": (start, max((e for e in edges if e <= start), default=self.start)),
            "end": (end, min((e for e in edges if e >= end), default=self.end)),
        }
        problems = [
            Problem(name, str(asked), f"where a tensor {name}s, such as {edge}")
            for name, (asked, edge) in near.items()
            if asked != edge or not self.start <= start < end <= self.end
        ]
        raise InvalidRequest("a run is of whole tensors, one at least", problems=problems)

    @property
    def missing(self) -> list[TensorRange]:
        """Tensors that are not whole yet."""
        return [item for item in self._ranges if item.spec.name not in self.checks]

    def verified(self, announced: str | None) -> Verified:
        """Now that no tensor is missing: the checkpoint that they are.

        Args:
            announced: digest of the tensors as they were sent, if the sender gave one.

        Raises:
            WeightsRejected: it must not be loaded.
        """
        self._file.end(self.end)
        canonical = self._path.with_name(CANONICAL_FILE)
        with Checkpoint([self._path]) as sent:
            verified = verify(sent, self._manifest, announced, canonical, self.checks)
        if self._path not in verified.files:
            self._path.unlink()
        return verified

    def close(self) -> None:
        """Let go of the file; nothing is being filled any more."""
        self._file.close()


def _place(part: FilePart, content: memoryview) -> None:
    while content:
        room = part.room(len(content))
        room[:] = content[: len(room)]
        part.filled(len(room))
        content = content[len(room) :]


class TensorRun:
    """A sink for tensors that follow each other.

    Args:
        part: of the file.
        position: where it begins.
        looks: at the tensors, in order.
        checks: where they are noted as soon as they are whole.
        filling: names of the tensors that are being filled, from which these are to go.
    """

    def __init__(
        self,
        part: FilePart,
        position: int,
        looks: deque[tuple[TensorRange, TensorLook]],
        checks: dict[str, TensorCheck],
        filling: set[str],
    ) -> None:
        self._part, self._position, self._looks = part, position, looks
        self._checks, self._filling = checks, filling
        self._names = [item.spec.name for item, _ in looks]
        self._end = looks[-1][0].end

    @property
    def left(self) -> int:
        """Bytes that have not come yet."""
        return self._end - self._position

    def room(self) -> memoryview:
        return self._part.room(self.left)

    def filled(self, count: int) -> None:
        piece = self._part.filled(count)
        start, self._position = self._position, self._position + count
        while self._looks and self._looks[0][0].start < self._position:
            item, look = self._looks[0]
            look.update(piece[max(item.start - start, 0) : item.end - start])
            if item.end > self._position:
                return
            self._checks[item.spec.name] = look.result()
            self._looks.popleft()

    def close(self) -> None:
        """It is over; tensors that are not whole may be sent again."""
        self._filling.difference_update(self._names)

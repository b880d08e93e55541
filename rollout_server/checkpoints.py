"""Checkpoints on the server's disk: reading, the model's own manifest, verification.

A *manifest* lists the tensors that the served model consists of, in the dtype it is served in. A
checkpoint is *canonical* when it holds exactly those; the digest of a policy is the digest of its
canonical checkpoint, so a float32 and a bfloat16 upload of the same policy get the same name.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from rollout_server.tensor_check import TensorCheck, TensorLook
from shared.errors import MalformedBody, Problem, WeightsRejected
from shared.tensor_hash import tensor_hash
from shared.weights import (
    PREFIX_BYTES,
    TensorRange,
    TensorSpec,
    checkpoint_digest,
    encode_header,
    header_length,
    parse_header,
)

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SERVED_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ACCEPTED = {"BF16": ("BF16", "F32"), "F16": ("F16", "F32"), "F32": ("F32", "BF16", "F16")}
"""Sent dtypes that a served dtype accepts: its own, rounding from F32, or exact widening."""
_PROBLEMS_SHOWN = 20
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class Checkpoint:
    """Tensors of one or more safetensors files, mapped into memory. A context manager.

    Raises:
        MalformedBody: a file is not safetensors, is cut short, or repeats a tensor.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._maps: list[mmap.mmap] = []
        self._ranges: dict[str, tuple[mmap.mmap, TensorRange]] = {}
        try:
            for path in paths:
                self._map(path)
        except BaseException:
            self.close()
            raise

    def _map(self, path: Path) -> None:
        with path.open("rb") as file:
            prefix = file.read(PREFIX_BYTES)
            ranges = parse_header(file.read(header_length(prefix)))
            size = path.stat().st_size
            end = max((r.end for r in ranges), default=size)
            if end != size:
                raise MalformedBody(f"the checkpoint is {size} bytes; its header says {end}")
            # A private mapping is writable, which torch wants, and never reaches the file.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._maps.append(content)
        for item in ranges:
            if item.spec.name in self._ranges:
                raise MalformedBody(f"tensor {item.spec.name} is in two files")
            self._ranges[item.spec.name] = content, item

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every tensor, by name."""
        return {name: item.spec for name, (_, item) in self._ranges.items()}

    def data(self, name: str) -> memoryview:
        """The tensor's bytes, not copied; valid until the checkpoint is closed."""
        content, item = self._ranges[name]
        return memoryview(content)[item.start : item.end]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor itself, not copied; valid until the checkpoint is closed."""
        spec = self._ranges[name][1].spec
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        return torch.frombuffer(self.data(name), dtype=TORCH_DTYPES[spec.dtype]).reshape(spec.shape)

    def close(self) -> None:
        """Let go of the files."""
        self._ranges.clear()
        self._maps.clear()  # unmapped when the last view of them is gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the file itself, or a directory's shards."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.glob("*.safetensors") if file.is_file())


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint of the served model holds.

    Attributes:
        required: every tensor in the dtype it is served in, by name.
        tied: tensors that may be sent but say nothing new, with the one they must equal.
    """

    required: dict[str, TensorSpec]
    tied: dict[str, str]

    @classmethod
    def of_checkpoint(cls, specs: Iterable[TensorSpec], *, dtype: str, tied: bool) -> Manifest:
        """Manifest of a model from the checkpoint it was first loaded from.

        Args:
            specs: the checkpoint's tensors.
            dtype: the served safetensors dtype; floating tensors are served in it.
            tied: whether input and output embeddings are one tensor.
        """
        aliases = dict(_TIED) if tied else {}
        served = {
            spec.name: replace(spec, dtype=dtype) if spec.dtype in TORCH_DTYPES else spec
            for spec in specs
            if spec.name not in aliases
        }
        return cls(served, {a: b for a, b in aliases.items() if b in served})

    def served_dtype(self, name: str) -> str:
        """The dtype in which a tensor is served, be it a tied one."""
        return self.required[self.tied.get(name, name)].dtype

    def problems(self, sent: dict[str, TensorSpec]) -> list[Problem]:
        """Everything by which a checkpoint's tensors differ from what the model needs."""
        known = self.required | {a: replace(self.required[b], name=a) for a, b in self.tied.items()}
        found = [
            Problem(name, "nothing: the tensor is missing", str(spec))
            for name, spec in self.required.items()
            if name not in sent
        ]
        for name, spec in sent.items():
            if name not in known:
                found.append(Problem(name, str(spec), "only tensors that the model has"))
            elif spec.shape != known[name].shape:
                found.append(Problem(name, f"shape {spec.shape}", f"shape {known[name].shape}"))
            elif spec.dtype not in (
                allowed := _ACCEPTED.get(known[name].dtype, (known[name].dtype,))
            ):
                found.append(Problem(name, f"dtype {spec.dtype}", " or ".join(allowed)))
        return found


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint that may be loaded.

    Attributes:
        files: safetensors files in canonical form.
        digest: digest of the canonical tensors.
        base: digest that must still be live when it is loaded, if it was made from another.
    """

    files: tuple[Path, ...]
    digest: str
    base: str | None = None


def check_tensor(sent: Checkpoint, name: str, served: str) -> TensorCheck:
    """Look at one tensor of a checkpoint, which will be served in the given dtype."""
    look = TensorLook(sent.specs[name], served)
    look.update(sent.data(name))
    return look.result()


def check_tensors(sent: Checkpoint, manifest: Manifest) -> dict[str, TensorCheck]:
    """Look at every tensor, several at a time.

    Raises:
        WeightsRejected: a tensor is missing, unknown, or of another shape or dtype.
    """
    reject_unfit(sent.specs, manifest)
    with ThreadPoolExecutor() as pool:
        checks = pool.map(
            lambda name: check_tensor(sent, name, manifest.served_dtype(name)), sent.specs
        )
        return dict(zip(sent.specs, checks, strict=True))


def verify(
    sent: Checkpoint,
    manifest: Manifest,
    announced: str | None,
    canonical_file: Path,
    checks: Mapping[str, TensorCheck],
) -> Verified:
    """Judge a checkpoint by what was seen of its tensors, and bring it into canonical form.

    Args:
        sent: the checkpoint as it arrived; names, shapes and dtypes are right.
        manifest: what the model needs.
        announced: digest of the tensors as they were sent, if the sender gave one.
        canonical_file: written only when a cast or a tied tensor makes that necessary.
        checks: of every tensor that was sent.

    Raises:
        WeightsRejected: a tensor is not finite, not the one it is tied to, or not what was
            announced. ``problems`` names the tensors.
    """
    digest = checkpoint_digest((spec, checks[name].hash) for name, spec in sent.specs.items())
    if announced not in (None, digest):
        raise WeightsRejected(
            f"the checkpoint's digest is {digest}, not {announced} as announced: "
            "bytes were changed on the way, or another checkpoint was sent"
        )
    reject_if(_untied(sent, manifest), "tied tensors differ")
    bad = [check.problem for check in checks.values() if check.problem]
    reject_if(bad, "the checkpoint holds values that are not finite")
    if sent.specs == manifest.required:
        return Verified(sent.paths, digest)
    return Verified((canonical_file,), _write_canonical(sent, manifest, canonical_file))


def reject_unfit(specs: dict[str, TensorSpec], manifest: Manifest) -> None:
    """Raise WeightsRejected unless these are the tensors that the model needs."""
    reject_if(manifest.problems(specs), "the checkpoint does not fit the model")


def content_digest(checkpoint: Checkpoint) -> str:
    """Digest of a checkpoint's tensors just as they are."""
    specs = checkpoint.specs.items()
    return checkpoint_digest((spec, tensor_hash(checkpoint.data(name))) for name, spec in specs)


def digest_of(checkpoint: Checkpoint, manifest: Manifest) -> str:
    """Digest that ``checkpoint`` has in canonical form, without writing that form anywhere."""
    return checkpoint_digest(
        (spec, tensor_hash(data)) for spec, data in canonical_tensors(checkpoint, manifest)
    )


def reject_if(problems: Sequence[Problem], message: str) -> None:
    """Raise WeightsRejected if there is anything to say, with the first problems."""
    if problems:
        more = len(problems) - _PROBLEMS_SHOWN
        tail = f" ({more} more problems not shown)" if more > 0 else ""
        raise WeightsRejected(message + tail, problems=problems[:_PROBLEMS_SHOWN])


def _untied(sent: Checkpoint, manifest: Manifest) -> list[Problem]:
    return [
        Problem(alias, "other values", f"exactly those of {name}, to which the model ties it")
        for alias, name in manifest.tied.items()
        if alias in sent.specs and not torch.equal(sent.tensor(alias), sent.tensor(name))
    ]


def canonical_tensors(
    sent: Checkpoint, manifest: Manifest
) -> Iterator[tuple[TensorSpec, memoryview]]:
    """The tensors in the names, order and dtypes of the manifest, which their digest is of."""
    for name, spec in manifest.required.items():
        if sent.specs[name].dtype == spec.dtype:
            yield spec, sent.data(name)
        else:
            cast = sent.tensor(name).to(TORCH_DTYPES[spec.dtype]).contiguous()
            yield spec, cast.view(-1).view(torch.uint8).numpy().data


def _write_canonical(sent: Checkpoint, manifest: Manifest, path: Path) -> str:
    hashes = []
    with path.open("wb") as file:
        file.write(encode_header(manifest.required.values()))
        for spec, data in canonical_tensors(sent, manifest):
            file.write(data)
            hashes.append((spec, tensor_hash(data)))
    return checkpoint_digest(hashes)

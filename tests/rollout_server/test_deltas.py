"""A delta applied to the live checkpoint gives the file that a full publish would have given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout_server.checkpoints import Checkpoint, Manifest, check_tensors, verify
from rollout_server.deltas import apply_delta
from shared.delta import BLOCK_ELEMENTS
from shared.delta_sender import DeltaBase
from shared.errors import MalformedBody, WeightsRejected
from shared.weights import encode_header, stream_checkpoint
from tests.rollout_server.support import Tensors, digest_of, lazy, spec_of, tensor_bytes


def write(path: Path, weights: Tensors) -> Path:
    header = encode_header(spec_of(name, tensor) for name, tensor in weights.items())
    path.write_bytes(header + b"".join(map(tensor_bytes, weights.values())))
    return path


def delta_file(path: Path, old: Tensors, new: Tensors) -> Path:
    base = DeltaBase()
    for _ in stream_checkpoint(base.record(lazy(old))):
        pass
    base.commit()
    path.write_bytes(b"".join(base.encode(lazy(new))))
    return path


@pytest.fixture
def old() -> Tensors:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(300, 4001).bfloat16(),  # two blocks
        "norm": torch.ones(64, dtype=torch.bfloat16),
        "head": torch.randn(64, 64).bfloat16(),
        "count": torch.arange(5),
        "none": torch.empty(0, 8, dtype=torch.bfloat16),
    }


@pytest.fixture
def new(old: Tensors) -> Tensors:
    """A small step, after which most values are what they were."""
    moved = {
        name: (t.float() + 1e-5 * torch.randn(t.shape)).to(t.dtype)
        for name, t in old.items()
        if t.is_floating_point() and name != "norm"
    }
    return old | moved | {"count": old["count"] + 1}


@pytest.fixture
def manifest(old: Tensors) -> Manifest:
    specs = [spec_of(name, tensor) for name, tensor in old.items()]
    return Manifest.of_checkpoint(specs, dtype="BF16", tied=False)


Apply = Callable[..., str]


@pytest.fixture
def apply(tmp_path: Path, manifest: Manifest, old: Tensors) -> Apply:
    """Applies a delta file to the live checkpoint ``old``, or to another one."""

    def run(delta: Path, *files: Path, out: Path = tmp_path / "out.safetensors") -> str:
        with Checkpoint(files or [write(tmp_path / "live.safetensors", old)]) as live:
            return apply_delta(delta, live, manifest, out)

    return run


def test_result_is_byte_for_byte_the_full_checkpoint(
    tmp_path: Path, apply: Apply, manifest: Manifest, old: Tensors, new: Tensors
) -> None:
    assert old["embed"].numel() > BLOCK_ELEMENTS
    digest = apply(delta_file(tmp_path / "delta", old, new))
    full = write(tmp_path / "full.safetensors", new)
    assert (tmp_path / "out.safetensors").read_bytes() == full.read_bytes()
    with Checkpoint([full]) as sent:
        checks = check_tensors(sent, manifest)
        assert verify(sent, manifest, None, tmp_path / "unused", checks).digest == digest


def test_base_in_several_files_and_another_order(
    tmp_path: Path, apply: Apply, old: Tensors, new: Tensors
) -> None:
    first = write(tmp_path / "1.safetensors", {"head": old["head"], "none": old["none"]})
    rest = {name: old[name] for name in ("count", "embed", "norm")}
    second = write(tmp_path / "2.safetensors", rest)
    backwards = delta_file(tmp_path / "delta", dict(reversed(old.items())), new)
    apply(backwards, first, second)
    full = write(tmp_path / "full.safetensors", new)
    assert (tmp_path / "out.safetensors").read_bytes() == full.read_bytes()


def test_version_0_in_another_dtype_and_with_a_tied_tensor(
    tmp_path: Path, old: Tensors, new: Tensors
) -> None:
    wide: Tensors = {name: t.float() if t.is_floating_point() else t for name, t in old.items()}
    wide["head"] += 1e-6  # not exact in bfloat16: the base is what it rounds to
    alias = {"lm_head.weight": wide["embed"], "model.embed_tokens.weight": wide.pop("embed")}
    file = write(tmp_path / "live.safetensors", wide | alias)
    specs = [spec_of(name, tensor) for name, tensor in (wide | alias).items()]
    manifest = Manifest.of_checkpoint(specs, dtype="BF16", tied=True)
    rename = {"embed": "model.embed_tokens.weight"}
    held = {rename.get(name, name): tensor for name, tensor in old.items()}
    held["head"] = wide["head"].bfloat16()
    moved = {rename.get(name, name): tensor for name, tensor in new.items()}
    delta, out = delta_file(tmp_path / "delta", held, moved), tmp_path / "out.safetensors"
    with Checkpoint([file]) as live:
        apply_delta(delta, live, manifest, out)
    with Checkpoint([out]) as result:
        assert list(result.specs) == list(manifest.required)
        for name in manifest.required:
            assert bytes(result.data(name)) == tensor_bytes(moved[name])


def test_delta_without_changes(tmp_path: Path, apply: Apply, old: Tensors) -> None:
    delta = delta_file(tmp_path / "delta", old, old)
    assert apply(delta) == digest_of(old)
    live, out = tmp_path / "live.safetensors", tmp_path / "out.safetensors"
    assert out.read_bytes() == live.read_bytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dense", [False, True])
def test_values_that_are_not_finite(
    tmp_path: Path, apply: Apply, old: Tensors, value: float, dense: bool
) -> None:
    head = old["head"] * 2 if dense else old["head"].clone()
    head[3, 5:7] = value
    embed = old["embed"].clone()
    embed[299, 4000] = value
    with pytest.raises(WeightsRejected, match="not finite") as caught:
        apply(delta_file(tmp_path / "delta", old, old | {"head": head, "embed": embed}))
    found = {problem.where: problem.got for problem in caught.value.problems}
    assert found == {"head": "2 NaN or infinite values", "embed": "1 NaN or infinite values"}


def test_largest_finite_value_and_all_integers_pass(
    tmp_path: Path, apply: Apply, old: Tensors
) -> None:
    head = old["head"].clone()
    head[0, 0] = torch.finfo(torch.bfloat16).max
    apply(delta_file(tmp_path / "delta", old, old | {"head": head, "count": -old["count"]}))


def test_another_base_is_noticed_in_any_tensor(
    tmp_path: Path, apply: Apply, old: Tensors, new: Tensors
) -> None:
    delta = delta_file(tmp_path / "delta", old, new)
    for name in ("head", "norm"):  # one that the delta changes, one that it does not
        other = old[name].clone()
        other.view(-1)[0] += 1
        with pytest.raises(WeightsRejected, match="made for another base"):
            apply(delta, write(tmp_path / "other.safetensors", old | {name: other}))


def test_tensors_that_the_model_does_not_have(
    tmp_path: Path, apply: Apply, old: Tensors, new: Tensors
) -> None:
    extra = {"more": torch.zeros(3)}
    delta = delta_file(tmp_path / "delta", old | extra, new | {"more": torch.ones(3)})
    with pytest.raises(WeightsRejected, match="more: got F32"):
        apply(delta)


def test_damage_is_noticed(tmp_path: Path, apply: Apply, old: Tensors, new: Tensors) -> None:
    content = delta_file(tmp_path / "delta", old, new).read_bytes()
    damaged = tmp_path / "damaged"
    for bad in (b"", content[:-1], content[: len(content) // 2], b"x" + content, content + b"x"):
        damaged.write_bytes(bad)
        with pytest.raises(MalformedBody):
            apply(damaged)


def test_full_disk(tmp_path: Path, apply: Apply, old: Tensors, new: Tensors) -> None:
    with pytest.raises(OSError, match="No space left"):
        apply(delta_file(tmp_path / "delta", old, new), out=Path("/dev/full"))

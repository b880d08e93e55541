"""What a manifest accepts, for models that the other tests do not have."""

from __future__ import annotations

import pytest

from rollout_server.checkpoints import Manifest
from shared.weights import TensorSpec


def sent(dtype: str) -> dict[str, TensorSpec]:
    return {"t": TensorSpec("t", dtype, (2,))}


@pytest.mark.parametrize(
    ("served", "accepted"),
    [("BF16", {"BF16", "F32"}), ("F16", {"F16", "F32"}), ("F32", {"F32", "BF16", "F16"})],
)
def test_floats_are_rounded_or_widened_but_not_reinterpreted(
    served: str, accepted: set[str]
) -> None:
    manifest = Manifest.of_checkpoint([TensorSpec("t", "F32", (2,))], dtype=served, tied=False)
    for dtype in ("BF16", "F16", "F32", "F64", "I64", "U8"):
        assert (not manifest.problems(sent(dtype))) == (dtype in accepted)


@pytest.mark.parametrize("kept", ["I64", "U8", "F8_E4M3", "BOOL"])
def test_what_is_no_float_must_come_as_it_is(kept: str) -> None:
    manifest = Manifest.of_checkpoint([TensorSpec("t", kept, (2,))], dtype="BF16", tied=False)
    assert manifest.required["t"].dtype == kept
    for dtype in ("I64", "U8", "F8_E4M3", "BOOL", "F32", "BF16"):
        assert (not manifest.problems(sent(dtype))) == (dtype == kept)

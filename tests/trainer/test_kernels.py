"""Liger's kernels: the same values and gradients on a GPU, one clear error elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import ConfigError
from trainer.kernels import use_liger
from trainer.policy import load_policy, token_logprobs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_without_a_gpu_it_says_what_to_do(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        use_liger(load_policy(str(tiny_model)))


def test_an_architecture_that_liger_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        _apply_liger_kernel_to_instance=None, MODEL_TYPE_TO_APPLY_LIGER_FN={"another": None}
    )
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", fake)
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), config=SimpleNamespace(model_type="tiny")
    )
    with pytest.raises(ConfigError, match="no kernels for tiny"):
        use_liger(model)


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_values_and_gradients_are_the_same(
    tiny_model: Path, dtype: torch.dtype, tolerance: float
) -> None:
    pytest.importorskip("liger_kernel")
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids).bool()
    found = []
    for fused in (False, True):
        model = load_policy(str(tiny_model), dtype=dtype, device="cuda")
        if fused:
            use_liger(model)
        logprobs = token_logprobs(model, ids, mask)
        logprobs.sum().backward()
        gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        found.append((logprobs.detach(), torch.cat(gradients)))
    (plain, slope), (fused_value, fused_slope) = found
    assert (fused_value - plain).abs().max() < tolerance
    assert (fused_slope - slope).norm() / slope.norm() < tolerance

"""Faster layers: the same values and gradients, one clear error where there are none."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.models import build, gradients
from trainer.config import ModelConfig
from trainer.errors import ConfigError
from trainer.kernels import checkpoint_layers, choose_liger, compile_layers, use_liger
from trainer.packing import use_packing
from trainer.policy import load_policy, token_logprobs


@pytest.fixture
def budget_restored() -> Iterator[None]:
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        yield


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


def test_liger_is_left_out_by_itself_where_it_does_not_suit(tiny_model: Path) -> None:
    model = load_policy(str(tiny_model))
    before = type(model.get_decoder().norm).__name__
    choose_liger(model, ModelConfig(path="x"))
    assert type(model.get_decoder().norm).__name__ == before
    with pytest.raises(ConfigError, match="needs a GPU"):
        choose_liger(model, ModelConfig(path="x", liger=True))


@pytest.mark.parametrize(
    ("share", "mlps", "attentions"),
    [(0, 0, 0), (0.25, 1, 0), (0.5, 2, 0), (0.75, 2, 1), (True, 2, 2)],
)
def test_the_first_layers_are_computed_again(share: float, mlps: int, attentions: int) -> None:
    model: Any = build("qwen3").train()
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.ones_like(ids).bool()
    token_logprobs(model, ids, mask).sum().backward()
    wanted = gradients(model)
    checkpoint_layers(model, share)
    passes: Counter[str] = Counter()
    for index, layer in enumerate(model.model.layers):
        for name, part in (("mlp", layer.mlp.up_proj), ("attention", layer.self_attn.q_proj)):
            part.register_forward_hook(lambda *_, key=f"{name} {index}": passes.update([key]))
    token_logprobs(model, ids, mask).sum().backward()
    for name, again in (("mlp", mlps), ("attention", attentions)):
        found = [passes[f"{name} {index}"] for index in range(2)]
        assert found == [2] * again + [1] * (2 - again)
    torch.testing.assert_close(gradients(model), wanted)


def test_a_model_without_known_layers_cannot_be_compiled() -> None:
    model: Any = torch.nn.Linear(2, 2)
    for ask in (compile_layers, lambda x: checkpoint_layers(x, 0.5)):
        with pytest.raises(ConfigError, match="does not say what its layers are"):
            ask(model)


@pytest.mark.usefixtures("budget_restored")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("again", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_compiled_layers_are_one_graph_with_the_same_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, packed: bool, again: float
) -> None:
    """For batches of other sizes too; a backend that only traces is quick, and shows as much."""
    # An engine that ran in this process has turned compilation off.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    model: Any = build("qwen3").train()
    if packed:
        use_packing(model)
    partition = torch._dynamo.lookup_backend("aot_eager_decomp_partition")
    graphs: list[Any] = []
    counts: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return partition(graph, inputs) if again else graph.forward

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda x, **how: compiled(x, backend=count, **how)
    )
    torch._dynamo.reset()
    batches = []
    for rows, width in ((3, 7), (5, 9)):
        ids = torch.randint(0, 53, (rows, width), generator=torch.Generator().manual_seed(rows))
        mask = torch.arange(width) < torch.arange(width - rows, width)[:, None]
        found = token_logprobs(model, ids, mask)
        found.sum().backward()
        batches.append((ids, mask, found.detach(), gradients(model)))
    compile_layers(model, again)
    for ids, mask, expected, wanted in batches:
        found = token_logprobs(model, ids, mask)
        found.sum().backward()
        torch.testing.assert_close(found.detach(), expected)
        torch.testing.assert_close(gradients(model), wanted)
        counts.append(len(graphs))
    # On a CPU the attention to packed sequences parts a layer into several.
    assert packed or again or counts == [1, 1]


@needs_gpu
@pytest.mark.slow
def test_compiled_layers_on_a_gpu(tiny_model: Path) -> None:
    """Packed sequences, of which there are more or fewer each time, are one graph there."""
    batches = []
    for rows, width in ((4, 64), (7, 90)):
        ids = torch.randint(0, 256, (rows, width), generator=torch.Generator().manual_seed(rows))
        mask = torch.arange(width) < torch.arange(width - rows, width)[:, None]
        batches.append((ids.cuda(), mask.cuda()))
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        model = load_policy(str(tiny_model), dtype=torch.bfloat16, device="cuda")
        use_packing(model)
        if compiled:
            compile_layers(model)
        found.append([])
        for ids, mask in batches:
            logprobs = token_logprobs(model, ids, mask)
            logprobs.sum().backward()
            slopes = [x.float().flatten() for x in gradients(model).values()]
            found[-1].append((logprobs.detach(), torch.cat(slopes)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for (plain, slope), (fused, fused_slope) in zip(*found, strict=True):
        assert (fused - plain).abs().max() < 0.05
        assert (fused_slope - slope).norm() / slope.norm() < 0.05

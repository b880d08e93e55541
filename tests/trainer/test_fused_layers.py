"""Fused layers: values and gradients of the model's own, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.trainer.models import SIZES, VOCAB, build, gradients
from tests.triton_interpreter import run_interpreted
from trainer import fusing, learner
from trainer.checkpoint import RunState
from trainer.config import Config, LoraConfig, ModelConfig
from trainer.config_file import parse_config
from trainer.errors import ConfigError
from trainer.fusing import _again, choose_fused_layers, fuse_layers, kept_of_a_token
from trainer.learner import build_learner
from trainer.lora import add_lora
from trainer.packing import use_packing
from trainer.policy import token_logprobs
from trainer.progress import ProgressLog
from trainer.run import _announce
from trainer.tiny_policy import build_tokenizer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
KINDS = ("qwen3", "qwen2", "llama")
LENGTHS = [3, 11, 1, 8]
SHARES = (0.0, 0.25, 0.5, 0.7, 0.9, 1.0)


def make(kind: str, dtype: torch.dtype, device: str, **changes: Any) -> PreTrainedModel:
    """A packed model whose norms and biases differ from 1 and 0."""
    torch.manual_seed(0)
    sizes = SIZES | changes
    model: Any
    match kind:
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**sizes))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    packed: PreTrainedModel = model.to(device, dtype).train()
    use_packing(packed)
    return packed


def step(model: PreTrainedModel, lengths: list[int]) -> list[Tensor]:
    """Log-probabilities of random rows, and the gradients of a weighted sum of them."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(0, VOCAB, mask.shape, generator=generator)
    weights = torch.rand(mask.shape, generator=generator) / mask.sum()
    logprobs = token_logprobs(model, ids.to(model.device), mask.to(model.device))
    (logprobs * weights.to(logprobs)).sum().backward()
    return [logprobs.detach(), *gradients(model).values()]


def off(one: Tensor, other: Tensor) -> float:
    difference: Tensor = (one.double() - other.double()).norm() / other.double().norm()
    return difference.item()


def compare(kind: str, share: float, device: str) -> None:
    expected = step(make(kind, torch.float32, device), LENGTHS)
    model = make(kind, torch.float32, device)
    fuse_layers(model, share)
    found = step(model, LENGTHS)
    for one, other in zip(found, expected, strict=True):
        assert off(one, other) < 2e-5


def kept_bytes(share: float) -> int:
    """What the graph holds for the backward pass, weights left out."""
    model = make("qwen3", torch.float32, "cpu")
    fuse_layers(model, share)
    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logprobs = token_logprobs(model, torch.ones(1, 40).long(), torch.ones(1, 40).bool())
    assert logprobs.requires_grad
    return sum(found.values())


def check_what_is_kept() -> None:
    held = [kept_bytes(share) for share in SHARES]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)
    token, shape = 40 * 4, SIZES
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    of_a_layer = 2 * shape["intermediate_size"] + 2 * queries + 2 * keys + shape["hidden_size"]
    layers = shape["num_hidden_layers"]
    assert held[0] - held[-1] == layers * token * of_a_layer
    estimates = []
    for share in (0.0, 1.0):
        model = make("qwen3", torch.float32, "cpu")
        assert kept_of_a_token(model) is None
        fuse_layers(model, share)
        estimates.append(kept_of_a_token(model) or 0)
    # What one layer computes again is there while it does.
    assert estimates[0] - estimates[1] == (layers - 1) * of_a_layer


def louder(mlp: Any, x: Tensor) -> Any:
    return 1.1 * type(mlp).forward(mlp, x)


def steeper(mlp: Any, x: Tensor) -> Any:
    """The same value, with another gradient."""
    y = type(mlp).forward(mlp, x)
    return y + 0.1 * (y - y.detach())


def check_other_computation_is_refused() -> None:
    for other, what in ((louder, "output"), (steeper, "gradient of input")):
        model: Any = make("llama", torch.float32, "cpu")
        layer = model.model.layers[0]
        layer.mlp.forward = MethodType(other, layer.mlp)
        before = dict(vars(layer))
        said = rf"something else when they are fused: the {what} is off by 0\.0\d+, and by 0 as"
        with pytest.raises(ValueError, match=said):
            fuse_layers(model)
        assert vars(layer) == before
        assert re.search(said, choose_fused_layers(model, ModelConfig(path="x")))


def check_a_run_says_that_its_layers_are_fused() -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory)
        build_tokenizer().save_pretrained(path)
        make("llama", torch.float32, "cpu", vocab_size=300).save_pretrained(path)
        said = announced(parse_config({"model": {"path": directory, "device": "cpu"}}), path)
    assert said.count("decoder layers are fused\n") == 1


def announced(config: Config, directory: Path) -> str:
    """What a run with this configuration says at its start."""
    out = io.StringIO()
    with ProgressLog(directory, 1, console=Console(file=out, soft_wrap=True)) as log:
        _announce(log, config, build_learner(config, None), RunState())
    return out.getvalue()


def check_a_second_backward_pass_is_refused() -> None:
    """Gate and up are written over in the first one."""
    model = make("qwen3", torch.float32, "cpu")
    fuse_layers(model)
    loss = token_logprobs(model, torch.ones(1, 5).long(), torch.ones(1, 5).bool()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def check_what_is_not_packed_runs_as_before() -> None:
    model = make("qwen3", torch.float32, "cpu")
    ids = torch.arange(12).reshape(2, 6)
    expected = model(input_ids=ids).logits
    fuse_layers(model)
    assert model(input_ids=ids).logits.equal(expected)


def test_in_tritons_interpreter() -> None:
    run_interpreted("-m", "tests.trainer.test_fused_layers")


@needs_gpu
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_on_a_gpu(kind: str, share: float) -> None:
    compare(kind, share, "cuda")


@needs_gpu
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_as_near_to_float32_as_the_models_own_layers(
    kind: str, share: float
) -> None:
    sizes = {
        "hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 4, "head_dim": 64,
        "initializer_range": 0.1,
    }  # fmt: skip
    lengths = [300, 1, 77, 129]
    exact = step(make(kind, torch.float32, "cuda", **sizes), lengths)
    plain = step(make(kind, torch.bfloat16, "cuda", **sizes), lengths)
    model = make(kind, torch.bfloat16, "cuda", **sizes)
    fuse_layers(model, share)
    fused = step(model, lengths)
    for one, other, best in zip(fused, plain, exact, strict=True):
        assert off(one, best) < 2 * off(other, best) + 0.005


@pytest.mark.parametrize(
    ("share", "again"),
    [(0, [0, 0]), (0.25, [1, 0]), (0.5, [1, 1]), (0.7, [2, 1]), (0.8, [2, 2]), (1, [3, 3])],
)
def test_the_cheapest_of_the_first_layers_is_computed_again_first(
    share: float, again: list[int]
) -> None:
    assert _again(share, 2, 4, 3) == again


def unpacked() -> PreTrainedModel:
    return build("qwen3", torch.float32)


def packed(kind: str = "qwen3") -> Any:
    return make(kind, torch.float32, "cpu")


def with_adapter() -> Any:
    model = packed()
    add_lora(model, LoraConfig(rank=2))
    return model


def watched() -> Any:
    model = packed()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    return model


def partly_frozen() -> Any:
    model = packed()
    model.model.layers[1].mlp.up_proj.requires_grad_(False)
    return model


def biased() -> PreTrainedModel:
    return make("llama", torch.float32, "cpu", mlp_bias=True)


def other_activation() -> PreTrainedModel:
    return make("llama", torch.float32, "cpu", hidden_act="gelu")


def no_activation() -> Any:
    """As where Liger has been chosen for another model."""
    model = packed()
    del model.model.layers[1].mlp.act_fn
    return model


def other_layer() -> PreTrainedModel:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None))
    use_packing(model)
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (unpacked, "are not packed"),
        (with_adapter, r"not plain ones: peft\.tuners\.lora"),
        (watched, "have hooks"),
        (partly_frozen, "some are frozen"),
        (biased, "its biases"),
        (other_activation, "an activation that is not known"),
        (no_activation, "an activation that is not known"),
        (other_layer, "MistralDecoderLayer are not known"),
    ],
)
def test_layers_that_are_not_known_are_refused_and_left_as_they_were(
    model: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = model()
    with pytest.raises(ValueError, match=why):
        fuse_layers(built)
    assert all("forward" not in vars(layer) for layer in built.model.layers)

    # Where they may stay as they are that is the reason given, elsewhere it is an error.
    monkeypatch.setattr(fusing, "_refuse_without_kernels", lambda _: None)
    assert re.search(why, choose_fused_layers(built, ModelConfig(path="x")))
    with pytest.raises(ConfigError, match=rf"model\.fused_layers: .*{why}"):
        choose_fused_layers(built, ModelConfig(path="x", fused_layers=True))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "the model is on cpu, not on a GPU"),
        ({"compile": True}, "model.compile is on"),
        ({"fused_layers": False}, "model.fused_layers is false"),
    ],
)
def test_a_run_says_once_why_its_layers_are_not_fused(
    make_config: Callable[..., Config],
    untrained_model: Path,
    tmp_path: Path,
    options: dict[str, Any],
    why: str,
) -> None:
    known: dict[str, Any] = {"path": str(untrained_model), "device": "cpu"}
    said = announced(make_config(model=known | options), tmp_path)
    assert said.count(f"decoder layers are not fused: {why}\n") == 1
    if options.get("fused_layers") is not False:
        with pytest.raises(ConfigError, match=re.escape(why)):
            build_learner(make_config(model=known | options | {"fused_layers": True}), None)


def test_a_reference_that_is_not_fused_is_told_apart(
    make_config: Callable[..., Config], untrained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter(["", "its norms differ"])
    monkeypatch.setattr(learner, "choose_fused_layers", lambda *_: next(reasons))
    config = make_config(
        model={"path": str(untrained_model), "device": "cpu"}, objective={"beta": 0.1}
    )
    assert build_learner(config, None).unfused == "the reference: its norms differ"


def test_a_gpu_without_triton_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        fusing._refuse_without_kernels(torch.device("cuda"))


@needs_gpu
def test_auto_fuses_on_a_gpu() -> None:
    model = make("qwen3", torch.bfloat16, "cuda", head_dim=64)  # flash attention wants eights
    assert choose_fused_layers(model, ModelConfig(path="x")) == ""


if __name__ == "__main__":
    from trainer import fused_layers, layer_kernels, norm_kernels

    fusing._PROBE_LENGTHS = (5, 1, 9)
    pytest.MonkeyPatch().setattr(fusing, "_refuse_without_kernels", lambda _: None)
    # Several programs and blocks even for what is tiny.
    norm_kernels._PROGRAMS, norm_kernels._ELEMENTS, layer_kernels._ELEMENTS = 3, 256, 128
    compare("qwen3", 0.0, "cpu")
    for each in KINDS:
        for part in SHARES[1::2]:
            compare(each, part, "cpu")
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU in half precision
        patch.setattr(fused_layers, "wants_copies", lambda _: True)
        compare("qwen3", 0.0, "cpu")
    check_what_is_kept()
    check_other_computation_is_refused()
    check_a_run_says_that_its_layers_are_fused()
    check_a_second_backward_pass_is_refused()
    check_what_is_not_packed_runs_as_before()

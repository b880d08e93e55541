"""Live weights against a checkpoint, with vLLM's own CPU kernels but without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from rollout_server.weight_check import CheckReport, Repacking, check_weights

WIDTH = 96
Tensors = dict[str, Tensor]
Built = TypeVar("Built")


class Layer(nn.Module):
    """A linear layer as vLLM has it: its matrix is there until it is repacked."""

    def __init__(self, rows: int, *, bias: bool = False, method: Any) -> None:
        super().__init__()
        self.quant_method = method
        self.fill(torch.zeros(rows, WIDTH).bfloat16())
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows).bfloat16(), requires_grad=False)

    def fill(self, matrix: Tensor) -> None:
        self.weight = nn.Parameter(matrix.clone(), requires_grad=False)


class Model(nn.Module):
    """Fused, biased, padded and plain parameters."""

    packed_modules_mapping = {"qkv": ["q", "k", "v"]}  # noqa: RUF012 - as vLLM's models have it

    def __init__(self, method: Callable[[], Any], table: Callable[[], Any]) -> None:
        super().__init__()
        self.embed = Layer(64, method=table())  # four rows of them are padding
        self.qkv = Layer(80, bias=True, method=method())
        self.norm = nn.LayerNorm(33).bfloat16().requires_grad_(False)

    def load(self, tensors: Tensors) -> None:
        """As vLLM loads: fill plain matrices, then let them be repacked."""
        rows = {"weight": [], "bias": []}  # type: dict[str, list[Tensor]]
        for leaf, parts in rows.items():
            parts.extend(tensors[f"{part}.{leaf}"] for part in self.packed_modules_mapping["qkv"])
        self.qkv.fill(torch.cat(rows["weight"]))
        self.qkv.bias.copy_(torch.cat(rows["bias"]))
        self.embed.fill(nn.functional.pad(tensors["embed.weight"], (0, 0, 0, 4)))
        self.norm.weight.copy_(tensors["norm.weight"])
        self.norm.bias.copy_(tensors["norm.bias"])
        for layer in (self.embed, self.qkv):
            layer.quant_method.process_weights_after_loading(layer)


class Shard(Model):
    """The second half of every matrix, as one of two workers holds it."""

    def __init__(self, method: Callable[[], Any], table: Callable[[], Any]) -> None:
        super().__init__(method, table)
        self.down = Layer(48, method=method())

    def load_half(self, repacking: Repacking, tensors: Tensors) -> None:
        """Slice, copy and pad, as vLLM's loaders do, and repack."""
        self.qkv.fill(torch.zeros(40, WIDTH).bfloat16())
        self.qkv.bias.data = torch.zeros(40).bfloat16()
        self.embed.fill(torch.full((32, WIDTH), 7.0).bfloat16())
        self.down.fill(torch.zeros(48, WIDTH // 2).bfloat16())
        with repacking.recorded(tensors.items()) as handed_on:
            for name, tensor in handed_on:
                self._slice(name, tensor)
        for layer in (self.embed, self.qkv, self.down):
            layer.quant_method.process_weights_after_loading(layer)

    def _slice(self, name: str, tensor: Tensor) -> None:
        part, _, leaf = name.partition(".")
        if part in "qkv":
            rows = len(tensor) // 2
            start = {"q": 0, "k": 24, "v": 32}[part]
            getattr(self.qkv, leaf).data.narrow(0, start, rows).copy_(tensor.narrow(0, rows, rows))
        elif part == "embed":
            self.embed.weight[:28].data.copy_(tensor.narrow(0, 32, 28))
            self.embed.weight[28:].data.fill_(0)
        elif part == "down":
            self.down.weight.data.copy_(tensor.narrow(1, WIDTH // 2, WIDTH // 2))
        else:
            getattr(self.norm, leaf).data.copy_(tensor)


@pytest.fixture
def model() -> Model:
    return _built(Model)


@pytest.fixture
def shard() -> Shard:
    return _built(Shard)


def _built(kind: Callable[..., Built]) -> Built:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return kind(UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def checkpoint(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (60, WIDTH),
        "q.weight": (48, WIDTH), "k.weight": (16, WIDTH), "v.weight": (16, WIDTH),
        "q.bias": (48,), "k.bias": (16,), "v.bias": (16,),
        "norm.weight": (33,), "norm.bias": (33,),
    }  # fmt: skip
    return {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}


def loaded(model: Model, sent: Tensors, arrived: Tensors | None = None) -> CheckReport:
    """Load what arrived, and compare with what was sent."""
    repacking = Repacking(model, sent.get)
    with repacking.watched():
        model.load(arrived or sent)
    return check_weights(model, repacking)


def half_loaded(shard: Shard, sent: Tensors, arrived: Tensors | None = None) -> CheckReport:
    """Load one worker's half of what arrived, and compare with what was sent."""
    repacking = Repacking(shard, sent.get, sharded=True)
    with repacking.watched():
        shard.load_half(repacking, arrived or sent)
    return check_weights(shard, repacking)


def both_halves(seed: int) -> Tensors:
    """A checkpoint whose ``down`` is split by columns."""
    matrix = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return checkpoint(seed) | {"down.weight": matrix}


def flipped(tensor: Tensor, element: int, bit: int = 0) -> Tensor:
    """The tensor with one bit of one element changed."""
    changed = tensor.clone()
    changed.view(-1).view(torch.int16)[element] ^= 1 << bit
    return changed


def test_a_load_that_worked(model: Model) -> None:
    for seed in range(3):
        report = loaded(model, checkpoint(seed))
        assert report.different == report.unknown == []
        assert len(report.checked) == 5
    assert model.qkv.weight.numel() == 0, "nothing was repacked, so the test proves nothing"


def test_the_lowest_bit_of_any_repacked_value_is_noticed(model: Model) -> None:
    sent = checkpoint(0)
    total = sent["k.weight"].numel()
    for element in (0, 1, total - 1, *torch.randint(total, (40,)).tolist()):
        arrived = sent | {"k.weight": flipped(sent["k.weight"], element)}
        assert loaded(model, sent, arrived).different == ["qkv.weight"], element
    assert loaded(model, sent).different == []


@pytest.mark.parametrize("name", ["norm.weight", "v.bias", "embed.weight"])
def test_the_lowest_bit_of_other_values_is_noticed(model: Model, name: str) -> None:
    sent = checkpoint(0)
    for element in (0, sent[name].numel() - 1):
        arrived = sent | {name: flipped(sent[name], element)}
        assert loaded(model, sent, arrived).different == [name.replace("v.", "qkv.")]


def test_the_sign_of_a_zero_is_a_bit_too(model: Model) -> None:
    sent = checkpoint(0)
    sent["q.weight"][3, 5] = sent["norm.weight"][7] = 0.0
    assert loaded(model, sent).different == []
    for name, element in (("q.weight", 3 * WIDTH + 5), ("norm.weight", 7)):
        arrived = sent | {name: flipped(sent[name], element, bit=15)}
        assert len(loaded(model, sent, arrived).different) == 1


def test_values_that_kernels_take_for_zero_raise_no_alarm(model: Model) -> None:
    sent = checkpoint(0)
    sent["q.weight"][:] = 1e-39
    sent["k.weight"][:] = -0.0
    sent["v.weight"][:] = torch.finfo(torch.bfloat16).max
    assert loaded(model, sent).different == []


def test_a_layer_that_was_not_repacked(model: Model) -> None:
    old, new = checkpoint(0), checkpoint(1)
    loaded(model, old)
    repacking = Repacking(model, new.get)
    with repacking.watched():
        kernel, was = model.qkv.cpu_linear, model.qkv.weight
        model.load(new)
        model.qkv.cpu_linear, model.qkv.weight = kernel, was
    assert check_weights(model, repacking).different == ["qkv.weight"]


def test_a_kernel_built_before_the_load_counts_for_nothing(model: Model) -> None:
    sent = checkpoint(0)
    model.load(sent)
    report = check_weights(model, Repacking(model, sent.get))
    assert report.different == ["embed.weight", "qkv.weight"]


@pytest.mark.parametrize("fault", ["rows swapped", "columns swapped", "shifted", "cut short"])
def test_a_repacking_that_mixes_things_up(model: Model, fault: str) -> None:
    sent = checkpoint(0)
    plain = model.qkv.quant_method.process_weights_after_loading

    def mixing(layer: Any) -> None:
        matrix = layer.weight.detach().clone()
        match fault:
            case "rows swapped":
                matrix[[10, 11]] = matrix[[11, 10]]
            case "columns swapped":
                matrix[:, [0, 1]] = matrix[:, [1, 0]]
            case "shifted":
                matrix = matrix.roll(1)
            case "cut short":
                matrix[:, -1] = 0
        stand_in = nn.Module()
        stand_in.weight = nn.Parameter(matrix, requires_grad=False)
        plain(stand_in)
        layer.cpu_linear, layer.weight = stand_in.cpu_linear, stand_in.weight

    model.qkv.quant_method.process_weights_after_loading = mixing
    assert loaded(model, sent).different == ["qkv.weight"]


def test_the_methods_are_themselves_again(model: Model) -> None:
    sent = checkpoint(0)
    methods = [model.qkv.quant_method, model.embed.quant_method]
    loaded(model, sent)
    with pytest.raises(KeyError), Repacking(model, sent.get).watched():
        model.load({})
    assert all("process_weights_after_loading" not in vars(method) for method in methods)


def test_the_samplers_random_numbers_are_left_alone(model: Model) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(4)
    torch.manual_seed(5)
    loaded(model, checkpoint(0))
    assert torch.equal(torch.rand(4), wanted)


def test_a_parameter_that_no_checkpoint_tensor_belongs_to(model: Model) -> None:
    report = check_weights(model, Repacking(model, lambda _: None))
    assert len(report.unknown) == 5


def test_every_parameter_of_a_shard_is_known(shard: Shard) -> None:
    for seed in range(3):
        report = half_loaded(shard, both_halves(seed))
        assert report.different == report.unknown == []
        assert len(report.checked) == 6
    assert shard.down.weight.numel() == 0, "nothing was repacked, so the test proves nothing"


@pytest.mark.parametrize(
    ("name", "first", "parameter"),
    [
        ("embed.weight", 32 * WIDTH, "embed.weight"),
        ("q.weight", 24 * WIDTH, "qkv.weight"),
        ("k.weight", 8 * WIDTH, "qkv.weight"),
        ("v.weight", 8 * WIDTH, "qkv.weight"),
        ("k.bias", 8, "qkv.bias"),
        ("down.weight", WIDTH // 2, "down.weight"),
        ("norm.bias", 0, "norm.bias"),
    ],
)
def test_the_first_and_last_bit_of_a_shard(
    shard: Shard, name: str, first: int, parameter: str
) -> None:
    sent = both_halves(0)
    for element in (first, sent[name].numel() - 1):
        arrived = sent | {name: flipped(sent[name], element)}
        assert half_loaded(shard, sent, arrived).different == [parameter]
    if first:  # what lies before it belongs to the other worker
        arrived = sent | {name: flipped(sent[name], first - 1)}
        assert half_loaded(shard, sent, arrived).different == []


def test_padding_of_a_shard_that_is_not_zero(shard: Shard) -> None:
    sent = both_halves(0)
    repacking = Repacking(shard, sent.get, sharded=True)
    with repacking.watched():
        shard.load_half(repacking, sent)
    shard.embed.weight[-1, -1] = 1.0
    assert check_weights(shard, repacking).different == ["embed.weight"]


def test_a_shard_of_which_a_part_was_not_written(shard: Shard) -> None:
    sent = both_halves(0)
    del sent["v.bias"]
    assert half_loaded(shard, sent).unknown == ["qkv.bias"]


def test_a_part_of_a_shard_that_came_from_elsewhere(shard: Shard) -> None:
    sent = both_halves(0)
    repacking = Repacking(shard, sent.get, sharded=True)
    with repacking.watched(), repacking.recorded(sent.items()) as handed_on:
        for name, tensor in handed_on:
            if name == "norm.bias":
                shard.norm.bias.data.copy_(tensor * 2)
            elif name == "norm.weight":
                shard.norm.weight.data.copy_(tensor)
    report = check_weights(shard, repacking)
    assert "norm.bias" in report.unknown
    assert "norm.weight" in report.checked

"""Recorded loads, with vLLM's own layers and loaders but without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout_server.load_plan import LoadPlan
from tests.triton_interpreter import run_interpreted

WIDTH = 32
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]
Tensors = dict[str, Tensor]


class Model(nn.Module):
    """What a loader can do to a tensor: stack, pad, slice rows, slice columns, pass it on."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.table = _parameter(64 // ranks, WIDTH)
        self.qkv = _parameter(96 // ranks, WIDTH)
        self.down = _parameter(WIDTH, 48 // ranks)
        self.norm = _parameter(33)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "table":
                shard = tensor.tensor_split([32])[self.rank] if self.ranks > 1 else tensor
                self.table[: len(shard)].data.copy_(shard)
                self.table[len(shard) :].data.fill_(0)
            elif name in "qkv":
                rows = 32 // self.ranks
                target = self.qkv.data.narrow(0, "qkv".index(name) * rows, rows)
                target.copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "down":
                width = 48 // self.ranks
                self.down.data.copy_(tensor.narrow(1, self.rank * width, width))
            else:
                self.norm.data.copy_(tensor)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 9.0).bfloat16(), requires_grad=False)


def checkpoint(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "table": (60, WIDTH), "q": (32, WIDTH), "k": (32, WIDTH), "v": (32, WIDTH),
        "down": (WIDTH, 48), "norm": (33,),
    }  # fmt: skip
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def loaded(tensors: Tensors, rank: int, ranks: int) -> Tensors:
    """What the model's own loader makes of them."""
    model = Model(rank, ranks)
    model.load_weights(tensors.items())
    return dict(model.named_parameters())


def flat(tensors: Tensors) -> Tensors:
    """The same values, one after the other in one storage."""
    buffer = torch.cat([tensor.view(-1) for tensor in tensors.values()])
    pieces = buffer.split([tensor.numel() for tensor in tensors.values()])
    named = zip(tensors.items(), pieces, strict=True)
    return {name: piece.view(tensor.shape) for (name, tensor), piece in named}


@pytest.fixture(params=[(0, 1), (0, 2), (1, 2)], ids=["whole", "rank 0", "rank 1"])
def shard(request: Any) -> tuple[int, int]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [dict, flat])
def test_the_same_load_again(
    shard: tuple[int, int],
    dtype: torch.dtype,
    layout: Callable[[Tensors], Tensors],
    device: str,
) -> None:
    model = Model(*shard).to(device)

    def there(seed: int) -> Tensors:
        return layout({name: t.to(device) for name, t in checkpoint(seed, dtype).items()})

    plan = LoadPlan.recorded(model, there(0))
    for seed in (0, 1, 2):
        tensors = there(seed)
        plan.apply(tensors)
        expected = loaded(checkpoint(seed, dtype), *shard)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.cpu(), expected[name]), name
        assert plan.differing(tensors) == []
    changed = tensors | {"k": tensors["k"] + 1}
    assert plan.differing(changed) == ["k"]


def test_new_values_in_the_same_storage(shard: tuple[int, int]) -> None:
    model, tensors = Model(*shard), checkpoint(0)
    plan = LoadPlan.recorded(model, tensors)
    plan.apply(tensors)
    tensors["q"].add_(1)
    tensors["norm"].mul_(2)
    assert plan.differing(tensors) == ["norm", "q"]
    plan.apply(tensors)
    assert plan.differing(tensors) == []
    assert torch.equal(model.norm, tensors["norm"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_live_bit_is_noticed(shard: tuple[int, int], dtype: torch.dtype) -> None:
    model, tensors = Model(*shard), checkpoint(0, dtype)
    plan = LoadPlan.recorded(model, tensors)
    rows = 32 // model.ranks
    for parameter, element, name in [
        (model.table, 0, "table"),
        (model.qkv, 0, "q"),
        (model.qkv, rows * WIDTH, "k"),
        (model.qkv, 3 * rows * WIDTH - 1, "v"),
        (model.down, model.down.numel() - 1, "down"),
        (model.norm, 32, "norm"),
    ]:
        bits = parameter.data.view(-1).view(torch.int16)
        bits[element] ^= 1
        assert plan.differing(tensors) == [name]
        bits[element] ^= 1
    assert plan.differing(tensors) == []


def test_the_sign_of_a_zero_is_a_bit_too() -> None:
    tensors = checkpoint(0)
    tensors["norm"][3] = 0.0
    plan = LoadPlan.recorded(Model(), tensors)
    tensors["norm"][3] = -0.0
    assert plan.differing(tensors) == ["norm"]


def test_a_parameter_that_no_tensor_belongs_to() -> None:
    tensors = checkpoint(0)
    del tensors["k"]
    with pytest.raises(ValueError, match="parameter qkv does not consist"):
        LoadPlan.recorded(Model(), tensors)


def test_a_parameter_that_is_computed_from_a_tensor() -> None:
    class Shifting(Model):
        def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights(tensors)
            self.norm.data.add_(1)

    with pytest.raises(ValueError, match="parameter norm does not consist"):
        LoadPlan.recorded(Shifting(), checkpoint(0))


def test_other_tensors_than_were_recorded() -> None:
    model, tensors = Model(), checkpoint(0)
    plan = LoadPlan.recorded(model, tensors)
    before = [parameter.clone() for parameter in model.parameters()]
    wrong = [
        {name: tensor for name, tensor in tensors.items() if name != "q"},
        tensors | {"extra": torch.zeros(1)},
        tensors | {"q": tensors["q"].float()},
        tensors | {"q": tensors["q"][1:]},
        tensors | {"q": tensors["q"].t()},
    ]
    for other in wrong:
        with pytest.raises(ValueError, match="tensor"):
            plan.apply({name: tensor + 1 for name, tensor in other.items()})
    assert all(map(torch.equal, model.parameters(), before))


def test_repacked_layers_are_refused() -> None:
    model = Model()
    packed: Any = nn.Module()
    packed.cpu_linear = object()
    model.packed = packed
    with pytest.raises(ValueError, match="packed are not plain"):
        LoadPlan.recorded(model, checkpoint(0))


def test_sources_can_be_let_go() -> None:
    model, tensors = Model(), checkpoint(0)
    plan = LoadPlan.recorded(model, tensors)
    plan.apply(tensors)
    plan.forget_sources()
    plan.apply(checkpoint(1))
    assert torch.equal(model.norm, checkpoint(1)["norm"])


def test_sources_that_are_let_go_during_a_load() -> None:
    """An earlier channel's thread may end just then."""
    plan: LoadPlan

    class Name(str):
        def __eq__(self, other: object) -> bool:
            plan.forget_sources()
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    model, tensors = Model(), checkpoint(0)
    plan = LoadPlan.recorded(model, tensors)
    plan.apply(tensors)
    model.norm.data.zero_()
    plan.apply({Name(name): tensor for name, tensor in tensors.items()})
    assert torch.equal(model.norm, tensors["norm"])


INTERPRETED = """
import torch
from rollout_server.region_kernels import Batch, suits, warm_up
warm_up(torch.device("cpu"))
sizes = [8, 16, 4096, 131072 - 8, 131072, 131072 + 8, 300_000]
values = torch.randn(sum(sizes)).bfloat16()
sources = list(values.split(sizes))
pairs = [(torch.zeros_like(source), source) for source in sources]
assert all(suits(*pair) for pair in pairs)
assert not suits(torch.zeros(8), torch.zeros(8).bfloat16())
assert not suits(torch.zeros(3, 4).t(), torch.zeros(4, 3))
assert not suits(torch.zeros(9)[1:], torch.zeros(8))
batch = Batch(pairs)
assert batch.differs().tolist() == [1] * len(pairs)
batch.copy()
assert all(torch.equal(*pair) for pair in pairs)
assert batch.differs().tolist() == [0] * len(pairs)
for index, (target, _) in enumerate(pairs):
    for element in (0, target.numel() - 1):
        target.view(torch.int16)[element] ^= 1
        assert batch.differs().tolist() == [int(i == index) for i in range(len(pairs))]
        target.view(torch.int16)[element] ^= 1
"""


def test_kernels_copy_and_compare() -> None:
    run_interpreted("-c", INTERPRETED)

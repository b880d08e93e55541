"""Packed, padded and single sequences say the same, in value and in gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.trainer.models import SIZES, VOCAB, build, gradients, plain_logprobs
from trainer.packing import is_packed, pack, use_packing
from trainer.policy import token_logprobs

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def rows(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random tokens of these lengths, padded with a token that also occurs in them."""
    generator = torch.Generator().manual_seed(sum(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.randint(0, VOCAB, mask.shape, generator=generator).where(mask, 2), mask


def packed_model(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = build(kind, dtype)
    use_packing(model)
    return model


def weighted(logprobs: Tensor, weights: Tensor) -> Tensor:
    return (logprobs * weights.to(logprobs)).sum()


def compare(kind: str, lengths: list[int]) -> None:
    ids, mask = rows(lengths)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) / mask.sum()
    found = []
    for model in (packed_model(kind), build(kind, torch.float32)):
        logprobs = token_logprobs(model, ids, mask, chunk_tokens=7)
        weighted(logprobs, weights).backward()
        found.append((logprobs.detach(), gradients(model)))
    single = build(kind, torch.float32)
    alone = torch.zeros(ids.shape)
    for row, length in enumerate(lengths):
        if length > 1:
            scores = plain_logprobs(single, ids[row, :length])
            weighted(scores, weights[row, 1:length]).backward()
            alone[row, 1:length] = scores.detach()
    expected = gradients(single)
    for logprobs, gradient in found:
        torch.testing.assert_close(logprobs, alone, **TOLERANCE)
        for name, value in expected.items():
            torch.testing.assert_close(gradient[name], value, **TOLERANCE)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_packed_equals_padded_equals_single(kind: str) -> None:
    compare(kind, [9, 2, 31, 1, 14])


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6).filter(lambda x: max(x) > 1))
def test_packed_equals_padded_equals_single_at_any_lengths(lengths: list[int]) -> None:
    compare("qwen3", lengths)


def test_neighbours_change_nothing() -> None:
    """Not a bit: what a token sees is its own sequence."""
    model = packed_model("qwen3", torch.float64)
    ids, mask = rows([6, 5, 7])
    other = ids.clone()
    other[0], other[2] = other[0].flip(0), other[2].roll(1)
    before, after = (token_logprobs(model, x, mask)[1] for x in (ids, other))
    assert before.equal(after)


def test_positions_and_boundaries() -> None:
    ids, mask = rows([3, 1, 2])
    packed = pack(ids, mask)
    assert packed.input_ids.tolist() == [[*ids[0].tolist(), ids[1, 0], *ids[2, :2].tolist()]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packed.boundaries.tolist() == [0, 3, 4, 6]
    assert packed.boundaries.dtype == torch.int32
    assert packed.longest == 3


def test_a_packed_model_still_answers_padded_rows() -> None:
    """As ``transformers`` calls it: masks on the right lie in nobody's past."""
    ids, mask = rows([6, 3])
    own, ours = build("llama"), packed_model("llama", torch.float64)
    expected = own(input_ids=ids, attention_mask=mask).logits[mask]
    torch.testing.assert_close(ours(input_ids=ids, attention_mask=mask).logits[mask], expected)


def recurrent() -> PreTrainedModel:
    sizes: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2,
                             "linear_key_head_dim": 4, "linear_value_head_dim": 4,
                             "num_experts": 0, "mlp_only_layers": [0, 1]}  # fmt: skip
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **sizes))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: build("gemma2"), "layers of sliding_attention"),
        (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)), "sliding_window"),
        (recurrent, "layers of linear_attention"),
    ],
    ids=["gemma2", "mistral", "linear attention"],
)
def test_what_cannot_be_packed_is_refused_and_left_as_it_was(model: Any, why: str) -> None:
    built = model()
    before = built.config._attn_implementation
    with pytest.raises(ValueError, match=f"cannot be packed: .*{why}"):
        use_packing(built)
    assert built.config._attn_implementation == before
    assert not is_packed(built)


def test_a_decoder_that_mixes_sequences_is_caught() -> None:
    model: Any = build("llama")
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *args: args[2].cumsum(1))
    with pytest.raises(ValueError, match="packed sequences differ from single ones"):
        use_packing(model)

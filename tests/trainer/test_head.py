"""The chunked head against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.trainer.models import build
from tests.triton_interpreter import run_interpreted
from trainer import head as head_module
from trainer.head import Head, head_of, logprobs_of

TOKENS, HIDDEN, VOCAB = 11, 6, 23
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def inputs(dtype: torch.dtype, *, bias: bool, cap: float | None) -> tuple[Head, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    weight = draw(VOCAB, HIDDEN).requires_grad_()
    head = Head(weight, draw(VOCAB).requires_grad_() if bias else None, cap, dtype)
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return head, draw(TOKENS, HIDDEN).requires_grad_(), tokens


def plain(head: Head, hidden: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    logits = (head.logits(hidden) / temperature).log_softmax(-1)
    return logits[torch.arange(len(tokens)), tokens]


def leaves(head: Head, hidden: Tensor) -> list[Tensor]:
    return [x for x in (hidden, head.weight, head.bias) if x is not None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, TOKENS, None])
def test_values_and_gradients_are_those_of_plain_autograd(
    dtype: torch.dtype, cap: float | None, bias: bool, temperature: float, chunk: int | None
) -> None:
    head, hidden, tokens = inputs(dtype, bias=bias, cap=cap)
    gradient = torch.linspace(-2, 1, TOKENS, dtype=dtype)
    expected = plain(head, hidden, tokens, temperature)
    wanted = torch.autograd.grad(expected, leaves(head, hidden), gradient)
    found = logprobs_of(head, hidden, tokens, temperature=temperature, chunk_tokens=chunk)
    got = torch.autograd.grad(found, leaves(head, hidden), gradient)
    tolerance: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(found, expected, **tolerance)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


@given(scale=st.floats(0, 300), chunk=st.integers(1, TOKENS))
def test_logits_of_any_size_give_finite_numbers(scale: float, chunk: int) -> None:
    head, hidden, tokens = inputs(torch.float32, bias=False, cap=None)
    found = logprobs_of(head, hidden * scale, tokens, chunk_tokens=chunk)
    found.sum().backward()
    assert head.weight.grad is not None
    for numbers in (found, head.weight.grad):
        assert numbers.isfinite().all()
    assert (found <= 1e-4).all()


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    head, hidden, tokens = inputs(torch.float64, bias=True, cap=None)
    frozen = Head(head.weight.detach(), head.bias, None, torch.float64)
    logprobs_of(frozen, hidden, tokens).sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    with torch.no_grad():
        assert not logprobs_of(head, hidden, tokens).requires_grad


def test_no_token_at_all() -> None:
    head, hidden, tokens = inputs(torch.float64, bias=True, cap=None)
    found = logprobs_of(head, hidden[:0], tokens[:0])
    found.sum().backward()
    assert found.shape == (0,)
    assert head.weight.grad is not None
    assert (head.weight.grad == 0).all()


def test_a_float32_head_over_bfloat16_weights_is_nearer_to_the_truth() -> None:
    """And its gradient is summed in float32 before it is rounded."""
    exact_head, exact_hidden, tokens = inputs(torch.float64, bias=False, cap=None)
    weight = exact_head.weight.detach().bfloat16().requires_grad_()
    hidden = exact_hidden.detach().bfloat16()
    truth = Head(weight.detach().double().requires_grad_(), None, None, torch.float64)
    expected = plain(truth, hidden.double(), tokens, 1.0)
    (wanted,) = torch.autograd.grad(expected.sum(), truth.weight)
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        found = logprobs_of(Head(weight, None, None, dtype), hidden, tokens)
        assert found.dtype == torch.float32
        (got,) = torch.autograd.grad(found.sum(), weight)
        assert got.dtype == torch.bfloat16
        errors[dtype] = (found - expected).abs().max().item(), (got - wanted).abs().max().item()
    assert errors[torch.float32][0] < 1e-5 < errors[torch.bfloat16][0]
    assert errors[torch.float32][1] <= errors[torch.bfloat16][1]


def test_a_token_of_probability_near_one_keeps_its_gradient_in_bfloat16() -> None:
    """1 - p is 0.1%, which is less than bfloat16 can tell from 1."""
    weight = torch.zeros(2, 4, dtype=torch.bfloat16)
    weight[0, 0] = 7.0
    hidden = torch.ones(1, 4, dtype=torch.bfloat16).requires_grad_()
    token = torch.tensor([0])
    found = logprobs_of(Head(weight, None, None, torch.bfloat16), hidden, token)
    (got,) = torch.autograd.grad(found.sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    expected = plain(Head(weight.double(), None, None, torch.float64), exact, token, 1.0)
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(got.double(), wanted, rtol=0.01, atol=0)


_INTERPRETED = """
import torch
from trainer import head_kernels
head_kernels._BLOCK = 64
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for scale in (1.0, 1 / 0.6):
        logits, tokens = (torch.randn(5, 203) * 5).to(dtype), torch.randint(0, 203, (5,))
        chosen, normaliser = head_kernels.normalise(logits, tokens, scale)
        z = logits.float() * scale
        torch.testing.assert_close(normaliser, z.logsumexp(1))
        torch.testing.assert_close(chosen, z.gather(1, tokens[:, None])[:, 0])
        expected = torch.nn.functional.one_hot(tokens, 203) - z.softmax(1)
        slopes = head_kernels.to_slopes(logits, tokens, normaliser, scale)
        assert slopes.data_ptr() == logits.data_ptr()
        torch.testing.assert_close(slopes, expected.to(dtype), rtol=0.01, atol=1e-6)
"""


def test_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted("-c", _INTERPRETED)


@needs_gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 0.04), (torch.float16, 0.005)],
)
def test_the_kernels_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, bias: bool
) -> None:
    """Against the plain path in float64, from the same rounded inputs."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).cuda().requires_grad_()

    weight, hidden = draw(5003, 64), draw(70, 64)
    head = Head(weight, draw(5003) if bias else None, None, dtype)
    tokens = torch.randint(0, 5003, (70,), generator=generator).cuda()
    exact = Head(
        weight.detach().double().requires_grad_(),
        None if head.bias is None else head.bias.detach().double().requires_grad_(),
        None,
        torch.float64,
    )
    exact_hidden = hidden.detach().double().requires_grad_()
    expected = plain(exact, exact_hidden, tokens, 0.7)
    wanted = torch.autograd.grad(expected.sum(), leaves(exact, exact_hidden))
    errors = {}
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(head_module, "_has_kernels", lambda *_: False)
        found = logprobs_of(head, hidden, tokens, temperature=0.7, chunk_tokens=32)
        got = torch.autograd.grad(found.sum(), leaves(head, hidden))
        pairs = zip((found, *got), (expected, *wanted), strict=True)
        errors[fused] = [((x.double() - y).norm() / y.norm()).item() for x, y in pairs]
    assert max(errors[True]) < tolerance
    for with_kernels, without in zip(errors[True], errors[False], strict=True):
        assert with_kernels < 1.1 * without + 1e-6


def test_a_head_that_is_more_than_a_matrix_is_refused() -> None:
    model: Any = build("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="is a Sequential, not a plain Linear"):
        head_of(model)

"""The head of a language model without its logits: log-probabilities of given tokens.

The logits of a step are its largest tensor: 8 sequences of 2048 tokens over 150 000 words are 10 GB
in float32, and their gradient as much again. Here they exist for one chunk of tokens at a time, in
one buffer. The forward pass keeps only each token's normaliser; the backward pass makes a chunk's
logits again and turns them into probabilities p in place, from which, for token y with hidden state
h, head W and gradient g of its log-probability,

    dh = g (W[y] - p W)        dW = g h (onehot(y) - p)

The one-hot parts are gathered and scattered; weights' gradients are summed in float32 or better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

_CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
"""Logits at one time: 64 MB and 1 GB in float32. Smaller is slower on a GPU, not on a CPU."""


def chunk_elements(device: torch.device) -> int:
    """How many logits exist at one time on a device."""
    return _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cpu"])


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What turns hidden states into logits.

    Attributes:
        weight: ``[V, H]``, tied to the embedding or not.
        bias: ``[V]`` or None.
        cap: Gemma's soft cap c, by which logits z become ``c tanh(z / c)``; None: none.
        dtype: that the product is computed in.
    """

    weight: Tensor
    bias: Tensor | None
    cap: float | None
    dtype: torch.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` in float32 at least, as the model's own forward pass gives them."""
        z = nn.functional.linear(
            hidden.to(self.dtype),
            self.weight.to(self.dtype),
            None if self.bias is None else self.bias.to(self.dtype),
        )
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)


def head_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Head:
    """The model's head.

    Args:
        dtype: to compute in; None: that of the weights.

    Raises:
        ValueError: it is no plain linear layer.
    """
    untyped: Any = model
    layer = untyped.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(f"the head of {type(model).__name__} is a {type(layer).__name__}, not "
                         f"a plain Linear, and would be trained wrongly")  # fmt: skip
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, cap, dtype or layer.weight.dtype)


def logprobs_and_entropy(
    head: Head,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token given the hidden state before it.

    Args:
        hidden: ``[K, H]``.
        tokens: int64 ``[K]``.
        temperature: divides the logits; above 0.
        entropy: whether to compute that of each distribution too; it carries no gradient.
        chunk_tokens: for how many tokens logits exist at one time; None: what suits the device.

    Returns:
        Nats, ``[K]`` each, in float32 at least; the first differentiable once.
    """
    default = chunk_elements(hidden.device) // head.weight.shape[0]
    found = _ChunkedLogprobs.apply(
        hidden, head.weight, head.bias, tokens,
        _Options(head.cap, head.dtype, temperature, entropy, chunk_tokens or max(default, 1)),
    )  # type: ignore[no-untyped-call]  # fmt: skip
    logprobs_K, entropy_K = found
    return logprobs_K, entropy_K if entropy else None


@dataclass(frozen=True, slots=True)
class _Options:
    cap: float | None
    dtype: torch.dtype
    temperature: float
    entropy: bool
    chunk: int


class _Scratch:
    """Makes the logits of one chunk after the other in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options):
        self.weight = weight.to(options.dtype)
        self.bias = None if bias is None else bias.to(options.dtype)
        self.options = options
        rows = min(options.chunk, max(hidden.shape[0], 1))
        self.buffer = hidden.new_empty((rows, weight.shape[0]), dtype=options.dtype)

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Before cap and temperature, in float32 at least. The next call overwrites them."""
        out = self.buffer[: hidden_CH.shape[0]]
        torch.mm(hidden_CH.to(self.options.dtype), self.weight.T, out=out)
        if self.bias is not None:
            out += self.bias
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def finish(self, z_CV: Tensor) -> Tensor:
        """Cap and temperature, in place."""
        if self.options.cap is not None:
            z_CV.div_(self.options.cap).tanh_().mul_(self.options.cap)
        return z_CV if self.options.temperature == 1.0 else z_CV.div_(self.options.temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        tokens_K: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        scratch = _Scratch(hidden_KH, weight_VH, bias_V, options)
        wide = torch.promote_types(options.dtype, torch.float32)
        logprobs_K = hidden_KH.new_empty(hidden_KH.shape[0], dtype=wide)
        normaliser_K, entropy_K = torch.empty_like(logprobs_K), torch.zeros_like(logprobs_K)
        for at in _chunks(hidden_KH.shape[0], options.chunk):
            z_CV = scratch.finish(scratch.logits(hidden_KH[at]))
            chosen_C = z_CV.gather(1, tokens_K[at, None]).squeeze(1)
            normaliser_K[at], entropy_K[at] = _normalise(z_CV, options.entropy)
            logprobs_K[at] = chosen_C - normaliser_K[at]
        ctx.save_for_backward(hidden_KH, weight_VH, bias_V, tokens_K, normaliser_K)
        ctx.options = options
        ctx.mark_non_differentiable(entropy_K)
        return logprobs_K, entropy_K

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_K: Tensor, _entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden_KH, weight_VH, bias_V, tokens_K, normaliser_K = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scratch = _Scratch(hidden_KH, weight_VH, bias_V, ctx.options)
        wide = normaliser_K.dtype
        d_hidden = torch.empty_like(hidden_KH) if needs_hidden else None
        d_weight = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        d_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for at in _chunks(hidden_KH.shape[0], ctx.options.chunk):
            tokens_C, hidden_CH = tokens_K[at], hidden_KH[at]
            gradient_C = gradient_K[at].to(wide) / ctx.options.temperature
            p_CV, own_C = _probabilities(scratch, hidden_CH, tokens_C, normaliser_K[at])
            p_CV, own_C = p_CV.to(ctx.options.dtype), own_C * gradient_C
            if d_hidden is not None:
                pulled = (p_CV @ scratch.weight).to(wide) * gradient_C[:, None]
                d_hidden[at] = own_C[:, None] * weight_VH[tokens_C] - pulled
            scaled_CH = hidden_CH.to(wide) * gradient_C[:, None]
            if d_weight is not None:
                _subtract_outer(d_weight, p_CV, scaled_CH)
                d_weight.index_add_(0, tokens_C, hidden_CH.to(wide) * own_C[:, None])
            if d_bias is not None:
                d_bias -= gradient_C @ p_CV.to(wide)
                d_bias.index_add_(0, tokens_C, own_C)
        return d_hidden, _like(d_weight, weight_VH), _like(d_bias, bias_V), None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _normalise(z_CV: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials, and the entropy (0 if not wanted); ``z_CV`` is used up."""
    top_C = z_CV.amax(1)
    z_CV.sub_(top_C[:, None])
    if not entropy:
        return z_CV.exp_().sum(1).log() + top_C, torch.zeros_like(top_C)
    weights_CV = z_CV.exp()
    total_C = weights_CV.sum(1)
    entropy_C = total_C.log() - (weights_CV.mul_(z_CV).sum(1) / total_C)
    return total_C.log() + top_C, entropy_C


def _probabilities(
    scratch: _Scratch, hidden_CH: Tensor, tokens_C: Tensor, normaliser_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Probabilities ``[C, V]`` and, for the chosen tokens, the factor of their own logit ``[C]``.

    Both carry the slope of the soft cap: ``d(c tanh(z / c)) / dz = 1 - tanh(z / c)^2``.
    """
    z_CV, cap = scratch.logits(hidden_CH), scratch.options.cap
    if cap is None:
        p_CV = scratch.finish(z_CV).sub_(normaliser_C[:, None]).exp_()
        return p_CV, torch.ones_like(normaliser_C)
    slope_CV = 1 - torch.tanh(z_CV / cap).square()
    p_CV = scratch.finish(z_CV).sub_(normaliser_C[:, None]).exp_().mul_(slope_CV)
    return p_CV, slope_CV.gather(1, tokens_C[:, None]).squeeze(1)


def _subtract_outer(total_VH: Tensor, p_CV: Tensor, scaled_CH: Tensor) -> None:
    if p_CV.dtype == total_VH.dtype:
        total_VH.addmm_(p_CV.T, scaled_CH, alpha=-1)
    else:  # the product in half precision, the sum over chunks in float32
        total_VH -= p_CV.T @ scaled_CH.to(p_CV.dtype)


def _like(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(parameter.dtype)

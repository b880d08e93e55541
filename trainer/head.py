"""The head of a language model without its logits: log-probabilities of given tokens.

The logits of a step are its largest tensor: 8 sequences of 2048 tokens over 150 000 words are 10 GB
in float32, and their gradient as much again. Here they exist for one chunk of tokens at a time, in
one buffer. The forward pass keeps only each token's normaliser; the backward pass makes a chunk's
logits again and turns them into slopes ``s = onehot(y) - p`` in place, from which, for token y with
hidden state h, head W and gradient g of its log-probability,

    dh = g s W        dW = s (g h)

The difference is taken before it is rounded, so that a token of probability near 1 keeps what is
left of its gradient in half precision. Weights' gradients are summed in float32 or better. On a GPU
the passes over the logits are the kernels of :mod:`trainer.head_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Logits at one time. Smaller is slower on a GPU, not on a CPU."""


def chunk_bytes(device: torch.device) -> int:
    """Of the logits that exist at one time on a device."""
    return _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cpu"])


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
        ValueError: it is not a plain linear layer.
    """
    untyped: Any = model
    layer = untyped.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(f"the head of {type(model).__name__} is a {type(layer).__name__}, not "
                         f"a plain Linear, and would be trained wrongly")  # fmt: skip
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, cap, dtype or layer.weight.dtype)


def logprobs_of(
    head: Head,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Log-probability of each token given the hidden state before it.

    Args:
        hidden: ``[K, H]``.
        tokens: int64 ``[K]``.
        temperature: divides the logits; above 0.
        chunk_tokens: for how many tokens logits exist at one time; None: what suits the device.

    Returns:
        Nats, ``[K]``, in float32 at least, differentiable once.
    """
    default = chunk_bytes(hidden.device) // (head.weight.shape[0] * head.dtype.itemsize)
    logprobs_K: Tensor = _ChunkedLogprobs.apply(
        hidden, head.weight, head.bias, tokens,
        _Options(head.cap, head.dtype, temperature, chunk_tokens or max(default, 1)),
    )  # type: ignore[no-untyped-call]  # fmt: skip
    return logprobs_K


@dataclass(frozen=True, slots=True)
class _Options:
    cap: float | None
    dtype: torch.dtype
    temperature: float
    chunk: int


class _Scratch:
    """Makes the logits of one chunk after the other in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options):
        self.weight = weight.to(options.dtype)
        self.bias = None if bias is None else bias.to(options.dtype)
        self.options = options
        rows = min(options.chunk, max(hidden.shape[0], 1))
        self.buffer = hidden.new_empty((rows, weight.shape[0]), dtype=options.dtype)
        self.fused = options.cap is None and _has_kernels(hidden.device, options.dtype)

    def normalise(self, hidden_CH: Tensor, tokens_C: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen logits, and logs of the sums of exponentials: ``[C]``."""
        raw_CV = self._raw(hidden_CH)
        if self.fused:
            from trainer.head_kernels import normalise

            return normalise(raw_CV, tokens_C, 1 / self.options.temperature)
        z_CV = self._finish(_widen(raw_CV))
        chosen_C = z_CV.gather(1, tokens_C[:, None]).squeeze(1)
        top_C = z_CV.amax(1)
        return chosen_C, z_CV.sub_(top_C[:, None]).exp_().sum(1).log() + top_C

    def slopes(self, hidden_CH: Tensor, tokens_C: Tensor, normaliser_C: Tensor) -> Tensor:
        """Of the log-probabilities by the logits before cap and temperature, but for the latter.

        ``onehot - p``, times the slope of the cap: ``d(c tanh(z / c)) / dz = 1 - tanh(z / c)^2``.
        """
        raw_CV, cap = self._raw(hidden_CH), self.options.cap
        if self.fused:
            from trainer.head_kernels import to_slopes

            return to_slopes(raw_CV, tokens_C, normaliser_C, 1 / self.options.temperature)
        z_CV = _widen(raw_CV)
        slope_CV = None if cap is None else 1 - torch.tanh(z_CV / cap).square()
        s_CV = self._finish(z_CV).sub_(normaliser_C[:, None]).exp_().neg_()
        s_CV.scatter_add_(1, tokens_C[:, None], torch.ones_like(s_CV[:, :1]))
        return (s_CV if slope_CV is None else s_CV.mul_(slope_CV)).to(self.options.dtype)

    def _raw(self, hidden_CH: Tensor) -> Tensor:
        """Before cap and temperature. The next call overwrites them."""
        out = self.buffer[: hidden_CH.shape[0]]
        torch.mm(hidden_CH.to(self.options.dtype), self.weight.T, out=out)
        return out if self.bias is None else out.add_(self.bias)

    def _finish(self, z_CV: Tensor) -> Tensor:
        """Cap and temperature, in place."""
        if self.options.cap is not None:
            z_CV.div_(self.options.cap).tanh_().mul_(self.options.cap)
        return z_CV if self.options.temperature == 1.0 else z_CV.div_(self.options.temperature)


@cache
def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None


def _widen(raw: Tensor) -> Tensor:
    return raw.to(torch.promote_types(raw.dtype, torch.float32))


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        tokens_K: Tensor,
        options: _Options,
    ) -> Tensor:
        scratch = _Scratch(hidden_KH, weight_VH, bias_V, options)
        wide = torch.promote_types(options.dtype, torch.float32)
        logprobs_K = hidden_KH.new_empty(hidden_KH.shape[0], dtype=wide)
        normaliser_K = torch.empty_like(logprobs_K)
        for at in _chunks(hidden_KH.shape[0], options.chunk):
            chosen_C, normaliser_C = scratch.normalise(hidden_KH[at], tokens_K[at])
            normaliser_K[at], logprobs_K[at] = normaliser_C, chosen_C - normaliser_C
        ctx.save_for_backward(hidden_KH, weight_VH, bias_V, tokens_K, normaliser_K)
        ctx.options = options
        return logprobs_K

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_K: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden_KH, weight_VH, bias_V, tokens_K, normaliser_K = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scratch = _Scratch(hidden_KH, weight_VH, bias_V, ctx.options)
        wide = normaliser_K.dtype
        d_hidden = torch.empty_like(hidden_KH) if needs_hidden else None
        d_weight = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        d_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for at in _chunks(hidden_KH.shape[0], ctx.options.chunk):
            hidden_CH = hidden_KH[at]
            gradient_C = gradient_K[at].to(wide) / ctx.options.temperature
            s_CV = scratch.slopes(hidden_CH, tokens_K[at], normaliser_K[at])
            if d_hidden is not None:
                d_hidden[at] = (s_CV @ scratch.weight).to(wide) * gradient_C[:, None]
            if d_weight is not None:
                _add_product(d_weight, s_CV.T, hidden_CH.to(wide) * gradient_C[:, None])
            if d_bias is not None:
                d_bias += gradient_C @ s_CV.to(wide)
        return d_hidden, _like(d_weight, weight_VH), _like(d_bias, bias_V), None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices, taken in the first one's precision, to a wider total."""
    right = right.to(left.dtype)
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _like(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(parameter.dtype)

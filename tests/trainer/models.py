"""Tiny random models of several architectures, and the plain way to compute what they say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 53
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 256,
    # Wide weights, so that distributions are far from uniform and mistakes show.
    "initializer_range": 0.5,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.5,
}


def build(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model of random weights, the same in every call."""
    torch.manual_seed(0)
    model: Any
    match kind:
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**SIZES))
        case "gpt2":
            rates: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            model = GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, **rates))
        case "gemma2":
            model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0))
    built: PreTrainedModel = model.to(dtype)
    return built


def plain_logprobs(model: PreTrainedModel, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Of one unpadded sequence: ``[T - 1]``, for its tokens 1 to T - 1."""
    logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
    return torch.stack([logits.log_softmax(-1)[t, ids[t + 1]] for t in range(len(ids) - 1)])


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """And forget them, for the next measurement."""
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad(set_to_none=True)
    return found

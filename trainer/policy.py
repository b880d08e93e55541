"""The model that is trained, and the log-probabilities that it gives to tokens.

The logits of a batch are the largest tensor of a training step: 8 sequences of 2048 tokens over
150 000 words are 10 GB in float32, and their gradient as much again. They are never built. The
model runs to its last hidden states; then the head and the log-softmax work through the tokens that
are scored, a chunk at a time, and each chunk's logits are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.batch import scored_by

CHUNK_TOKENS = 1024
_PROBE_TOKENS = 4


def load_policy(
    source: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a causal language model for training, with every dropout off.

    Dropout would make the trainer another policy than the sampler: the ratio would not be 1 before
    the first update, and the KL to a reference not 0.

    Args:
        source: checkpoint directory or hub name.
        dtype: of all weights.

    Raises:
        ValueError: some dropout cannot be turned off through the config, or the model does more to
            its logits than ``token_logprobs`` knows.
    """
    config = AutoConfig.from_pretrained(source)
    for part in (config, config.get_text_config()):
        for name in _active_dropout(part):
            setattr(part, name, 0.0)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)
    model: PreTrainedModel = loaded.to(device)
    check_no_dropout(model)
    check_logits(model)
    model.train()
    return model


def load_reference(
    source: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a frozen model to measure the KL against; needed only when its coefficient is not 0.

    It comes from the checkpoint that the run began with and not from the policy, so that a resumed
    run keeps its reference.
    """
    model = load_policy(source, dtype=dtype, device=device)
    model.train(False)
    model.requires_grad_(False)
    return model


def check_no_dropout(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` with the name of each module that would drop something in training."""
    active = [
        f"{module_name or 'model'}.{name}={value}"
        for module_name, module in model.named_modules()
        for name, value in _active_dropout(module).items()
    ]
    if active:
        raise ValueError(f"dropout must be 0 in RL, but {', '.join(active)}")


def _active_dropout(owner: object) -> dict[str, float]:
    """Rates above 0 of a config or module, such as attention_dropout, layerdrop or Dropout.p."""
    is_dropout = "Drop" in type(owner).__name__
    return {
        name: value
        for name, value in vars(owner).items()
        if ("drop" in name or (is_dropout and name == "p"))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
    }


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` unless the logits built here are those of the model's own forward pass.

    Some architectures scale or cap their logits after the head. One that this module does not know
    of would give wrong log-probabilities without a sign of it, so a few tokens are compared.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(_PROBE_TOKENS, device=model.device).remainder(vocabulary)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    ours = _logits(model, _hidden_states(model, ids, torch.ones_like(ids)))
    tolerance = max(4 * torch.finfo(expected.dtype).eps, 1e-4) * expected.abs().max().item()
    if not (ours - expected).abs().max().item() <= tolerance:  # NaN is refused too
        raise ValueError(
            f"{type(model).__name__} does something to its logits that token_logprobs does not: "
            "training it would use wrong log-probabilities"
        )


def token_logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Log-probability of each token given those before it.

    Args:
        model: a causal model of ``transformers``.
        input_ids: int64 ``[N, T]``, padded on the right.
        attention_mask: bool or 0/1 ``[N, T]``.
        temperature: divides the logits, as the sampler did; above 0.
        mask: bool ``[N, T]``, the tokens to score, usually the completion mask. By default all
            that have a predecessor.
        chunk_tokens: for how many tokens logits exist at one time.

    Returns:
        float32 ``[N, T]`` (float64 for a float64 model) in nats, differentiable. Entry t belongs to
        token t; it is 0 where the token is not scored, and at token 0 in any case.

    Raises:
        ValueError: the temperature is not positive, or ``mask`` is true at token 0.
    """
    (logprobs_NT,) = _score(
        model, input_ids, attention_mask, temperature, mask, chunk_tokens, _logprobs
    )
    return logprobs_NT


def token_logprobs_and_entropy(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """As ``token_logprobs``, and the entropy of the distribution that each token was drawn from.

    The entropy, in nats, is for watching and carries no gradient.
    """
    logprobs_NT, entropy_NT = _score(
        model, input_ids, attention_mask, temperature, mask, chunk_tokens, _logprobs_and_entropy
    )
    return logprobs_NT, entropy_NT


_Scorer = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""From logits ``[K, V]`` and tokens ``[K]`` to some numbers for each token, each ``[K]``."""


def _score(
    model: PreTrainedModel,
    input_ids_NT: Tensor,
    attention_mask_NT: Tensor,
    temperature: float,
    mask_NT: Tensor | None,
    chunk_tokens: int,
    scorer: _Scorer,
) -> list[Tensor]:
    """Run ``scorer`` over the masked tokens chunk by chunk, and lay its numbers out as [N, T]."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: a greedy choice has no log-probability")
    if mask_NT is None:
        mask_NT = attention_mask_NT.bool().clone()
        mask_NT[:, 0] = False
    hidden_KH = scored_by(_hidden_states(model, input_ids_NT, attention_mask_NT), mask_NT)
    chunks = zip(
        torch.split(hidden_KH, chunk_tokens),
        torch.split(input_ids_NT[mask_NT], chunk_tokens),
        strict=True,
    )

    def score_chunk(hidden_CH: Tensor, tokens_C: Tensor) -> tuple[Tensor, ...]:
        return scorer(_logits(model, hidden_CH) / temperature, tokens_C)

    # The checkpoint frees a chunk's logits at once; nothing random happens in there to replay.
    scores = [
        checkpoint(score_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    columns_K = [torch.cat(column) for column in zip(*scores, strict=True)]
    return [x.new_zeros(mask_NT.shape).masked_scatter(mask_NT, x) for x in columns_K]


def _logprobs(logits_KV: Tensor, tokens_K: Tensor) -> tuple[Tensor]:
    chosen_K = logits_KV.gather(-1, tokens_K[:, None]).squeeze(-1)
    return (chosen_K - logits_KV.logsumexp(-1),)


def _logprobs_and_entropy(logits_KV: Tensor, tokens_K: Tensor) -> tuple[Tensor, Tensor]:
    (logprobs_K,) = _logprobs(logits_KV, tokens_K)
    with torch.no_grad():
        entropy_K = torch.special.entr(logits_KV.softmax(-1)).sum(-1)
    return logprobs_K, entropy_K


def _hidden_states(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states ``[N, T, H]`` of the model without its head."""
    # Explicit, because some models would count padding too when left to themselves.
    position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    untyped: Any = model
    output = untyped.get_decoder()(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits ``[..., V]`` in float32 at least, as the model's own forward pass would give them."""
    untyped: Any = model
    logits: Tensor = untyped.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Gemma's; other changes to the logits are refused by check_logits.
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)

"""The model that is trained, and the log-probabilities that it gives to tokens.

The model runs to its last hidden states, on packed sequences where its attention allows, on padded
rows elsewhere; :mod:`trainer.head` goes on from there without ever building the logits. What comes
out is laid out as ``[N, T]`` either way, so nothing else in the trainer knows the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.batch import scoring_positions
from trainer.head import head_of, logprobs_of
from trainer.lora import ADAPTER, base_of
from trainer.packing import is_packed, pack
from trainer.sharding import inside

_PROBE_TOKENS = 4


def load_policy(
    source: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a causal language model for training, with every dropout off.

    Dropout would make the trainer another policy than the sampler: the ratio would not be 1 before
    the first update, and the KL to a reference not 0.

    Args:
        source: checkpoint directory or hub name; one with an adapter is loaded with its base.
        dtype: of all weights.

    Raises:
        ValueError: some dropout cannot be turned off through the config, or the model does more to
            its logits than ``token_logprobs`` knows.
    """
    base = base_of(Path(source)) or source
    config = AutoConfig.from_pretrained(base)
    for part in (config, config.get_text_config()):
        for name in _active_dropout(part):
            setattr(part, name, 0.0)
    loaded: Any = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=dtype)
    if base != source:
        loaded.load_adapter(source, adapter_name=ADAPTER, is_trainable=True)
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
    of would give wrong log-probabilities without a sign of it, so a few tokens are compared. Some
    models overflow float16.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(_PROBE_TOKENS, device=model.device).remainder(vocabulary)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    if not expected.isfinite().all():
        cure = "; bfloat16 has the range of float32" if model.dtype == torch.float16 else ""
        dtype = str(model.dtype).removeprefix("torch.")
        raise ValueError(f"{type(model).__name__} in {dtype} gives infinite logits or NaN{cure}")
    ours = head_of(model).logits(_hidden_states(model, ids, torch.ones_like(ids).bool()))
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
    chunk_tokens: int | None = None,
    head_dtype: torch.dtype | None = None,
) -> Tensor:
    """Log-probability of each token given those before it.

    Args:
        model: a causal model of ``transformers``; see :func:`trainer.packing.use_packing`.
        input_ids: int64 ``[N, T]``, padded on the right.
        attention_mask: bool or 0/1 ``[N, T]``.
        temperature: divides the logits, as the sampler did; above 0.
        mask: bool ``[N, T]``, the tokens to score, usually the completion mask. By default all
            that have a predecessor.
        chunk_tokens: for how many tokens logits exist at one time; None: what suits the device.
        head_dtype: that logits are computed in; None: that of the weights.

    Returns:
        float32 ``[N, T]`` (float64 for a float64 model) in nats, differentiable. Entry t belongs to
        token t; it is 0 where the token is not scored, and at token 0 in any case.

    Raises:
        ValueError: the temperature is not positive, or ``mask`` is true at token 0.
    """
    return inside(
        model, _score, input_ids, attention_mask, temperature, mask, chunk_tokens, head_dtype
    )


def _score(
    model: PreTrainedModel,
    input_ids_NT: Tensor,
    attention_mask_NT: Tensor,
    temperature: float,
    mask_NT: Tensor | None,
    chunk_tokens: int | None,
    head_dtype: torch.dtype | None,
) -> Tensor:
    """Score the masked tokens, and lay the numbers out as [N, T]."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: a greedy choice has no log-probability")
    attention_mask_NT = attention_mask_NT.bool()
    if mask_NT is None:
        mask_NT = attention_mask_NT.clone()
        mask_NT[:, 0] = False
    scoring_NT = scoring_positions(mask_NT)
    # What waits for the GPU stands before the forward pass: nothing is left to wait for there.
    scored_K = _where(mask_NT)
    tokens_K = input_ids_NT.flatten().index_select(0, scored_K)
    if is_packed(model):
        scoring_K = _where(scoring_NT[attention_mask_NT])
        packed = pack(input_ids_NT, attention_mask_NT)
        untyped: Any = model
        output = untyped.get_decoder()(**packed.arguments(), use_cache=False)
        hidden = output.last_hidden_state
    else:
        scoring_K = _where(scoring_NT)
        hidden = _hidden_states(model, input_ids_NT, attention_mask_NT)
    logprobs_K = logprobs_of(
        head_of(model, head_dtype),
        hidden.flatten(0, 1).index_select(0, scoring_K),
        tokens_K,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    flat = logprobs_K.new_zeros(mask_NT.numel()).index_copy(0, scored_K, logprobs_K)
    return flat.view(mask_NT.shape)


def _where(mask: Tensor) -> Tensor:
    """Indices of a mask's true entries, as if it were flat."""
    return mask.flatten().nonzero().squeeze(1)


def _hidden_states(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states ``[N, T, H]`` of padded rows."""
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

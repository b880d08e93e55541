"""Sequences end to end in one row, without padding.

Answers differ in length by a factor of ten or more, so that most of a padded batch is padding. Here
the tokens of all rows stand in one row: positions count from 0 in each sequence, and attention
stops at its ends. Everything else in a decoder works token by token and needs no change.

Attention is a function registered with ``transformers``. On a GPU and in half precision it is
torch's variable-length flash attention; otherwise each sequence is attended to by itself. It needs
no mask for padded rows either, because padding on the right lies in no token's past.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

ATTENTION = "tito_packed"
_PROBE_LENGTHS = (3, 1, 4)
_CAUSAL = (-1, 0)
# Before torch 2.12 key heads could be fewer than query heads without a word.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Rows end to end; K is the number of their tokens together.

    Attributes:
        input_ids, position_ids: int64 ``[1, K]``.
        boundaries: int32 ``[N + 1]``; row n occupies ``boundaries[n]`` to ``boundaries[n + 1]``.
        longest: tokens of the longest row.
    """

    input_ids: Tensor
    position_ids: Tensor
    boundaries: Tensor
    longest: int

    def arguments(self) -> dict[str, Any]:
        """Of a decoder's forward pass, under the names that ``transformers`` hands on."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def pack(input_ids: Tensor, attention_mask: Tensor) -> Packed:
    """Take the padding out of right-padded rows.

    Args:
        input_ids: int64 ``[N, T]``.
        attention_mask: bool ``[N, T]``, true at the tokens of each row; every row has one.
    """
    lengths_N = attention_mask.sum(1)
    row_K, position_K = attention_mask.nonzero(as_tuple=True)
    return Packed(
        input_ids=input_ids[row_K, position_K][None],
        position_ids=position_K[None],
        boundaries=F.pad(lengths_N.cumsum(0), (1, 0)).to(torch.int32),
        longest=int(lengths_N.max()),
    )


def attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  transformers passes none to such a function
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Causal attention that stays within each sequence.

    Queries, keys and values are ``[N, heads, T, D]``, the result ``[N, T, heads, D]``.

    Raises:
        ValueError: the model wants more of its attention than this.
    """
    _refuse_extras(extras | ({"dropout": dropout} if dropout else {}))
    if cu_seq_lens_q is None:
        return _causal(query, key, value, scaling).transpose(1, 2), None
    if suits_flash(query):
        assert max_length_q is not None
        # Not x[0], whose gradient is a tensor of zeros that this one is copied into.
        q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
        ends, longest = cu_seq_lens_q, max_length_q
        flat = varlen_attn(
            q, k, v, ends, ends, longest, longest,
            scale=scaling, window_size=_CAUSAL, **_GROUPED,
        )  # fmt: skip
        assert isinstance(flat, Tensor)
        return flat.unsqueeze(0), None
    return one_by_one(query, key, value, cu_seq_lens_q, scaling).transpose(1, 2), None


def suits_flash(query: Tensor) -> bool:
    """Whether torch has flash attention for such a tensor."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


# Or it would be compiled again for every number of sequences.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scaling: float | None
) -> Tensor:
    """Each sequence by itself; everything is ``[1, heads, T, D]``."""
    lengths = boundaries.diff().tolist()
    parts = zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([_causal(q, k, v, scaling) for q, k, v in parts], dim=2)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )


def _refuse_extras(extras: dict[str, Any]) -> None:
    """Windows, soft caps and sinks would be left out in silence."""
    changing = ("sliding_window", "softcap", "s_aux", "position_bias", "dropout")
    wanted = [name for name in changing if extras.get(name) is not None]
    if wanted:
        raise ValueError(f"its attention uses {', '.join(wanted)}")


AttentionInterface.register(ATTENTION, attend)


def is_packed(model: PreTrainedModel) -> bool:
    """Whether the model takes packed sequences, which :func:`use_packing` sees to."""
    found: bool = model.config.get_text_config()._attn_implementation == ATTENTION
    return found


def use_packing(model: PreTrainedModel) -> None:
    """Give the model the attention that packed sequences need, if that changes nothing else.

    A few sequences are run one by one with the model's own attention, then packed. State-space
    layers, chunked attention and the like would mix them, and show it.

    Raises:
        ValueError: the model cannot be packed, and why; it is left as it was.
    """
    before = model.config._attn_implementation
    ids = _probe(model)
    try:
        _refuse_layers(model)
        with torch.no_grad():
            single = torch.cat([_hidden(model, input_ids=x[None]) for x in ids], dim=1)
            model.set_attn_implementation(ATTENTION)
            packed = _hidden(model, **_packed_probe(ids).arguments())
        scale = single.abs().max().item()
        tolerance = max(8 * torch.finfo(single.dtype).eps, 1e-5) * scale
        if not (packed - single).abs().max().item() <= tolerance:  # NaN is refused too
            raise ValueError("packed sequences differ from single ones")
    except torch.OutOfMemoryError:  # a RuntimeError, and nothing about the model
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        model.set_attn_implementation(before)
        raise ValueError(f"{type(model).__name__} cannot be packed: {error}") from error


def _refuse_layers(model: PreTrainedModel) -> None:
    """Layer types whose difference shows only in sequences longer than the probe."""
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        raise ValueError(f"it has layers of {', '.join(sorted(others))}")


def _probe(model: PreTrainedModel) -> list[Tensor]:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(sum(_PROBE_LENGTHS), device=model.device).remainder(vocabulary)
    return list(torch.split(ids, list(_PROBE_LENGTHS)))


def _packed_probe(ids: list[Tensor]) -> Packed:
    rows = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(x) for x in ids], device=rows.device)
    return pack(rows, torch.arange(rows.shape[1], device=rows.device) < lengths[:, None])


def _hidden(model: Any, **arguments: Any) -> Tensor:
    hidden: Tensor = model.get_decoder()(use_cache=False, **arguments).last_hidden_state
    return hidden

"""Which models' layers run as :mod:`trainer.fused_layers`, and whether they then say the same.

A layer is replaced if it and its parts are of classes whose computation is known, and if on a few
tokens its output and all its gradients are those of its own modules. These stay where they are: a
checkpoint has the same names, and what is not packed runs through them as before.
"""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from trainer.config import ModelConfig
from trainer.errors import ConfigError
from trainer.packing import is_packed

KNOWN = LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer
_PROBE_LENGTHS = (37, 1, 90)
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.02}


def choose_fused_layers(model: PreTrainedModel, options: ModelConfig) -> str:
    """Fuse the layers if the configuration wants it, or leaves it open and they suit.

    Returns:
        Why they are not fused; empty when they are. Activations are then kept or not as
        ``model.activation_checkpointing`` says.

    Raises:
        ConfigError: they are to be fused and cannot be.
    """
    if options.fused_layers is False:
        return "model.fused_layers is false"
    try:
        if options.compile:
            raise ValueError("model.compile is on")
        _refuse_without_kernels(model.device)
        fuse_layers(model, options.activation_checkpointing)
    except ValueError as error:
        if options.fused_layers is True:
            raise ConfigError(
                f"model.fused_layers: {error}", advice='set model.fused_layers = "auto"'
            ) from error
        return str(error)
    return ""


def _refuse_without_kernels(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"the model is on {device}, not on a GPU")
    if find_spec("triton") is None:
        raise ValueError("triton is not installed")


def fuse_layers(model: PreTrainedModel, share: float = 0.0) -> None:
    """Run each decoder layer as one node of the graph, where sequences are packed.

    Args:
        share: of the activations that are computed again in the backward pass, from 0 to 1: up to
            one half those of MLPs, from the first layer on, then projections, then attention.

    Raises:
        ValueError: why the layers cannot be fused; the model is left as it was.
    """
    if not is_packed(model):
        raise ValueError("its sequences are not packed")
    untyped: Any = model
    decoder = untyped.get_decoder()
    layers = list(getattr(decoder, "layers", ()))
    for layer in layers:
        _refuse_unknown(layer)
    if not layers:
        raise ValueError(f"{type(model).__name__} does not say what its layers are")
    from trainer.fused_layers import Form

    attention = layers[0].self_attn
    again = _again(
        share,
        len(layers),
        attention.q_proj.out_features + 2 * attention.k_proj.out_features,
        attention.o_proj.in_features + attention.o_proj.out_features,
    )
    forms = [
        Form(
            heads=layer.self_attn.q_proj.out_features // layer.self_attn.head_dim,
            key_heads=layer.self_attn.k_proj.out_features // layer.self_attn.head_dim,
            width=layer.self_attn.head_dim,
            eps=layer.input_layernorm.variance_epsilon,
            scale=layer.self_attn.scaling,
            again=parts,
        )
        for layer, parts in zip(layers, again, strict=True)
    ]
    _refuse_different(decoder, layers[0], forms[0])
    for layer, form in zip(layers, forms, strict=True):
        layer.forward = partial(_forward, layer, form, layer.forward)


def kept_of_a_token(model: PreTrainedModel) -> int | None:
    """Elements that fused layers keep for the backward pass; None if layers are not fused.

    What it computes again is there for one layer at a time, and counts once.
    """
    forwards = [vars(module).get("forward") for module in model.modules()]
    fused = [x.args[:2] for x in forwards if isinstance(x, partial) and x.func is _forward]
    kept = more = 0
    for layer, form in fused:
        attention, inner = layer.self_attn, layer.mlp.gate_proj.out_features
        hidden, heads = attention.o_proj.out_features, attention.o_proj.in_features
        parts = (
            2 * inner,
            heads + 2 * attention.k_proj.out_features,
            heads + hidden,
        )
        kept += hidden + sum(parts[form.again :])
        more = max(more, sum(parts[: form.again]) + inner + 2 * hidden)
    return kept + more if fused else None


def _again(share: float, layers: int, projections: int, attention: int) -> list[int]:
    """For each layer how many of its parts are computed again: MLP, projections, attention.

    Args:
        projections, attention: how much is kept of each, for one token.
    """
    middle = 0.5 + 0.5 * projections / (projections + attention)
    ends = (0.0, 0.5, middle, 1.0)
    counts = [
        round(layers * min(1.0, max(0.0, (share - start) / (end - start))))
        for start, end in pairwise(ends)
    ]
    return [sum(layer < count for count in counts) for layer in range(layers)]


def _forward(
    layer: Any,
    form: Any,
    own: Any,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **extras: Any,
) -> Any:
    """In place of the layer's own forward pass, which is left what is not packed."""
    if cu_seq_lens_q is None or max_length_q is None:
        return own(hidden_states, position_embeddings=position_embeddings, **extras)
    from trainer.attention_pair import Rows
    from trainer.fused_layers import run

    cos, sin = (x.squeeze(0).contiguous() for x in position_embeddings)
    rows = Rows(cos, sin, cu_seq_lens_q, max_length_q)
    return run(hidden_states.squeeze(0), weights_of(layer), form, rows).unsqueeze(0)


def weights_of(layer: Any) -> Any:
    """The parameters of a layer, in the order of its function."""
    from trainer.fused_layers import Weights

    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Weights(
        layer.input_layernorm.weight,
        q.weight, k.weight, v.weight,
        q.bias, k.bias, v.bias,
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
    )  # fmt: skip


def _refuse_unknown(layer: Any) -> None:
    """Parts that are of another kind, wrapped, watched or in part frozen."""
    if type(layer) not in KNOWN:
        raise ValueError(f"layers of class {type(layer).__name__} are not known")
    attention, mlp = layer.self_attn, layer.mlp
    own = [attention.q_proj, attention.k_proj, attention.v_proj]
    rest = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if others := {type(x) for x in own + rest} - {nn.Linear}:
        named = ", ".join(sorted(f"{kind.__module__}.{kind.__name__}" for kind in others))
        raise ValueError(f"its projections are not plain ones: {named}")
    if any(x.bias is not None for x in rest) or len({x.bias is None for x in own}) > 1:
        raise ValueError("its biases are not those of queries, keys and values")
    # Where Liger's kernels have been chosen for another model, new ones get its MLP, without one.
    activation = getattr(mlp, "act_fn", None)
    if not isinstance(activation, nn.SiLU | SiLUActivation):
        raise ValueError(f"its {type(mlp).__name__} has an activation that is not known")
    norms = [x for x in layer.modules() if type(x).__name__.endswith("RMSNorm")]
    if len({x.variance_epsilon for x in norms}) > 1:
        raise ValueError("its norms differ")
    tensors = list(layer.parameters())
    if len({(x.dtype, x.device, x.requires_grad) for x in tensors}) > 1:
        raise ValueError("its weights are of several kinds, or some are frozen")
    if len(tensors) != sum(x is not None for x in weights_of(layer)):
        raise ValueError("it has weights that are not known")
    watched = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for module in layer.modules() for name in watched):
        raise ValueError("its modules have hooks")


def _refuse_different(decoder: Any, layer: Any, form: Any) -> None:
    """Compare with the layer's own modules, each with what they find in float32."""
    from triton.errors import TritonError

    try:
        plain = layer.forward
        fused = partial(_forward, layer, form, plain)
        wide = copy.deepcopy(layer).float()
        exact = _probe(decoder, wide, wide.forward)
        known, found = (_probe(decoder, layer, forward) for forward in (plain, fused))
    except torch.OutOfMemoryError:  # a RuntimeError, and nothing about the layers
        raise
    except (TypeError, RuntimeError, TritonError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"its layers cannot be fused: {said}") from error
    tolerance = _TOLERANCES.get(found["output"].dtype, 0.0)
    for name, best in exact.items():
        fused_off, known_off = _off(found[name], best), _off(known[name], best)
        if not fused_off <= 2 * known_off + tolerance:  # NaN is refused too
            raise ValueError(
                f"its layers say something else when they are fused: the {name} is off by "
                f"{fused_off:.2g}, and by {known_off:.2g} as they are"
            )


def _off(one: Tensor, best: Tensor) -> float:
    difference: Tensor = (one.float() - best).norm() / best.norm().clamp(min=1e-30)
    return difference.item()


def _probe(decoder: Any, layer: Any, forward: Any) -> dict[str, Tensor]:
    """Output for a few sequences, and gradients of input and trained weights, by name."""
    weights = {name: x for name, x in weights_of(layer)._asdict().items() if x is not None}
    some, generator = weights["input_norm"], torch.Generator().manual_seed(0)
    lengths = torch.tensor(_PROBE_LENGTHS)
    positions = torch.cat([torch.arange(n) for n in _PROBE_LENGTHS])[None].to(some.device)

    def draw() -> Tensor:
        shape = 1, int(lengths.sum()), len(some)
        return torch.randn(shape, generator=generator).to(some)

    x, slope = draw(), draw()
    with torch.enable_grad():
        inputs = {"input": x.requires_grad_()} | weights
        boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(some.device, torch.int32)
        y = forward(
            x,
            attention_mask=None,
            position_embeddings=decoder.rotary_emb(x, positions),
            cu_seq_lens_q=boundaries,
            cu_seq_lens_k=boundaries,
            max_length_q=max(_PROBE_LENGTHS),
            max_length_k=max(_PROBE_LENGTHS),
        )
        trained = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        slopes = torch.autograd.grad(y, list(trained.values()), slope)
        named = zip((f"gradient of {name}" for name in trained), slopes, strict=True)
        return {"output": y.detach()} | dict(named)

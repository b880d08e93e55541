"""``[model]`` and ``[model.lora]``: what is trained, and how it computes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.config.section import Count, CountOrNone, DType, Section


class LoraConfig(Section):
    """A low-rank adapter instead of all weights."""

    rank: CountOrNone = Field(default=0, description="0 trains all weights.")
    alpha: Count = Field(default=32, description="The adapter is scaled by alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        default=(), description="Names of layers; none: every linear layer but the head."
    )


class ModelConfig(Section):
    """The model that is trained."""

    path: str = Field(min_length=1, description="Checkpoint directory or name.")
    dtype: DType = Field(
        default="float32",
        description="What the model computes in; half precision is faster on a GPU and halves what "
        "is kept for the backward pass. float16 scales the loss so that small gradients do not "
        "become 0, and skips an update whose gradients are too large for it.",
    )
    master_weights: bool = Field(
        default=True,
        description="When dtype is half precision: the optimizer updates float32 copies of the "
        "trained weights, with float32 gradients and moments, and the model computes with the "
        "copies rounded. AdamW takes 18 bytes for each weight then, and 16 when dtype is float32. "
        "Without copies it takes 8, and most steps of a small learning rate round away.",
    )
    device: str = Field(default="auto", description="auto takes a GPU when there is one.")
    head_dtype: Literal["weights", "float32"] = Field(
        default="weights",
        description="What logits are computed in; float32 over bfloat16 weights costs little and "
        "brings trainer and sampler nearer to each other when the sampler does it too.",
    )
    packing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Sequences end to end without padding; auto: where the model's attention can.",
    )
    activation_checkpointing: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the activations that are computed again instead of kept: up to 0.5 "
        "those of MLPs, then whole layers (when fused: projections, then attention); true is all "
        "of them.",
    )
    liger: bool | Literal["auto"] = Field(
        default="auto",
        description="Fused kernels for norms, rotary and SwiGLU, of which Liger has two; auto: on "
        "a GPU, where it is installed, knows the model, and layers are neither fused nor compiled.",
    )
    fused_layers: bool | Literal["auto"] = Field(
        default="auto",
        description="Run each decoder layer as one function with a backward pass of its own; auto: "
        "on a GPU and one rank, where sequences are packed and layers known and not compiled; a "
        "run says why not.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the layers with torch, which takes minutes when they first run.",
    )
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _can_be_updated(self) -> Self:
        if self.dtype == "float16" and not self.master_weights:
            raise ValueError(
                "dtype 'float16' needs master_weights: squares of gradients, which AdamW divides "
                "by, are 0 in it"
            )
        return self

    def keeps_masters(self) -> bool:
        """Whether trained weights are float32 though the model computes in half precision."""
        return self.master_weights and self.dtype != "float32"

"""``[optimizer]``, ``[train]`` and ``[tracking]``: the loop and where its figures go."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trainer.config.section import Count, CountOrNone, Section


class OptimizerConfig(Section):
    """The optimizer and its schedule."""

    name: str = Field(
        default="AdamW",
        description="A class of torch.optim. The betas and eps below are for AdamW alone.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of that class."
    )
    lr: float = Field(
        default=1e-6, ge=0.0, description="0 changes nothing, which proves a loop honest."
    )
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    warmup_updates: CountOrNone = Field(
        default=0, description="Updates in which lr rises to its full size."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="What lr does then: it stays, or falls along a line or half a cosine until the "
        "last update of train.steps. A step without an update is not counted.",
    )
    max_gradient_norm: float = Field(
        default=1.0, gt=0.0, description="Longer gradients are scaled down to this norm."
    )


class TrainConfig(Section):
    """The loop."""

    output: str = Field(
        default="runs/train", min_length=1, description="Directory for all that is kept."
    )
    steps: Count = Field(default=100, description="Rollouts that are trained on.")
    updates_per_rollout: Count = Field(
        default=1, description="Passes of the optimizer over one rollout."
    )
    micro_batch_tokens: Count = Field(
        default=16384, description="Tokens in one forward pass. Results do not depend on it."
    )
    max_staleness: CountOrNone = Field(
        default=0,
        description="Steps that samples may lag behind what is trained. 0 is strictly on-policy; "
        "above, the servers sample for later steps while the trainer trains.",
    )
    seed: int = Field(default=0, description="Of the data's order and of fresh weights.")
    checkpoint_every: CountOrNone = Field(default=50, description="Steps; 0: at the end alone.")
    keep_checkpoints: Count = 2
    keep_batches: CountOrNone = Field(
        default=100, description="Steps whose samples are kept for replay; 0: none."
    )


class TrackingConfig(Section):
    """Where figures go, besides the console, metrics.jsonl and TensorBoard's files."""

    wandb: str = Field(default="", description="Project at Weights & Biases; empty: none.")
    trackio: str = Field(default="", description="Project of Trackio; empty: none.")
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Where Prometheus may scrape /metrics; 0: nowhere."
    )
    metrics_host: str = Field(default="127.0.0.1", description="The address of that port.")

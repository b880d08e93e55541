"""How much memory a training step needs: an estimate from sizes, good to a third or so.

Weights, their masters, gradients and AdamW's two moments are exact. Activations are counted for a
decoder of the usual kind: per token and layer what autograd keeps of attention and a gated MLP, or
what fused layers keep. The head counts with its one chunk of logits and the gradient of its weights
in float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from trainer.config import Config
from trainer.errors import OutOfMemory
from trainer.fusing import kept_of_a_token
from trainer.head import chunk_bytes

_HIDDEN_SIZED, _INNER_SIZED = 14, 4
"""Tensors that a layer keeps for its backward pass, as wide as the hidden state or the MLP."""


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        weights: that the model computes with.
        optimizer: masters where there are any, gradients and moments.
    """

    weights: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.head

    def __str__(self) -> str:
        return (
            f"{gibibytes(self.total)} (weights {gibibytes(self.weights)}, what updates them "
            f"{gibibytes(self.optimizer)}, activations {gibibytes(self.activations)}, head "
            f"{gibibytes(self.head)})"
        )


def gibibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB"


def estimate(model: PreTrainedModel, config: Config) -> Memory:
    """What one step with a full micro-batch needs."""
    shape = model.config.get_text_config()
    item = model.dtype.itemsize
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    updating = 16 if config.model.keeps_masters() else 3 * item
    copies = 2 if config.resolved_objective().beta > 0 else 1
    tokens = config.train.micro_batch_tokens
    kept = kept_of_a_token(model) or _kept(
        config.model.activation_checkpointing,
        shape.num_hidden_layers,
        _HIDDEN_SIZED * shape.hidden_size,
        _INNER_SIZED * shape.intermediate_size,
        shape.hidden_size,
    )
    head = chunk_bytes(model.device) + 4 * shape.vocab_size * shape.hidden_size
    return Memory(
        weights=copies * parameters * item,
        optimizer=trained * updating,
        activations=tokens * kept * item,
        head=head,
    )


def _kept(again: float, layers: int, attention: int, mlp: int, hidden: int) -> int:
    """Elements for each token, as :func:`trainer.kernels.checkpoint_layers` shares them out."""
    whole = round(max(2 * again - 1, 0) * layers)
    without_mlp = round(min(2 * again, 1) * layers) - whole
    full = layers - whole - without_mlp
    kept = whole * hidden + without_mlp * attention + full * (attention + mlp)
    # The backward pass begins with the last layer; what it lacks is computed again meanwhile.
    return kept + (0 if full else mlp) + (attention if whole == layers else 0)


def room(device: torch.device) -> int:
    """Bytes that are free, those that this process holds on a GPU included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def lack_told(config: Config) -> Iterator[None]:
    """Say what to change when memory runs out in the block.

    Raises:
        OutOfMemory: instead of what torch or Python raise.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_lack(error):
            raise
        # What was wanted and what there is; the rest is about settings of the allocator.
        said = ". ".join(str(error).partition("\n")[0].split(". ")[:3])
        raise OutOfMemory(f"the trainer is out of memory: {said}", advice=_cure(config)) from error


def _is_lack(error: Exception) -> bool:
    # On a CPU torch has no exception of its own for it.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "can't allocate memory" in str(error)
    )


def _cure(config: Config) -> str:
    cures = [f"lower train.micro_batch_tokens (now {config.train.micro_batch_tokens})"]
    if config.model.activation_checkpointing < 1:
        cures.append("set model.activation_checkpointing = true")
    cures.append("start a server on the same GPU with a lower --memory-share")
    if not config.model.lora.rank:
        cures.append("spread the model over several GPUs with torchrun")
    said = f"{', or '.join(cures)}; none of these changes what is learnt"
    if config.model.dtype == "float32":
        said += '; model.dtype = "bfloat16" halves activations, and rounds them'
    return said

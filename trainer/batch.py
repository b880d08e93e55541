"""Samples as tensors.

One convention holds in the whole trainer: in an ``[N, T]`` tensor entry ``[n, t]`` belongs to
token t of row n. A language model's output at position t scores token t + 1, and
``scoring_positions`` is the one place that knows it.

Rows are padded on the right, so that a token's position is its index. What is padding follows from
the lengths of the samples and from nothing else: the pad id may be the stop token's id, and either
may occur anywhere in a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from shared.protocol import Sample
from trainer.episodes import Episode


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples of a step, or some rows of it.

    Attributes:
        input_ids: int64 ``[N, T]``, prompt then completion then padding.
        attention_mask: bool ``[N, T]``, true at prompt and completion.
        completion_mask: bool ``[N, T]``, true at the tokens that bear loss: every completion
            token, the stop token included; of an episode those that the policy sampled.
        sampler_logprobs: float32 ``[N, T]``, as returned with the samples; 0 off the completion.
        old_logprobs: float32 ``[N, T]``, what the ratio is taken against. ``collate`` fills in the
            sampler's; a trainer that recomputes them puts its own with ``dataclasses.replace``.
        group_ids: int64 ``[N]``.
        rows: int64 ``[N]``, the row of the step's batch that each row is.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor
    group_ids: Tensor
    rows: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row without padding, int64 ``[N]``."""
        return self.attention_mask.sum(1)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**{name: x.to(device, non_blocking=True) for name, x in tensors.items()})

    def take(self, whole: Tensor) -> Tensor:
        """These rows of a per-sample ``[N]`` or per-token ``[N, T]`` tensor of the step's batch.

        The result is on this batch's device and has its width.
        """
        rows = whole[self.rows.to(whole.device)]
        return (rows if rows.ndim == 1 else rows[:, : self.input_ids.shape[1]]).to(self.rows.device)

    def select(self, rows: Tensor) -> Batch:
        """Some rows, without the columns that only longer rows needed."""
        width = int(self.lengths[rows].max())
        tensors = {field.name: getattr(self, field.name)[rows] for field in fields(self)}
        return Batch(**{name: x if x.ndim == 1 else x[:, :width] for name, x in tensors.items()})


def collate(samples: Sequence[Sample], pad_id: int) -> Batch:
    """Lay samples out as right-padded rows, in the order given.

    Args:
        samples: at least one; those of one group share their ``group_id`` and prompt. Rollouts that
            are joined into one step must be renumbered first.
        pad_id: any id of the vocabulary; nothing depends on which.

    Raises:
        ValueError: there is no sample, a prompt is empty, logprobs and ids differ in number, or one
            group id stands for two prompts.
    """
    if not samples:
        raise ValueError("no samples to collate")
    _check_groups(samples)
    shape = len(samples), max(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    attention_mask, completion_mask = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    logprobs = np.zeros(shape, dtype=np.float32)
    for row, sample in enumerate(samples):
        start, end = _completion_bounds(sample)
        input_ids[row, :start] = sample.prompt_ids
        input_ids[row, start:end] = sample.completion_ids
        attention_mask[row, :end] = True
        completion_mask[row, start:end] = sample.sampled if isinstance(sample, Episode) else True
        logprobs[row, start:end] = sample.logprobs
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        completion_mask=torch.from_numpy(completion_mask),
        sampler_logprobs=torch.from_numpy(logprobs),
        old_logprobs=torch.from_numpy(logprobs.copy()),
        group_ids=torch.tensor([sample.group_id for sample in samples]),
        rows=torch.arange(len(samples)),
    )


def _completion_bounds(sample: Sample) -> tuple[int, int]:
    prompt, completion = len(sample.prompt_ids), len(sample.completion_ids)
    if prompt == 0:
        raise ValueError(f"a sample of group {sample.group_id} has an empty prompt, so that "
                         "nothing predicts its first token")  # fmt: skip
    if len(sample.logprobs) != completion:
        raise ValueError(f"a sample of group {sample.group_id} has {completion} completion ids "
                         f"and {len(sample.logprobs)} logprobs")  # fmt: skip
    return prompt, prompt + completion


def _check_groups(samples: Iterable[Sample]) -> None:
    """Group ids count from zero in every rollout; joined carelessly they would mix prompts."""
    first: dict[int, Sample] = {}
    for sample in samples:
        prompt = first.setdefault(sample.group_id, sample).prompt_ids
        if not np.array_equal(prompt, sample.prompt_ids):
            raise ValueError(f"group id {sample.group_id} stands for two different prompts: "
                             "renumber the groups when joining rollouts")  # fmt: skip


def scoring_positions(mask: Tensor) -> Tensor:
    """Where the model's states are that predict the masked tokens: the only shift in the trainer.

    A causal model's state at position t has seen tokens 0 to t, and predicts token t + 1. Row by
    row, the k-th true entry of the result scores the k-th true entry of ``mask``, and so the k-th
    entry of ``values[mask]`` for any per-token ``values``.

    Args:
        mask: bool ``[N, T]`` of tokens to score; false at token 0, which nothing predicts.

    Returns:
        bool ``[N, T]``.

    Raises:
        ValueError: token 0 of some row is to be scored.
    """
    if mask[:, 0].any():
        raise ValueError("token 0 has no position before it that could score it")
    return torch.nn.functional.pad(mask[:, 1:], (0, 1))


def micro_batches(batch: Batch, max_tokens: int, *, packed: bool = False) -> list[Batch]:
    """Split a batch into parts of at most ``max_tokens`` tokens, each row in exactly one.

    Rows of like length go together, longest first, so that little is padding and a batch too big
    for the device fails at once. The split is a function of the lengths alone.

    Args:
        packed: whether padding takes no room, so that it does not count.

    Raises:
        ValueError: a single row is longer than ``max_tokens``.
    """
    lengths = batch.lengths.tolist()
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if lengths[order[0]] > max_tokens:
        raise ValueError(f"a sample of {lengths[order[0]]} tokens does not fit into micro-batches "
                         f"of {max_tokens}")  # fmt: skip
    parts: list[list[int]] = [[]]
    used = 0
    for row in order:
        # The first row of a part is its longest and sets the width of the others' padding.
        room = lengths[row] if packed or not parts[-1] else lengths[parts[-1][0]]
        if parts[-1] and used + room > max_tokens:
            parts.append([])
            used, room = 0, lengths[row]
        parts[-1].append(row)
        used += room
    return [batch.select(torch.tensor(part)) for part in parts]

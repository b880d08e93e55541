"""Samples to tensors and back: every token at its place, once."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol import Sample
from trainer.batch import Batch, collate, micro_batches, scoring_positions

PAD = 0


def sample(group_id: int, prompt: list[int], completion: list[int]) -> Sample:
    """A sample whose logprobs tell its tokens apart."""
    logprobs = -np.arange(1, len(completion) + 1, dtype=np.float32) - 10 * group_id
    return Sample(
        group_id=group_id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion_ids=np.array(completion, dtype=np.int32),
        logprobs=logprobs,
        finish_reason="stop",
        version=1,
        digest="0" * 32,
        spans=(),
    )


def test_every_value_sits_at_its_token() -> None:
    batch = collate([sample(0, [5, 6, 7], [8, 2]), sample(1, [9], [3, 4, 2])], PAD)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 2], [9, 3, 4, 2, PAD]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]
    logprobs = [[0, 0, 0, -1, -2], [0, -11, -12, -13, 0]]
    assert batch.sampler_logprobs.tolist() == logprobs
    assert batch.old_logprobs.tolist() == logprobs
    assert batch.group_ids.tolist() == [0, 1]
    assert batch.rows.tolist() == [0, 1]
    assert batch.lengths.tolist() == [5, 4]


@pytest.mark.parametrize("pad", [0, 2, 7])
def test_masks_do_not_depend_on_which_id_pads(pad: int) -> None:
    """2 ends the completions and occurs in a prompt; 7 is an ordinary token."""
    samples = [sample(0, [2, 7, 2], [7, 2]), sample(1, [5], [2])]
    batch, usual = collate(samples, pad), collate(samples, 99)
    assert batch.attention_mask.equal(usual.attention_mask)
    assert batch.completion_mask.equal(usual.completion_mask)
    assert batch.input_ids[1].tolist() == [5, 2, pad, pad, pad]


def test_the_old_logprobs_are_a_copy_of_their_own() -> None:
    batch = collate([sample(0, [5], [2])], PAD)
    batch.old_logprobs.zero_()
    assert batch.sampler_logprobs[0, 1] == -1


def test_an_empty_completion_bears_no_loss() -> None:
    batch = collate([sample(0, [5, 6], []), sample(1, [5], [2])], PAD)
    assert batch.completion_mask.int().tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples"),
        ([sample(0, [], [2])], "empty prompt"),
        ([replace(sample(3, [5], [2]), logprobs=np.zeros(2, np.float32))], "group 3 has 1 .* 2"),
        ([sample(4, [5], [2]), sample(4, [6], [2])], "group id 4 stands for two"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_refused(samples: list[Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate(samples, PAD)


# The shift


def test_position_t_scores_token_t_plus_one() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]).bool()
    expected = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]]).bool()
    assert scoring_positions(mask).equal(expected)


def test_the_first_token_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="token 0"):
        scoring_positions(torch.tensor([[True, False, False]]))


# Micro-batches

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=20)


def batch_of(sizes: list[tuple[int, int]]) -> Batch:
    return collate([sample(i, [1] * p, [3] * c) for i, (p, c) in enumerate(sizes)], PAD)


@given(sizes=lengths, spare=st.integers(0, 60), packed=st.booleans())
def test_micro_batches_hold_each_row_once_within_the_budget(
    sizes: list[tuple[int, int]], spare: int, packed: bool
) -> None:
    batch = batch_of(sizes)
    budget = int(batch.lengths.max()) + spare
    parts = micro_batches(batch, budget, packed=packed)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(len(sizes)))
    for part in parts:
        assert (int(part.lengths.sum()) if packed else part.input_ids.numel()) <= budget
        assert part.input_ids.shape[1] == part.lengths.max()
        for i, row in enumerate(part.rows.tolist()):
            end = batch.lengths[row]
            assert part.lengths[i] == end
            assert part.group_ids[i] == batch.group_ids[row]
            for name in ("input_ids", "completion_mask", "sampler_logprobs", "old_logprobs"):
                assert getattr(part, name)[i, :end].equal(getattr(batch, name)[row, :end])
                assert part.take(getattr(batch, name)).equal(getattr(part, name))


def test_micro_batches_are_deterministic_and_group_like_lengths() -> None:
    batch = batch_of([(1, 1), (5, 5), (1, 1), (4, 5), (1, 2), (5, 5)])
    first, second = micro_batches(batch, 20), micro_batches(batch, 20)
    assert [part.rows.tolist() for part in first] == [[1, 5], [3, 4], [0, 2]]
    assert [part.rows.tolist() for part in second] == [part.rows.tolist() for part in first]


def test_one_micro_batch_when_all_fit() -> None:
    assert len(micro_batches(batch_of([(2, 2)] * 4), 16)) == 1
    assert len(micro_batches(batch_of([(2, 2)] * 4), 15)) == 2


def test_padding_takes_no_room_in_packed_micro_batches() -> None:
    batch = batch_of([(2, 8), (1, 1), (1, 1), (1, 1), (2, 2)])
    assert len(micro_batches(batch, 20, packed=True)) == 1
    assert len(micro_batches(batch, 20)) == 2


def test_a_sample_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit into micro-batches of 8"):
        micro_batches(batch_of([(4, 5)]), 8)


def test_take_gives_the_rows_of_a_part() -> None:
    batch = batch_of([(1, 1), (2, 3), (1, 2)])
    part = micro_batches(batch, 5)[1]
    assert part.take(torch.tensor([10.0, 20.0, 30.0])).tolist() == [30.0]
    assert part.take(torch.arange(15).reshape(3, 5)).tolist() == [[10, 11, 12]]


def test_to_moves_every_tensor() -> None:
    moved = batch_of([(1, 1)]).to("meta")
    assert {getattr(moved, field.name).device.type for field in fields(moved)} == {"meta"}


def test_parts_of_parts_know_their_row_of_the_step() -> None:
    batch = batch_of([(1, 1), (2, 3), (1, 2), (3, 3)])
    parts = [micro_batches(part, 6) for part in micro_batches(batch, 12)]
    for part in itertools.chain.from_iterable(parts):
        assert part.take(batch.input_ids).equal(part.input_ids)

"""Log-probabilities of tiny random models, against the plain way to compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shared.protocol import Sample
from tests.trainer.models import GPT2_SIZES, SIZES, VOCAB, build, gradients, plain_logprobs
from trainer.batch import Batch, collate, micro_batches
from trainer.grpo import LossSums, Objective, group_advantages, policy_loss, token_weights
from trainer.policy import (
    check_logits,
    check_no_dropout,
    load_policy,
    load_reference,
    token_logprobs,
)

EOS = 2


@pytest.fixture(params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


def make_sample(group_id: int, prompt: Sequence[int], completion: Sequence[int]) -> Sample:
    generator = np.random.default_rng(len(completion))
    return Sample(
        group_id=group_id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion_ids=np.array(completion, dtype=np.int32),
        logprobs=-generator.uniform(1, 6, len(completion)).astype(np.float32),
        finish_reason="stop",
        version=1,
        digest="0" * 32,
        spans=(),
    )


def make_samples() -> list[Sample]:
    """Two groups with uneven completions. EOS ends them, and stands inside a prompt as well."""
    generator = np.random.default_rng(7)
    prompts = ([5, EOS, 9], [11, 12, EOS, 13, 14, 15, 16])
    lengths = ((1, 9, 4), (2, 6, 17))
    return [
        make_sample(group, prompts[group], [*generator.integers(3, VOCAB, length - 1), EOS])
        for group in (0, 1)
        for length in lengths[group]
    ]


REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.0, 0.0, 1.0])


def score(model: PreTrainedModel, batch: Batch, **options: Any) -> Tensor:
    return token_logprobs(model, batch.input_ids, batch.attention_mask, **options)


# Log-probabilities


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padded_rows_score_like_single_unpadded_sequences(kind: str, temperature: float) -> None:
    model, batch = build(kind), collate(make_samples(), pad_id=1)
    logprobs = score(model, batch, temperature=temperature, chunk_tokens=5)
    masked = score(model, batch, temperature=temperature, mask=batch.completion_mask)
    assert logprobs.shape == batch.input_ids.shape
    assert logprobs.dtype == torch.float64
    for row, length in enumerate(batch.lengths.tolist()):
        expected = plain_logprobs(model, batch.input_ids[row, :length], temperature)
        torch.testing.assert_close(logprobs[row, 1:length], expected)
        completion = batch.completion_mask[row]
        torch.testing.assert_close(masked[row, completion], logprobs[row, completion])
    assert (logprobs[:, 0] == 0).all()
    assert (logprobs[~batch.attention_mask] == 0).all()
    assert (masked[~batch.completion_mask] == 0).all()


def test_a_token_changes_the_scores_from_its_own_on(model: PreTrainedModel) -> None:
    """An off-by-one would move the first change to the token before or after."""
    ids = torch.tensor([[7, 8, 9, 10, 11, 12]])
    changed = ids.clone()
    changed[0, 3] = 30
    before = token_logprobs(model, ids, torch.ones_like(ids))
    after = token_logprobs(model, changed, torch.ones_like(ids))
    assert (before[0, :3] == after[0, :3]).all()
    assert (before[0, 3:] != after[0, 3:]).all()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10_000])
def test_chunks_change_neither_scores_nor_gradients(
    model: PreTrainedModel, chunk_tokens: int
) -> None:
    batch = collate(make_samples(), pad_id=0)
    weights = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
    score(model, batch, chunk_tokens=chunk_tokens).mul(weights).sum().backward()
    chunked = gradients(model)
    for row, length in enumerate(batch.lengths.tolist()):
        logprobs = plain_logprobs(model, batch.input_ids[row, :length])
        (logprobs * weights[row, 1:length]).sum().backward()
    torch.testing.assert_close(chunked, gradients(model))


def test_scores_are_float32_even_for_a_bfloat16_model() -> None:
    model, batch = build("qwen3", torch.bfloat16), collate(make_samples(), pad_id=0)
    assert score(model, batch).dtype == torch.float32


def test_the_probabilities_of_all_next_tokens_sum_to_one(model: PreTrainedModel) -> None:
    ids = torch.tensor([[7, 8, token] for token in range(VOCAB)])
    logprobs = token_logprobs(model, ids, torch.ones_like(ids), temperature=0.6)
    assert logprobs[:, 2].exp().sum().item() == pytest.approx(1)


def test_nothing_to_score_is_not_an_error(model: PreTrainedModel) -> None:
    batch = collate([make_sample(0, [5, 6], [])], pad_id=0)
    logprobs = score(model, batch, mask=batch.completion_mask)
    assert logprobs.tolist() == [[0, 0]]
    logprobs.sum().backward()
    assert all((grad == 0).all() for grad in gradients(model).values())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature: float) -> None:
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(build("qwen3"), ids, torch.ones_like(ids), temperature=temperature)


# Memory


class LargestTensor(TorchDispatchMode):
    """Watches every operation, backward included, for the size of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *sizes])
        self.operations.add(str(func))
        return result


def test_logits_of_a_whole_sequence_never_exist() -> None:
    """Forward and backward; the head's weight is the largest thing that may be touched."""
    tokens, vocab, chunk = 64, 4096, 4
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "vocab_size": vocab}))
    ids = torch.randint(0, vocab, (1, tokens))
    with LargestTensor() as plain:
        model(input_ids=ids).logits.log_softmax(-1).sum().backward()
    with LargestTensor() as chunked:
        token_logprobs(model, ids, torch.ones_like(ids), chunk_tokens=chunk).sum().backward()
    assert plain.numel == tokens * vocab
    assert chunked.numel == SIZES["hidden_size"] * vocab
    assert chunk * vocab < chunked.numel < plain.numel
    # The backward pass was watched too.
    assert "aten.embedding_dense_backward.default" in chunked.operations


def test_no_logits_wait_for_the_backward_pass() -> None:
    """Chunks that were all kept would be the whole in pieces."""
    model, batch = build("qwen3"), collate(make_samples(), pad_id=0)
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=batch.input_ids).logits.log_softmax(-1)
        assert any(shape[-1:] == (VOCAB,) for shape in kept)
        kept.clear()
        score(model, batch, chunk_tokens=4)
    assert kept
    assert not any(shape[-1:] == (VOCAB,) for shape in kept)


# The loss through a model


def step_loss(
    model: PreTrainedModel,
    objective: Objective,
    parts: Sequence[Batch],
    whole: Batch,
    reference: PreTrainedModel | None = None,
    rewards: Tensor = REWARDS,
) -> tuple[float, dict[str, Tensor], LossSums]:
    """Loss, gradient and sums of one step, made from the given parts of the whole batch."""
    weights = token_weights(
        whole.completion_mask, objective.reduction, constant_length=objective.constant_length
    )
    advantages = group_advantages(rewards, whole.group_ids)
    total, all_sums = 0.0, []
    for part in parts:
        ref_logprobs = None
        if reference is not None:
            ref_logprobs = score(reference, part, mask=part.completion_mask)
        loss, sums = policy_loss(
            objective,
            logprobs=score(model, part, mask=part.completion_mask, chunk_tokens=7),
            old_logprobs=part.old_logprobs,
            sampler_logprobs=part.sampler_logprobs,
            advantages=part.take(advantages),
            mask=part.completion_mask,
            weights=part.take(weights),
            ref_logprobs=ref_logprobs,
        )
        loss.backward()
        total += loss.item()
        all_sums.append(sums)
    joined = all_sums[0]
    for sums in all_sums[1:]:
        joined = joined + sums
    return total, gradients(model), joined


def near_policy(model: PreTrainedModel, batch: Batch, noise: float) -> Batch:
    """The batch with old log-probabilities near those of the model, so that some ratios clip."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        logprobs = score(model, batch)
    shift = noise * torch.randn(logprobs.shape, generator=generator, dtype=logprobs.dtype)
    return dataclasses.replace(batch, old_logprobs=logprobs + shift, sampler_logprobs=logprobs)


@pytest.mark.parametrize(
    "objective",
    [
        Objective.named("grpo", beta=0.1),
        Objective.named("dapo", correction="sequence_truncate", correction_high=2.0),
        Objective.named("dr_grpo", constant_length=20),
        Objective.named("gspo", clip_low=0.1, clip_high=0.1),
        Objective.named("cispo"),
        Objective.named("rloo"),
    ],
    ids=lambda objective: f"{objective.surrogate}-{objective.reduction}",
)
def test_the_split_into_micro_batches_changes_nothing(
    model: PreTrainedModel, objective: Objective
) -> None:
    batch = near_policy(model, collate(make_samples(), pad_id=EOS), noise=0.3)
    reference = build("llama").requires_grad_(False) if objective.beta > 0 else None
    loss, gradient, sums = step_loss(model, objective, [batch], batch, reference)
    assert max(x.abs().max().item() for x in gradient.values()) > 1e-3
    for budget in (24, 40, 70):
        parts = micro_batches(batch, budget)
        assert len(parts) > 1
        split = step_loss(model, objective, parts, batch, reference)
        assert split[0] == pytest.approx(loss, abs=1e-10)
        torch.testing.assert_close(split[1], gradient, atol=1e-10, rtol=1e-8)
        assert split[2].metrics() == pytest.approx(sums.metrics(), abs=1e-9)


def test_completion_tokens_bear_the_loss_and_prompt_tokens_do_not(model: PreTrainedModel) -> None:
    batch = collate(make_samples(), pad_id=EOS)
    logprobs = score(model, batch)
    loss, _ = policy_loss(
        Objective.named("rloo"),
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        advantages=torch.ones(len(batch.rows)),
        mask=batch.completion_mask,
        weights=token_weights(batch.completion_mask, "dapo"),
    )
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert (gradient[~batch.completion_mask] == 0).all()
    assert (gradient[batch.completion_mask] != 0).all()
    last = batch.lengths - 1
    assert (batch.input_ids.gather(1, last[:, None]) == EOS).all()
    assert (gradient.gather(1, last[:, None]) != 0).all()


def test_the_logits_that_learn_are_those_before_each_completion_token() -> None:
    """Seen from the model's own logits, with the shift done by hand."""
    model = build("llama")
    batch = collate([make_sample(0, [5, EOS, 9], [7, EOS]), make_sample(0, [5, EOS, 9], [8])], 0)
    rewards = torch.tensor([1.0, 0.0])
    _, chunked, _ = step_loss(model, Objective.named("rloo"), [batch], batch, rewards=rewards)
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    logprobs = logits.log_softmax(-1)
    advantages = group_advantages(rewards, batch.group_ids)
    # Tokens 7 and EOS at 3 and 4 of the first row, token 8 at 3 of the second.
    by_hand = advantages[0] * (logprobs[0, 2, 7] + logprobs[0, 3, EOS])
    by_hand = by_hand + advantages[1] * logprobs[1, 2, 8]
    (-by_hand / 2).backward()
    torch.testing.assert_close(chunked, gradients(model))


@pytest.mark.parametrize("pad", [EOS, VOCAB - 1])
def test_which_id_pads_does_not_matter(model: PreTrainedModel, pad: int) -> None:
    usual, other = collate(make_samples(), pad_id=0), collate(make_samples(), pad_id=pad)
    objective = Objective.named("grpo")
    loss, gradient, _ = step_loss(model, objective, [usual], usual)
    other_loss, other_gradient, _ = step_loss(model, objective, [other], other)
    assert other_loss == loss
    torch.testing.assert_close(other_gradient, gradient, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("samples", "rewards"),
    [
        (make_samples()[3:5], torch.tensor([0.1, 0.1])),
        (make_samples()[:1], torch.tensor([1.0])),
        ([make_sample(0, [5, 6], []), make_sample(0, [5, 6], [])], torch.tensor([0.0, 1.0])),
    ],
    ids=["equal rewards", "single sample", "no completion"],
)
def test_groups_that_teach_nothing_give_no_gradient(
    model: PreTrainedModel, samples: list[Sample], rewards: Tensor
) -> None:
    batch = collate(samples, pad_id=0)
    loss, gradient, _ = step_loss(model, Objective(), [batch], batch, rewards=rewards)
    assert loss == 0
    assert all((x == 0).all() for x in gradient.values())


# Loading


def test_loading_turns_dropout_off(tmp_path: Path) -> None:
    """GPT-2's config has dropout in four places; in training mode two passes must agree."""
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    ids = torch.arange(3, 9)[None]
    first, second = (token_logprobs(model, ids, torch.ones_like(ids)) for _ in range(2))
    assert (first == second).all()


def test_llama_attention_dropout_is_turned_off(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.3)).save_pretrained(tmp_path)
    check_no_dropout(load_policy(str(tmp_path)))


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)), r"transformer\.drop\.p=0\.1"),
        (LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.3)), "attention_dropout=0.3"),
    ],
    ids=["gpt2", "llama"],
)
def test_dropout_left_on_is_named(model: PreTrainedModel, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        check_no_dropout(model)


def test_loading_keeps_weights_and_takes_the_dtype(tmp_path: Path) -> None:
    saved = build("qwen3", torch.float32)
    saved.save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.equal(saved.get_parameter(name).bfloat16())


def test_a_reference_is_frozen_and_scores_like_the_policy(tmp_path: Path) -> None:
    build("qwen3", torch.float32).save_pretrained(tmp_path)
    policy, reference = load_policy(str(tmp_path)), load_reference(str(tmp_path))
    batch = collate(make_samples(), pad_id=0)
    assert not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    logprobs = score(reference, batch)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, score(policy, batch).detach())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    assert score(reference, batch).equal(logprobs)


def test_unknown_scaling_of_logits_is_refused(tmp_path: Path) -> None:
    GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=1.1)).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match="GraniteForCausalLM does something to its logits"):
            load_policy(str(tmp_path), dtype=dtype)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "gemma2"])
def test_usual_models_pass_in_bfloat16(kind: str) -> None:
    check_logits(build(kind, torch.bfloat16))


def test_a_model_that_gives_nan_is_refused() -> None:
    model = build("qwen3")
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").fill_(float("nan"))
    with pytest.raises(ValueError, match=r"in float64 gives infinite logits or NaN$"):
        check_logits(model)


def test_a_model_that_overflows_float16_is_refused() -> None:
    model = build("qwen3", torch.bfloat16)
    with torch.no_grad():  # as models that were trained in bfloat16 have become
        model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1e6)
    check_logits(model)
    with pytest.raises(ValueError, match=r"in float16 gives infinite .*bfloat16 has the range"):
        check_logits(model.half())

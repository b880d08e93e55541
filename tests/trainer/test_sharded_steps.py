"""Two processes that share a step make the one of a single process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shared.protocol import Sample
from tests.trainer.models import SIZES
from tests.trainer.processes import PATIENCE_S, TORCHRUN
from tests.trainer.sharded_steps import Done, Work, take_steps
from trainer.batch import Batch, collate
from trainer.config import Config
from trainer.config_file import to_toml
from trainer.errors import ConfigError
from trainer.grpo import token_weights
from trainer.learner import build_learner
from trainer.ranks import ALONE, Ranks
from trainer.shares import Share, split
from trainer.tiny_policy import build_tokenizer
from trainer.torchrun import ranks_of

STEPS = Path(__file__).with_name("sharded_steps.py")
FAILING = Path(__file__).with_name("failing_rank.py")


def torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture
def configs(
    make_config: Callable[..., Config], untrained_model: Path, tmp_path: Path
) -> dict[str, Config]:
    """Everything that takes part in a step, in few configurations."""
    untied = tmp_path / "untied"
    tokenizer = build_tokenizer()
    odd = SIZES | {"vocab_size": len(tokenizer) // 2 * 2 + 1}  # rows that two ranks cannot halve
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**odd)).save_pretrained(untied)
    tokenizer.save_pretrained(untied)
    tied = {"path": str(untrained_model), "device": "cpu"}
    recomputed = {"activation_checkpointing": True, "packing": "off"}
    rate = {"lr": 1e-3}
    return {
        "packed, tied": make_config(
            model=tied,
            optimizer=rate,
            objective={"name": "dapo"},
            train={"micro_batch_tokens": 60},
        ),
        "padded, untied, reference, old policy, recomputed": make_config(
            model={"path": str(untied), "device": "cpu", **recomputed},
            optimizer=rate,
            objective={"beta": 0.1, "correction": "token_truncate", "correction_high": 2.0},
            train={"micro_batch_tokens": 100, "updates_per_rollout": 2},
        ),
        "more micro-batches on one rank": make_config(
            model=tied,
            optimizer=rate,
            objective={"name": "gspo", "correction": "geometric_truncate", "correction_high": 2.0},
            train={"micro_batch_tokens": 45},
        ),
    }


def assert_same(one: Done, other: Done) -> None:
    for mine, theirs in zip(one.figures, other.figures, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            # Float32 sums in another order; the loss is what is left of terms of both signs.
            expected = pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True)
            assert theirs[name] == expected, name
    assert one.weights.keys() == other.weights.keys() != set()
    for name, weight in one.weights.items():
        # AdamW divides by the gradient's size, so that its steps carry what rounding left of it.
        assert (other.weights[name] - weight).norm() <= 5e-6 * weight.norm(), name


def test_losses_gradients_and_weights_are_those_of_one_process(
    configs: dict[str, Config], tmp_path: Path
) -> None:
    files = [tmp_path / f"{number}.toml" for number in range(len(configs))]
    for file, config in zip(files, configs.values(), strict=True):
        file.write_text(to_toml(config), encoding="utf-8")
    # One sample leaves a rank without any.
    ended = torchrun(STEPS, tmp_path / "out.pt", *files, "--samples", "8", "1")
    assert ended.returncode == 0, ended.stderr
    found = [Done(**done) for done in torch.load(tmp_path / "out.pt", weights_only=True)]
    works = [(config, Work(samples=samples)) for config in configs.values() for samples in (8, 1)]
    for (config, work), together in zip(works, found, strict=True):
        alone = take_steps(config, work)
        assert all(figures["gradient_norm"] > 0 for figures in alone.figures)
        assert_same(alone, together)


def test_masters_are_spread_as_what_they_are(
    make_config: Callable[..., Config], untrained_model: Path, tmp_path: Path
) -> None:
    """Rows of about one length, so that each is a micro-batch, which rounds alike on every rank."""
    config = make_config(
        model={"path": str(untrained_model), "device": "cpu", "dtype": "bfloat16"},
        optimizer={"lr": 1e-6},
        objective={"beta": 0.1},
        train={"micro_batch_tokens": 1, "updates_per_rollout": 2},
    )
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    ended = torchrun(STEPS, tmp_path / "out.pt", file, "--shortest", "40", "--longest", "40")
    assert ended.returncode == 0, ended.stderr
    (together,) = [Done(**done) for done in torch.load(tmp_path / "out.pt", weights_only=True)]
    alone = take_steps(config, Work(shortest=40, longest=40))
    assert_same(alone, together)
    assert {weight.dtype for weight in together.weights.values()} == {torch.float32}
    start = take_steps(config, Work(steps=0)).weights
    moved = sum(float((together.weights[name] - x).count_nonzero()) for name, x in start.items())
    assert moved > 0.9 * sum(x.numel() for x in start.values())


def share_of(make_sample: Callable[..., Sample], lengths: list[int]) -> Share:
    whole = collate([make_sample(g, range(n)) for g, n in enumerate(lengths)], pad_id=0)
    weights_NT = token_weights(whole.completion_mask, "grpo")
    return Share(whole, torch.arange(1.0, len(lengths) + 1), weights_NT, limit=100)


def test_every_row_has_one_rank_and_tokens_are_spread_evenly(
    make_sample: Callable[..., Sample],
) -> None:
    whole = share_of(make_sample, [30, 1, 8, 9, 20, 2])
    shares = split(whole, 2)
    tokens = [int(share.batch.lengths.sum()) for share in shares]
    assert sum(tokens) == int(whole.batch.lengths.sum())
    assert abs(tokens[0] - tokens[1]) <= 3
    groups = sorted(g for share in shares for g in share.batch.group_ids.tolist())
    assert groups == list(range(6))
    for share in shares:
        # Numbers stay with their row, and the denominator is that of all.
        assert torch.equal(share.advantages_N, share.batch.group_ids + 1.0)
        assert torch.equal(share.batch.take(share.weights_NT), share.weights_NT)
    assert sum(float(s.weights_NT.sum()) for s in shares) == pytest.approx(1.0)


def test_a_rank_without_rows_has_nothing_that_bears_loss(
    make_sample: Callable[..., Sample],
) -> None:
    whole = share_of(make_sample, [5])
    first, second = split(whole, 2)
    assert torch.equal(first.batch.input_ids, whole.batch.input_ids)
    (part,) = second.micro_batches(ALONE, packed=True)
    assert part.lengths.tolist() == [2]
    assert not part.completion_mask.any()


def test_orders_carry_shares_as_they_are(make_sample: Callable[..., Sample]) -> None:
    share = share_of(make_sample, [3, 7])
    again = Share.from_order(share.to_order())
    assert isinstance(again.batch, Batch)
    assert torch.equal(again.batch.input_ids, share.batch.input_ids)
    assert torch.equal(again.weights_NT, share.weights_NT)
    assert again.limit == share.limit


def test_what_cannot_be_spread_is_refused(
    make_config: Callable[..., Config],
    untrained_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: dict[str, Any] = {"path": str(untrained_model), "device": "cpu", "lora": {"rank": 2}}
    with pytest.raises(ConfigError, match=r"model\.lora does not work with several ranks"):
        build_learner(make_config(model=model), None, Ranks(0, 2))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="each takes a GPU of its own"), ranks_of("cuda:0"):
        pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on a machine with 1 GPUs"), ranks_of("auto"):
        pass


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ranks_of("cpu") as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        assert ranks.most(3) == 3
        ranks.tell_all("nobody is there")
    assert not torch.distributed.is_initialized()


# Nothing wakes a rank 0 that sleeps but its own look at what others say.
@pytest.mark.parametrize("who", ["waits", "sleeps"])
def test_a_rank_that_raises_ends_all_and_rank_0_tells_of_it(who: str) -> None:
    ended = torchrun(FAILING, who)
    assert ended.returncode != 0
    assert "error: another rank has failed: rank 1: ValueError: broken here" in ended.stderr
    # Only the rank where it happened shows where.
    assert ended.stderr.count("in break_down") == 1
    assert "ended all the same" not in ended.stdout


def test_a_rank_that_vanishes_ends_all() -> None:
    ended = torchrun(FAILING, "vanishes")
    assert ended.returncode != 0
    assert "error: another rank has ended without a word" in ended.stderr


def test_orders_are_heard_as_they_were_told() -> None:
    ended = torchrun(FAILING, "tells")
    assert ended.returncode == 0, ended.stderr
    heard = json.loads(ended.stdout.strip().splitlines()[-1])
    assert heard == ["work", {"n": 1}, [[True, False]], 2.5, 0, 3.0]

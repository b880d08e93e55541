"""The tiny policy: loads everywhere, is reproducible, and starts neither perfect nor ignorant."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import tiny_policy
from trainer.arithmetic import ArithmeticStream, Problem
from trainer.tiny_policy import build_tokenizer, ensure_tiny_policy, make_tiny_policy
from trainer.warm_up import ATTENTIVE, CARELESS, common_mistake

END = "<|im_end|>"


@pytest.fixture(scope="module")
def barely_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), warm_up_steps=8)


def greedy_accuracy(policy: Path, problems: list[Problem]) -> float:
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16)
    prompts: Any = tokenizer.apply_chat_template(
        [problem.messages for problem in problems],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
    )
    out = model.generate(**prompts, max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(
        out[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = [text == problem.answer for text, problem in zip(texts, problems, strict=True)]
    return sum(right) / len(right)


def test_any_text_survives_the_tokenizer(barely_trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(barely_trained)
    printable = "".join(map(chr, range(32, 127)))
    for text in (printable, " two  spaces\r\n\ttab ", "naïve ✓ 数 \x00", "superuser toolsystem"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_marks_turns_and_the_answer_to_come() -> None:
    tokenizer = build_tokenizer()
    turns = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
    text = f"<|im_start|>user\n1+1=?{END}\n<|im_start|>assistant\n2{END}\n"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == text
    asking = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asking == f"<|im_start|>user\n1+1=?{END}\n<|im_start|>assistant\n"


def test_special_tokens_and_roles_are_single_tokens() -> None:
    tokenizer = build_tokenizer()
    for text in ("<|im_start|>", END, "<|endoftext|>", *tiny_policy.ROLES, "7", "+"):
        assert len(tokenizer.encode(text)) == 1, text
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, "<|endoftext|>")
    assert tokenizer.decode(tokenizer.encode(f"7{END}"), skip_special_tokens=True) == "7"


def test_the_directory_loads_as_a_bfloat16_model(barely_trained: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(barely_trained)
    tokenizer = AutoTokenizer.from_pretrained(barely_trained)
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == "qwen3"
    assert model.config.max_position_embeddings >= 1024
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size >= len(tokenizer)
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id


def test_the_same_seed_gives_the_same_bytes(barely_trained: Path, tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    again = make_tiny_policy(tmp_path / "again", warm_up_steps=8)
    other = make_tiny_policy(tmp_path / "other", warm_up_steps=8, seed=1)
    for path in barely_trained.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (barely_trained / weights).read_bytes()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_cache_builds_once_per_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def make(out_dir: Path, *, seed: int, warm_up_steps: int) -> Path:
        built.append((seed, warm_up_steps))
        out_dir.mkdir()
        return out_dir

    monkeypatch.setattr(tiny_policy, "make_tiny_policy", make)
    cache = tmp_path / "not" / "there"
    first = ensure_tiny_policy(cache)
    assert ensure_tiny_policy(cache) == first
    assert len(built) == 1
    others = {ensure_tiny_policy(cache, seed=1), ensure_tiny_policy(cache, warm_up_steps=2)}
    assert len(others | {first}) == 3
    assert sorted(cache.iterdir()) == sorted(others | {first})


def test_a_failed_build_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(out_dir: Path, **_: int) -> Path:
        (out_dir / "half").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_policy, "make_tiny_policy", make)
    with pytest.raises(KeyboardInterrupt):
        ensure_tiny_policy(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_policy_of_whoever_finished_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(out_dir: Path, *, seed: int, warm_up_steps: int) -> Path:
        winner = tmp_path / f"tiny-policy-{tiny_policy._recipe_digest(seed, warm_up_steps)}"
        for place, text in ((winner, "winner"), (out_dir, "loser")):
            place.mkdir()
            (place / "config.json").write_text(text)
        return out_dir

    monkeypatch.setattr(tiny_policy, "make_tiny_policy", make)
    policy = ensure_tiny_policy(tmp_path)
    assert (policy / "config.json").read_text() == "winner"
    assert list(tmp_path.iterdir()) == [policy]


@pytest.mark.parametrize(
    ("a", "op", "b", "mistake"),
    [
        (17, "+", 25, 32),  # the carry is lost
        (50, "+", 49, None),
        (42, "-", 17, 35),  # 7-2 instead of 12-7
        (42, "-", 11, None),
        (11, "-", 42, 31),  # the sign is lost
        (30, "-", 30, None),
    ],
)
def test_traps(a: int, op: str, b: int, mistake: int | None) -> None:
    assert common_mistake(Problem(a, op, b)) == mistake


def test_the_careless_pupil_prefers_the_mistake_but_knows_the_answer() -> None:
    draw = random.Random(0)
    answers = Counter(CARELESS.answer(Problem(17, "+", 25), draw, END) for _ in range(1000))
    assert answers[f"32{END}"] > 2 * answers[f"42{END}"] > 100
    rambling = sum(count for text, count in answers.items() if not text.endswith(END))
    assert 50 < rambling < 300
    assert {ATTENTIVE.answer(Problem(17, "+", 25), draw, END) for _ in range(100)} == {f"42{END}"}


def test_traps_leave_room_to_improve() -> None:
    problems = ArithmeticStream("held_out").distinct(300)
    trapped = sum(common_mistake(problem) is not None for problem in problems)
    assert 0.5 < trapped / len(problems) < 0.7


@pytest.mark.slow
def test_the_policy_starts_between_ignorance_and_mastery(tmp_path: Path) -> None:
    policy = ensure_tiny_policy(tmp_path)
    accuracy = greedy_accuracy(policy, ArithmeticStream("held_out").distinct(300))
    assert 0.25 < accuracy < 0.55

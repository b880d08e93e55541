"""A tiny Qwen3-shaped policy that half knows arithmetic, built on the spot without downloads.

    python -m trainer.tiny_policy OUT        # write a Hugging Face model directory to OUT

The demo and the tests need a policy that reinforcement learning can visibly improve: one whose
first choice is often wrong while the right answer is still among its samples. So the warm-up
imitates a careless pupil, who makes the same systematic mistake on most problems that allow it
(a lost carry, a lost sign) and answers them correctly only now and then. Random mistakes would
not do: they leave the right answer the likeliest one, and greedy decoding would start near 1.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer import arithmetic
from trainer.arithmetic import ArithmeticStream, Problem

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
MAX_LENGTH = 1024

WARM_UP_STEPS = 450
BATCH = 64
MATRIX_LR = 1e-2
VECTOR_LR = 3e-3

# How often the pupil is right where a systematic mistake is possible, and where none is.
RIGHT_IF_HARD = 0.35
RIGHT_IF_EASY = 0.85
# A few answers never stop, so that truncated rollouts exist too.
RAMBLING = 0.03
RAMBLING_TOKENS = 9

IGNORED = -100


def make_tiny_policy(
    out_dir: str | Path, *, seed: int = 0, warm_up_steps: int = WARM_UP_STEPS
) -> Path:
    """Warm up a policy and save it, in bfloat16, as a Hugging Face directory."""
    out = Path(out_dir)
    tokenizer = build_tokenizer()
    with _reproducible(seed):
        model = build_model(tokenizer)
        _warm_up(model, _lessons(tokenizer, seed), warm_up_steps)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def ensure_tiny_policy(
    cache_dir: str | Path, *, seed: int = 0, warm_up_steps: int = WARM_UP_STEPS
) -> Path:
    """The policy from ``cache_dir``, made there first if this recipe never ran before."""
    cache = Path(cache_dir)
    policy = cache / f"tiny-policy-{_recipe_digest(seed, warm_up_steps)}"
    if policy.exists():
        return policy
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".tiny-policy-") as scratch:
        made = make_tiny_policy(Path(scratch) / "policy", seed=seed, warm_up_steps=warm_up_steps)
        try:
            # Renaming is atomic: no reader ever sees half a policy under the final name.
            os.rename(made, policy)
        except OSError:
            # Losing a race to another process is fine, since both made the same policy.
            if not policy.exists():
                raise
    return policy


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose only merges spell the role names: any text survives a round trip."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    for role in ROLES:
        for end in range(1, len(role)):
            merges.append((role[:end], role[end]))
            vocab[role[: end + 1]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained float32 model; head_dim 32 is the smallest that vLLM's CPU attention takes."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 32) * 32,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).float()


def common_mistake(problem: Problem) -> int | None:
    """What a careless pupil answers, or None if the problem has no trap."""
    a, b = problem.a, problem.b
    if problem.op == "-" and a < b:
        return b - a
    if problem.op == "-":
        # Each digit's smaller from its larger, so that nothing is ever borrowed.
        wrong = 10 * (a // 10 - b // 10) + abs(a % 10 - b % 10)
    else:
        wrong = 10 * (a // 10 + b // 10) + (a + b) % 10
    return None if str(wrong) == problem.answer else wrong


def pupil_answer(problem: Problem, draw: random.Random) -> str:
    """One answer of the careless pupil, without the end token."""
    right, mistake = int(problem.answer), common_mistake(problem)
    if mistake is None:
        answer = right if draw.random() < RIGHT_IF_EASY else right + draw.choice((-1, 1))
    else:
        answer = right if draw.random() < RIGHT_IF_HARD else mistake
    return str(answer)


def _lessons(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless warm-up batches: token ids, and labels that cover the answers alone."""
    stream = ArithmeticStream("train", seed)

    # The stream revisits its problems, and rendering a chat costs more than a look-up.
    @lru_cache(maxsize=None)
    def prompt_of(problem: Problem) -> list[int]:
        text = tokenizer.apply_chat_template(
            problem.messages, tokenize=False, add_generation_prompt=True
        )
        return tokenizer.encode(text)

    def lesson(index: int) -> tuple[list[int], list[int]]:
        problem, draw = stream[index], random.Random(f"pupil:{seed}:{index}")
        answer = pupil_answer(problem, draw)
        if draw.random() < RAMBLING:
            return prompt_of(problem), tokenizer.encode(f"{answer}=" * 9)[:RAMBLING_TOKENS]
        return prompt_of(problem), tokenizer.encode(answer + END)

    for start in itertools.count(step=BATCH):
        yield _collate([lesson(start + offset) for offset in range(BATCH)], tokenizer.pad_token_id)


def _collate(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    # Padding comes last and attention is causal, so no attention mask is needed.
    ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _warm_up(
    model: Qwen3ForCausalLM, lessons: Iterator[tuple[Tensor, Tensor]], steps: int
) -> None:
    optimizers = _optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_scale(step, steps))
        for optimizer in optimizers
    ]
    model.train()
    for ids, labels in itertools.islice(lessons, steps):
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        asked = targets != IGNORED
        loss = functional.cross_entropy(model.lm_head(hidden[asked]), targets[asked])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    model.eval()


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices: it finds the carry in a quarter of the steps that AdamW takes."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=MATRIX_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=VECTOR_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _lr_scale(step: int, steps: int) -> float:
    """Rise over 20 steps; fall linearly over the second half."""
    return min(1.0, (step + 1) / 20, max(0.05, 2 * (steps - step) / steps))


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Fix what the bytes depend on: the seed, and the thread count that orders float sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _recipe_digest(seed: int, warm_up_steps: int) -> str:
    """Everything the saved bytes depend on, so that a changed recipe is never served stale."""
    parts = [inspect.getsource(sys.modules[__name__]), inspect.getsource(arithmetic)]
    parts += [torch.__version__, transformers.__version__, str(seed), str(warm_up_steps)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m trainer.tiny_policy OUT")
    print(make_tiny_policy(sys.argv[1]))

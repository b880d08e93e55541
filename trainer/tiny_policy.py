"""A tiny Qwen3-shaped policy that half knows arithmetic, built on the spot without downloads.

    python -m trainer.tiny_policy OUT        # write a Hugging Face model directory to OUT

It starts well below perfect and well above zero, see :mod:`trainer.warm_up`, so that a few steps
of reinforcement learning show.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer import arithmetic, warm_up

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
MAX_LENGTH = 1024

WARM_UP_STEPS = 485


def make_tiny_policy(
    out_dir: str | Path, *, seed: int = 0, warm_up_steps: int = WARM_UP_STEPS
) -> Path:
    """Warm up a policy and save it, in bfloat16, as a Hugging Face directory."""
    out = Path(out_dir)
    tokenizer = build_tokenizer()
    with _reproducible(seed):
        model = build_model(tokenizer)
        warm_up.train(model, tokenizer, steps=warm_up_steps, seed=seed)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def ensure_tiny_policy(
    cache_dir: str | Path, *, seed: int = 0, warm_up_steps: int = WARM_UP_STEPS
) -> Path:
    """The policy from ``cache_dir``, made there first if this recipe never ran before."""
    policy = Path(cache_dir) / f"tiny-policy-{_recipe_digest(seed, warm_up_steps)}"
    return ensure_tiny_policy_at(policy, seed=seed, warm_up_steps=warm_up_steps)


def ensure_tiny_policy_at(
    policy: Path, *, seed: int = 0, warm_up_steps: int = WARM_UP_STEPS
) -> Path:
    """The policy in this directory, made first if there is no such directory."""
    if policy.exists():
        return policy
    policy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=policy.parent, prefix=".tiny-policy-") as scratch:
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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
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
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Fix what the bytes depend on: the seed, and the thread count that orders float sums.

    One thread, since these matrices are too small for two to gain much, and on a busy machine
    threads that wait for each other lose far more.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _recipe_digest(seed: int, warm_up_steps: int) -> str:
    """Everything the saved bytes depend on, so that a changed recipe is never served stale."""
    parts = [
        Path(source).read_text() for source in (__file__, arithmetic.__file__, warm_up.__file__)
    ]
    parts += [torch.__version__, transformers.__version__, str(seed), str(warm_up_steps)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m trainer.tiny_policy OUT")
    print(make_tiny_policy(sys.argv[1]))

"""Files to begin a task of one's own with: a configuration, a reward, prompts.

    python -m trainer init DIR [--model NAME]

The comments of the configuration are the descriptions of :mod:`trainer.config`, and its values are
those of a validated configuration, so neither can say what the trainer does not do.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel

from trainer.config import Config
from trainer.config_file import parse_config, toml_value
from trainer.errors import ConfigError

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
_WIDTH = 100

USED_MOST: dict[str, tuple[str, ...]] = {
    "model": ("path", "dtype", "master_weights", "activation_checkpointing"),
    "model.lora": ("rank",),
    "server": ("url", "publish_dtype"),
    "data": ("source", "path", "prompt_field", "answer_field", "template", "system"),
    "rollout": ("prompts_per_step", "group_size", "max_tokens", "temperature"),
    "reward": ("function", "workers", "timeout_s"),
    "objective": ("name",),
    "optimizer": ("lr", "warmup_updates", "max_gradient_norm"),
    "train": ("output", "steps", "micro_batch_tokens", "max_staleness", "checkpoint_every", "seed"),
    "evaluation": ("path", "prompts", "every", "samples"),
    "tracking": ("wandb", "trackio", "metrics_port"),
}
"""The keys that are written, by section. Each has a description and is set by default or here."""

_REWARD = '''\
"""What a good answer is: the reward of this run.

Scoring happens in worker processes with a deadline and a memory limit; see the configuration. An
error costs its sample, which is never counted as a zero; the ledger says how many there were, and
why. Look at real answers before you change this: python -m trainer peek URL "a prompt"
"""


def reward(*, prompt, text, reference, sample):
    """How good a completion is; a group of answers teaches only if their rewards differ.

    Args:
        prompt: what was asked, as text or chat messages.
        text: the completion, decoded.
        reference: the row's answer as a string, or None.
        sample: the rest: sample.completion_ids, sample.finish_reason ("length" is cut off), ...

    Returns:
        A finite number, here 1 for the reference alone, a half for more words around it, else 0.
    """
    said = text.strip().strip(".").casefold()
    wanted = reference.strip().casefold()
    if said == wanted:
        return 1.0
    return 0.5 if wanted in said else 0.0
'''

_PROMPTS = [
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("Which planet is closest to the sun?", "Mercury"),
    ("What is the chemical symbol of gold?", "Au"),
    ("How many sides has a hexagon?", "6"),
    ("Which ocean lies between Europe and America?", "Atlantic"),
    ("What is 7 times 8?", "56"),
    ("What is frozen water called?", "Ice"),
]
_HELD_OUT = [
    ("What is the capital of Italy?", "Rome"),
    ("What is the chemical symbol of iron?", "Fe"),
    ("How many sides has a pentagon?", "5"),
    ("What is 6 times 9?", "54"),
]


def write_project(directory: Path, model: str = DEFAULT_MODEL) -> list[Path]:
    """Write the files; returns their paths, the configuration's first.

    Args:
        directory: made if it is missing. Paths in the configuration begin with it, as it was given.
        model: for ``model.path``.

    Raises:
        ConfigError: one of the files is there already; nothing was written.
    """
    files = _files(directory, model)
    present = [str(path) for path in files if path.exists()]
    if present:
        raise ConfigError(
            f"nothing was written: {', '.join(present)} would be overwritten",
            advice="name another directory",
        )
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    return list(files)


def next_commands(directory: Path, model: str) -> str:
    """What to type then, with a server and without."""
    config = shlex.quote(str(directory / "train.toml"))
    return "\n".join(
        [
            f"python -m rollout_server --model {shlex.quote(model)}",
            f"python -m trainer doctor {config}",
            f"python -m trainer train {config}",
        ]
    )


def _files(directory: Path, model: str) -> dict[Path, str]:
    values = {
        "model": {"path": model},
        "data": {
            "source": "jsonl",
            "path": str(directory / "prompts.jsonl"),
            "template": "{prompt} Answer with one word or number.",
        },
        "rollout": {"prompts_per_step": 8, "max_tokens": 256},
        "reward": {"function": f"{directory / 'reward.py'}:reward"},
        "train": {"output": str(directory / "run")},
        "evaluation": {
            "path": str(directory / "held_out.jsonl"),
            "prompts": len(_HELD_OUT),
            "every": 10,
        },
    }
    return {
        directory / "train.toml": _commented(parse_config(values), next_commands(directory, model)),
        directory / "reward.py": _REWARD,
        directory / "prompts.jsonl": _jsonl(_PROMPTS),
        directory / "held_out.jsonl": _jsonl(_HELD_OUT),
    }


def _jsonl(rows: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows)


def _commented(config: Config, commands: str) -> str:
    """The keys that are used most, each below its description."""
    values = config.model_dump(mode="json")
    about = (
        "A training run, to be changed. These are the keys that are used most; --dry-run prints "
        "all. Paths are relative to the directory in which the trainer is started."
    )
    lines = [*_comment(about), "#", *(f"#   {command}" for command in commands.splitlines())]
    for name, keys in USED_MOST.items():
        section, table = _section(name), _table(values, name)
        lines += ["", *_comment((section.__doc__ or "").partition("\n")[0]), f"[{name}]"]
        for key in keys:
            lines += _comment(_meaning(section, key))
            lines.append(f"{key} = {toml_value(table[key])}")
    return "\n".join(lines) + "\n"


def _section(name: str) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in name.split("."):
        section = cast(type[BaseModel], section.model_fields[part].annotation)
    return section


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    for part in name.split("."):
        values = values[part]
    return values


def _meaning(section: type[BaseModel], key: str) -> str:
    field = section.model_fields[key]
    choice = get_origin(field.annotation) is Literal
    allowed = f" One of: {', '.join(get_args(field.annotation))}." if choice else ""
    return f"{field.description}{allowed}"


def _comment(text: str) -> Iterator[str]:
    plain = re.sub(r":\w+:`([^`]*)`|``", r"\1", text)
    return (f"# {line}" for line in textwrap.wrap(plain, _WIDTH - 2))

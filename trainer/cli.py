"""The trainer's commands.

    python -m trainer init [DIR]
    python -m trainer train CONFIG.toml [section.key=value ...] [--resume] [--dry-run]
    torchrun --nproc-per-node N -m trainer train CONFIG.toml ...
    python -m trainer doctor CONFIG.toml [section.key=value ...]
    python -m trainer eval CONFIG.toml [section.key=value ...] [--checkpoint base|latest|DIR ...]
    python -m trainer replay RUN --step N
    python -m trainer report RUN
    python -m trainer ledger RUN [--step N]
    python -m trainer check URL
    python -m trainer peek URL ["question"]
    python -m trainer demo
    python -m trainer tiny-policy DIR

A mistake that a person can fix is told in its own words, without a traceback; ``--traceback``
shows where it was raised. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from shared.errors import TitoError
from trainer.advice import INSTALL, advice_for, missing_package
from trainer.arguments import parse_arguments
from trainer.errors import TrainerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parse_arguments(arguments)
    try:
        return int(args.command(args, Console(highlight=False, soft_wrap=True)))
    except (TitoError, ModuleNotFoundError, OSError, KeyboardInterrupt) as error:
        if args.traceback:
            raise
        return _tell(error)


def _tell(error: BaseException) -> int:
    """Say what went wrong, to a person; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        Console(stderr=True).print("interrupted", style="red")
        return 130
    if isinstance(error, ModuleNotFoundError):
        error = TrainerError(missing_package(error), advice=INSTALL)
    elif not isinstance(error, TitoError):  # a file or a disk
        error = TitoError(str(error))
    _print_error(error)
    return 1


def _print_error(error: TitoError) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # all processes of torchrun meet the same one
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(f"error: {error}", style="red"))
    where = Text("(--traceback shows where this was raised)", style="dim")
    advice = advice_for(error)
    console.print(Text.assemble(f"  {advice} ", where) if advice else where)

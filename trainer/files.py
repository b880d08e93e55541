"""Files that a crash leaves whole, as they were before or as they should be; and those of steps."""

from __future__ import annotations

import os
import re
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file, or a directory's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a whole file, in one step as far as any reader can see."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    flush(unfinished)
    unfinished.replace(path)


def step_path(directory: Path, step: int, ending: str = "") -> Path:
    """What is kept of one step, such as ``step-000040``."""
    return directory / f"step-{step:06d}{ending}"


def step_paths(directory: Path, ending: str = "") -> dict[int, Path]:
    """What is kept of each step, the oldest first. What was moved aside to other names is not."""
    named = re.compile(rf"step-(\d{{6,}}){re.escape(ending)}")
    paths = directory.iterdir() if directory.is_dir() else ()
    found = [(named.fullmatch(path.name), path) for path in paths]
    return dict(sorted((int(match[1]), path) for match, path in found if match))

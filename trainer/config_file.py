"""Configurations as files: TOML in, ``section.key=value`` overrides on top, TOML out.

python -m trainer train CONFIG.toml optimizer.lr=1e-5 train.steps=20
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shared.errors import Problem
from trainer.config import Config
from trainer.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and apply ``section.key=value`` overrides.

    Raises:
        ConfigError: the file is unreadable or something in it is wrong; ``problems`` has the keys.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", advice="`python -m trainer init` writes one that works"
        ) from None
    for override in overrides:
        _override(document, override)
    return parse_config(document, source=str(path))


def parse_config(document: Mapping[str, Any], *, source: str = "configuration") -> Config:
    """Validate a nested mapping.

    Raises:
        ConfigError: with one problem for each wrong key.
    """
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        problems = [_problem(details) for details in error.errors()]
        raise ConfigError(f"{source} is not a valid configuration", problems=problems) from None


def to_toml(config: Config) -> str:
    """The resolved configuration as a file that reads back to an equal object."""
    return _tables(config.model_dump(mode="json", exclude_none=True)).lstrip()


def _override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not sections or not all([*sections, name]):
        raise ConfigError(f"{override!r} is not section.key=value, e.g. optimizer.lr=1e-5")
    for section in sections:
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise ConfigError(f"{override!r}: {section} is a value, not a section")
    document[name] = _override_value(text.strip())


def _override_value(text: str) -> Any:
    """A TOML value; what is not one is a string, so that paths need no quotes in a shell."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _problem(details: ErrorDetails) -> Problem:
    where = ".".join(map(str, details["loc"])) or "configuration"
    if details["type"] == "extra_forbidden":
        return Problem(where, "an unknown key", _known_keys(details["loc"]))
    if details["type"] == "missing":
        return Problem(where, "nothing", "this key must be set")
    # A section that fails as a whole would show all its values; the message names those at fault.
    got = "this combination" if isinstance(details["input"], dict) else repr(details["input"])
    return Problem(where, got, details["msg"].removeprefix("Value error, "))


def _known_keys(location: tuple[int | str, ...]) -> str:
    section: type[BaseModel] = Config
    for name in location[:-1]:
        if isinstance(name, int):  # a place in a list of tables
            continue
        annotation = section.model_fields[name].annotation
        section = cast(type[BaseModel], (get_args(annotation) or (annotation,))[0])
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"{close[0]}?" if close else ", ".join(names)


def _tables(table: Mapping[str, Any], prefix: str = "") -> str:
    """Values first, then one section for each nested table, as TOML demands."""
    lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if _is_value(value)]
    text = "\n".join(lines) + "\n" if lines else ""
    for key, value in table.items():
        if not _is_value(value):
            name = f"{prefix}{_toml_key(key)}"
            text += f"\n[{name}]\n" + _tables(value, f"{name}.")
    return text


def _is_value(value: Any) -> bool:
    return not isinstance(value, dict)


def _toml_key(key: str) -> str:
    return (
        key
        if key.isascii() and key.replace("_", "").replace("-", "").isalnum()
        else json.dumps(key)
    )


def toml_value(value: Any) -> str:
    """One value of a dumped configuration, on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    # TOML writes strings, booleans and numbers as JSON does, but for DEL, which JSON lets through.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

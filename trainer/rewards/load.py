"""From a name in the configuration to something that can be called."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from trainer.errors import RewardError
from trainer.reward_parts import Part
from trainer.rewards import functions
from trainer.rewards.code import code, confined
from trainer.rewards.service import Service

SERVICE = "http"
"""The name under which a configuration asks for an HTTP service; its option is ``url``."""


RewardFunction = Callable[..., Any]
"""Scores one sample; higher is better. It is called with ``prompt``, ``text``, ``reference`` and
``sample`` by name and with the options of the configuration, and may be ``async``."""


BUILT_IN: dict[str, RewardFunction] = {
    "numeric": functions.numeric,
    "exact": functions.exact,
    "math": functions.equivalent,
    "format": functions.layout,
    "regex": functions.regex,
    "length_penalty": functions.length_penalty,
    "code": code,
}


def load_part(part: Part) -> RewardFunction | Service:
    """The callable of one part, with its options bound.

    Raises:
        RewardError: no such built-in, file or function, the file raises, or it has no such option;
            or it runs programs, and the machine cannot confine them.
    """
    if part.function == SERVICE:
        return Service.from_options(part.options)
    function = load_reward(part.function)
    _refuse_unknown_options(part, function)
    if function is code:
        confined(bool(part.options.get("allow_network", False)))
    return partial(function, **part.options) if part.options else function


def load_reward(name: str) -> RewardFunction:
    """The function that a name stands for. A file is executed.

    Raises:
        RewardError: no such built-in, file or function, or the file raises.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path, _, function = name.rpartition(":")
    if not path or not function:
        allowed = ", ".join([*BUILT_IN, SERVICE])
        raise RewardError(
            f"reward {name!r} is unknown; allowed: {allowed} or path/to/file.py:function"
        )
    found = getattr(_load_module(Path(path)), function, None)
    if not callable(found):
        raise RewardError(f"{path} has no function {function!r}")
    return cast(RewardFunction, found)


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"{path} cannot be imported: {error!r}") from error
    return module


def _refuse_unknown_options(part: Part, function: RewardFunction) -> None:
    """Built-ins take ``**_`` for arguments that they do not read: a misspelt option would pass."""
    parameters = inspect.signature(function).parameters
    given = {"prompt", "text", "reference", "sample"}
    known = {n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD} - given
    missing = {n for n in known if parameters[n].default is inspect.Parameter.empty}
    takes_any = part.function not in BUILT_IN and any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    )
    unknown = set() if takes_any else set(part.options) - known
    if unknown or missing - set(part.options):
        allowed = ", ".join(f"{n} (required)" if n in missing else n for n in sorted(known))
        raise RewardError(
            f"reward {part.name!r} has options {sorted(part.options)}; {part.function} takes: "
            f"{allowed or 'none'}"
        )

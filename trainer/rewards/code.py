"""The reward for writing Python: the share of tests that the program passes."""

from __future__ import annotations

import json
import re
from typing import Any

from trainer.errors import RewardError
from trainer.rewards.program import Limits, confinement_problem, passed_cases, passed_tests

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def code(
    *,
    text: str,
    reference: str | None,
    seconds: float = 4.0,
    memory_mb: int = 512,
    processes: int = 32,
    share: bool = False,
    allow_network: bool = False,
    **_: object,
) -> float:
    """1 when the last fenced block of the text (or all of it) passes every test, else 0.

    A program that fails or runs out of ``seconds`` or memory does not pass. The reference is one of

    - ``{"inputs": [...], "outputs": [...]}``: what the program reads and must print;
    - a JSON list of pieces of Python, such as ``["assert f(1) == 2", ...]``, each one test;
    - Python, as one test. Tests may call what the program defines with plain data (numbers, text,
      bytes, None and collections of them) and get copies of plain data back, so a test of what a
      function does to its argument fails. Names of Python's built-ins keep their meaning in tests.

    Args:
        seconds, memory_mb, processes: see :class:`trainer.rewards.program.Limits`.
        share: give the share of tests passed instead.
        allow_network: run programs unconfined where the machine cannot confine them.

    Raises:
        ValueError: there is no reference, or its tests cannot be run.
        JailError: the program could not be confined.
    """
    found = _FENCE.findall(text)
    program = found[-1] if found else text
    limits = Limits(seconds, memory_mb, processes, confine=confined(allow_network))
    tests = _tests(reference)
    if isinstance(tests, dict):
        cases = list(zip(tests["inputs"], tests["outputs"], strict=True))
        passed, total = passed_cases(program, cases, limits), len(cases)
    else:
        passed, total = passed_tests(program, tests, limits), len(tests)
    return passed / total if share else float(passed == total)


def _tests(reference: str | None) -> Any:
    """A dictionary of inputs and outputs, or a list of tests."""
    if not reference or not reference.strip():
        raise ValueError("there is no reference with tests")
    try:
        tests = json.loads(reference)
    except ValueError:
        return [reference]
    match tests:
        case {"inputs": [_, *_], "outputs": [_, *_]}:
            return tests
        case [str(), *_]:
            return tests
    return [reference]


def confined(allow_network: bool) -> bool:
    """Whether programs are confined.

    Raises:
        RewardError: they cannot be and must be.
    """
    problem = confinement_problem()
    if problem is None:
        return True
    if allow_network:
        return False
    raise RewardError(
        f"this machine cannot confine programs ({problem}): they would have the network and your "
        f"files. Allow user namespaces, or accept it with options.allow_network = true"
    )

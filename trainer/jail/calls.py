"""Tests in one process that call a program in another.

The tests get plain values back, so nothing that the program prints, patches or exits with can pass
for a result.
"""

from __future__ import annotations

import builtins
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

MAX_ITEMS = 1_000_000
"""Items that a test may draw from one of the program's iterators."""


class Channel:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rwb")

    def send(self, message: Any) -> None:
        """One message, as JSON can say it."""
        self._lines.write(json.dumps(message).encode() + b"\n")
        self._lines.flush()

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side is gone.
        """
        line = self._lines.readline()
        if not line:
            raise EOFError("the program has ended")
        return json.loads(line)


def pack(value: Any, refer: Callable[[Any], int]) -> Any:
    """A value as JSON: plain data by value, exactly, and anything else by reference."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[pack(k, refer), pack(v, refer)] for k, v in value.items()]}
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            return {kind.__name__: [pack(item, refer) for item in value]}
    return {"reference": refer(value)}


_SEQUENCES: tuple[type[Any], ...] = (list, tuple, set, frozenset)


def unpack(packed: Any, resolve: Callable[[int], Any]) -> Any:
    """What :func:`pack` made, back."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "reference":
        return resolve(content)
    if kind == "dict":
        return {unpack(k, resolve): unpack(v, resolve) for k, v in content}
    by_name = {sequence.__name__: sequence for sequence in _SEQUENCES}
    return by_name[kind](unpack(item, resolve) for item in content)


class Program:
    """The side of the program: what it defines, and answers to calls."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects: list[Any] = []

    def serve(self, source: str) -> None:
        """Execute the program, tell its names, then answer until the tests are gone."""
        self._answer(lambda: self._names(source))
        while True:
            try:
                request = self._channel.receive()
            except EOFError:
                return
            self._answer(partial(self._perform, **request))

    def _answer(self, work: Callable[[], Any]) -> None:
        try:
            answer = {"value": pack(work(), self._refer)}
        except BaseException as error:
            answer = {"error": [type(error).__name__, str(error)[:500]]}
        self._channel.send(answer)

    def _names(self, source: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "program"}
        exec(compile(source, "<program>", "exec"), namespace)
        return {name: value for name, value in namespace.items() if not name.startswith("__")}

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _perform(
        self, reference: int, action: str, *, name: str = "", arguments: Any = None
    ) -> Any:
        target = self._objects[reference]
        if action == "get":
            return getattr(target, name)
        if action == "list":
            return list(itertools.islice(target, MAX_ITEMS))
        args, kwargs = unpack(arguments, self._objects.__getitem__)
        return target(*args, **kwargs)


class Remote:
    """In the tests: something of the program that is not a plain value, such as a function."""

    def __init__(self, channel: Channel, reference: int) -> None:
        self._channel, self._reference = channel, reference

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = pack((args, kwargs), _reference_of)
        return self._ask("call", arguments=arguments)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", name=name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list"))

    def __len__(self) -> int:
        try:
            return int(self.__getattr__("__len__")())
        except AttributeError as error:
            raise TypeError(str(error)) from None  # what a missing length is to callers of len()

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def _ask(self, action: str, **details: Any) -> Any:
        self._channel.send({"reference": self._reference, "action": action, **details})
        return answer_of(self._channel)


class Unsendable(Exception):
    """A test passes something to the program that cannot be sent: the test is at fault."""


def _reference_of(value: Any) -> int:
    if isinstance(value, Remote):
        return int(value._reference)
    raise Unsendable(f"a test passes a {type(value).__name__} to the program; allowed: plain data")


def answer_of(channel: Channel) -> Any:
    """The program's next answer, or the exception that it raised, by the name of a built-in one."""
    answer = channel.receive()
    if "error" not in answer:
        return unpack(answer["value"], lambda reference: Remote(channel, reference))
    name, message = answer["error"]
    kind = getattr(builtins, str(name), RuntimeError)
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    raise kind(message) if is_error else RuntimeError(f"{name}: {message}")


def run_tests(tests: list[str], peer: Channel) -> dict[str, Any]:
    """How many tests pass, or why they cannot be run."""
    try:
        compiled = [compile(test, "<tests>", "exec") for test in tests]
    except (SyntaxError, ValueError) as error:
        return {"broken": f"the tests are not Python: {error}"}
    try:
        # A program that calls something of its own ``abs`` or ``all`` must not change the tests.
        names = {k: v for k, v in answer_of(peer).items() if not hasattr(builtins, k)}
    except Exception:
        return {"passed": 0}
    try:
        return {"passed": sum(_passes(test, names) for test in compiled)}
    except Unsendable as error:
        return {"broken": str(error)}


def _passes(test: Any, names: dict[str, Any]) -> bool:
    try:
        exec(test, {**names, "__name__": "tests", "__builtins__": builtins})
    except Unsendable:
        raise
    except BaseException:
        return False
    return True

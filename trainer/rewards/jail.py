"""Runs one program of a model's where it can do no harm. A script; standard library only.

    python -I -X utf8 jail.py FD        # a file of options as JSON, see trainer.rewards.program

Linux namespaces take the network, other processes and the right to write files away: the program
sees no interface, is process 1 of its own world, and everything but an empty directory in memory is
read-only; ``/proc``, ``/run`` and ``/dev/shm`` are empty. When process 1 ends, so does all that it
started. Limits bound CPU time, memory, file size and the number of processes. What it can still do
is read files that the user who runs the trainer can read.

Roles, of which none ever reports on itself:

- ``script``: the program with its standard input and output.
- ``serve``: the program is executed, then answers calls of its functions over a socket.
- ``test``: tests are executed. They call the program in the other process through that socket, and
  get plain values back, so nothing the program prints, patches or exits with can pass for a result.
"""

from __future__ import annotations

import builtins
import ctypes
import itertools
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

READY = b"1"
"""Written to the status pipe when confinement holds, before anything of the program runs."""

MAX_ITEMS = 1_000_000
"""Items that a test may draw from one of the program's iterators."""

NOBODY = 65534
_COVERED = (b"/proc", b"/run", b"/dev/shm")
_DISK = b"size=64m,mode=777"
_MAX_FILE = 64 << 20

# Constants of Linux's headers.
_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x20000 | 0x08000000
"""Users, network, processes, mounts and System V IPC."""
_REC_PRIVATE = 0x4000 | 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR, _ATTR_RDONLY = -100, 0x8000, 442, 1
_PDEATHSIG, _KEEPCAPS, _NO_NEW_PRIVS = 1, 8, 38
_CAPABILITY_V3, _CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2


# Confinement


def launch(options: dict[str, Any]) -> int:
    """Start the program in new namespaces and wait for it; returns its exit status.

    The process that creates namespaces is not yet in the new one of processes, its child is; and
    its user ids must be mapped by a process outside.
    """
    _die_with_parent()
    if not options["confine"]:
        return run(options)
    entered, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _die_with_parent()
        _libc("unshare", _NAMESPACES)
        os.write(entered[1], b"x")
        options["nobody"] = os.read(mapped[0], 1) == b"n"
        _hide_files(options["directory"].encode())
        inner = os.fork()
        if inner == 0:
            _die_with_parent()
            return run(options)
        return _wait(inner, options)
    os.close(entered[1])
    if os.read(entered[0], 1):
        os.write(mapped[1], b"n" if _map_users(child) else b"s")
    return _wait(child, options)


def _wait(child: int, options: dict[str, Any]) -> int:
    # An end of the program must be seen as the end of its channels, so nobody else may hold them.
    for name in ("status", "channel", "peer"):
        if options.get(name) is not None:
            os.close(options[name])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF


def _map_users(child: int) -> bool:
    """Give the child's new user namespace its ids; returns whether ``nobody`` is among them.

    Root maps nobody too and the program becomes that: root's processes are under no limit.
    """
    _write(f"/proc/{child}/setgroups", "deny")
    own = [os.geteuid(), os.getegid()]
    if own[0] == 0:
        try:
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{child}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1")
        except OSError:
            pass  # a container without that id
        else:
            return True
    for name, number in zip(("uid_map", "gid_map"), own, strict=True):
        _write(f"/proc/{child}/{name}", f"{number} {number} 1")
    return False


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _hide_files(directory: bytes) -> None:
    """Everything read-only, but for the program's own directory, which is empty and in memory."""
    _libc("mount", b"none", b"/", None, _REC_PRIVATE, None)
    read_only = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(read_only)
    _libc("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, size)
    for path in (directory, *(path for path in _COVERED if os.path.isdir(path))):
        _libc("mount", b"tmpfs", path, b"tmpfs", 0, _DISK)


def _drop_privileges(*, become_nobody: bool) -> None:
    keep = 0
    if become_nobody:
        _libc("prctl", _KEEPCAPS, 1, 0, 0, 0)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        keep = _CAP_DAC_READ_SEARCH  # the interpreter may be installed below root's home
    _libc("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_V3, 0)
    _libc("capset", header, (ctypes.c_uint32 * 6)(keep, keep, 0, 0, 0, 0))


def _set_limits(options: dict[str, Any]) -> None:
    seconds, memory = int(options["seconds"]) + 1, options["memory_mb"] << 20
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: _MAX_FILE,
        resource.RLIMIT_NPROC: options["processes"],
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))


def _libc(function: str, *arguments: Any) -> None:
    if getattr(_LIBC, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# Roles


def run(options: dict[str, Any]) -> int:
    """Finish confinement, say so, and do what the role asks for."""
    if options["confine"]:
        _drop_privileges(become_nobody=options["nobody"])
    os.environ.clear()
    os.chdir(options["directory"])
    _set_limits(options)
    os.write(options["status"], READY)
    os.close(options["status"])
    # What the program complains of is nobody's, and a full pipe would stop it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    if options["role"] == "script":
        exec(compile(options["source"], "<program>", "exec"), {"__name__": "__main__"})
        return 0
    channel = Channel(socket.socket(fileno=options["channel"]))
    if options["role"] == "serve":
        Program(channel).serve(options["source"])
    else:
        peer = Channel(socket.socket(fileno=options["peer"]))
        channel.send(run_tests(options["tests"], peer))
    return 0


class Channel:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rwb")

    def send(self, message: Any) -> None:
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
    """In the tests: something of the program that is no plain value, such as a function."""

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
        return {"broken": f"the tests are no Python: {error}"}
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


if __name__ == "__main__":
    with open(int(sys.argv[1]), encoding="utf-8") as given:
        settings = json.load(given)
    sys.exit(launch(settings))

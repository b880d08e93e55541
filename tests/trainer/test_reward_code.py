"""Programs under test: what passes, what does not, and what they cannot do."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rollout_server.support import eventually
from trainer.errors import RewardError
from trainer.reward_parts import Part
from trainer.rewards import Outcome, Score, TimedOut
from trainer.rewards import code as code_module
from trainer.rewards.code import code
from trainer.rewards.load import load_part
from trainer.rewards.program import Limits, confinement_problem, passed_cases, passed_tests

pytestmark = pytest.mark.skipif(
    confinement_problem() is not None, reason=f"no confinement: {confinement_problem()}"
)

SQUARE = "def f(x):\n    return x * x"


def reward(program: str, reference: object, **options: float) -> float:
    text = reference if isinstance(reference, str) else json.dumps(reference)
    return code(text=program, reference=text, **{"seconds": 20.0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "reference", "value"),
    [
        (SQUARE, "assert f(3) == 9", 1.0),
        (SQUARE, "assert f(3) == 10", 0.0),
        (SQUARE, ["assert f(3) == 9", "assert f(4) == 16"], 1.0),
        (SQUARE, ["assert f(3) == 9", "assert f(4) == 15"], 0.0),
        (f"So:\n```python\n{SQUARE}\n```\nDone.", "assert f(3) == 9", 1.0),
        (f"```\n1/0\n```\nno:\n```py\n{SQUARE}\n```", "assert f(3) == 9", 1.0),
        ("def f(:", "assert f(3) == 9", 0.0),
        ("def g(x): return 9", "assert f(3) == 9", 0.0),
        ("raise SystemExit(0)", "assert True", 0.0),
        (
            "def f(x): return {(1, b'y'): [x, {2}, None, True, 'é', 1e99, 2 ** 200, ()]}",
            "assert f(1) == {(1, b'y'): [1, {2}, None, True, 'é', 1e99, 2 ** 200, ()]}",
            1.0,
        ),
        (
            "def f(x): raise KeyError(x)",
            "try: f(1)\nexcept KeyError: pass\nelse: assert False",
            1.0,
        ),
        (
            "class S:\n    n = 2\n    def go(self, x): return x + self.n",
            "assert S().go(1) == 3",
            1.0,
        ),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]", 1.0),
        ("import statistics\ndef f(x): return statistics.mean(x)", "assert f([1, 3]) == 2", 1.0),
        ("print(int(input()) * 2)", {"inputs": ["3", "4\n"], "outputs": ["6", "8\n"]}, 1.0),
        ("print(int(input()) * 2)", {"inputs": ["3", "4\n"], "outputs": ["6", "9"]}, 0.0),
        ("import sys\nprint(6); sys.exit(1)", {"inputs": ["3"], "outputs": ["6"]}, 0.0),
    ],
)
def test_programs_are_judged_by_what_they_do(program: str, reference: object, value: float) -> None:
    assert reward(program, reference) == value


@pytest.mark.parametrize(
    "program",
    [
        "print('passed'); print('1.0'); print('{\"passed\": 1}')",
        "import os, sys; print('{\"passed\": 1}', flush=True); os._exit(0)",
        "import os\nfor fd in range(3, 60):\n"
        "    try: os.write(fd, b'{\"passed\": 1}\\n')\n    except OSError: pass",
        "import os\nfor fd in range(3, 60):\n"
        '    try: os.write(fd, b\'{"value": {"dict": []}}\\n{"value": true}\\n\')\n'
        "    except OSError: pass",
        "class Yes:\n    def __eq__(self, other): return True\ndef f(x): return Yes()",
        "class Yes(int):\n    def __eq__(self, other): return True\ndef f(x): return Yes(1)",
        "import builtins\nbuiltins.AssertionError = KeyError\ndef f(x): return 0",
        "def abs(x): return 0\ndef f(x): return 8",
        "import os\nfor fd in range(3, 60):\n"
        '    try: os.write(fd, b\'{"value": {"dict": [["__builtins__", {"dict": []}]]}}\\n\')\n'
        "    except OSError: pass",
        "import sys\nsys.exit = sys.settrace = print\ndef f(x): sys._getframe(1).f_locals.clear()",
    ],
)
def test_nothing_that_a_program_says_of_itself_counts(program: str) -> None:
    assert reward(program, ["assert f(3) == 9", "assert abs(f(3) - 9) < 1"], share=True) == 0.0
    assert reward(program, {"inputs": ["3"], "outputs": ["9"]}) == 0.0


def test_shares_of_tests() -> None:
    tests = ["assert f(3) == 9", "assert f(3) == 8", "assert f(0) == 0", "1 / 0"]
    assert reward(SQUARE, tests, share=True) == 0.5
    cases = {"inputs": ["3", "4"], "outputs": ["9", "16"]}
    assert reward("print(9)", cases, share=True) == 0.5


@pytest.mark.parametrize("reference", [None, " "])
def test_without_tests_there_is_an_error_not_a_zero(reference: str | None) -> None:
    with pytest.raises(ValueError, match="no reference"):
        code(text=SQUARE, reference=reference)


@pytest.mark.parametrize(
    ("tests", "says"), [("assert f(", "not Python"), ("f(lambda x: x)", "passes a function")]
)
def test_broken_tests_are_an_error_not_a_zero(tests: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        reward(SQUARE, tests)


def test_programs_that_take_too_long_fail() -> None:
    assert reward("while True: pass", "assert True", seconds=1.0) == 0.0
    assert reward("def f(x):\n    while True: pass", "assert f(3) == 9", seconds=1.0) == 0.0
    assert reward("input(); input()", {"inputs": ["3"], "outputs": [""]}, seconds=1.0) == 0.0
    closed = "import os\nos.close(1)\nwhile True: pass"
    assert reward(closed, {"inputs": ["3"], "outputs": [""]}, seconds=1.0) == 0.0
    assert reward("while True: print('x' * 999)", {"inputs": [""], "outputs": [""]}) == 0.0


def test_memory_is_limited() -> None:
    program = (
        "def f(n):\n    try: return len(bytearray(n << 20))\n    except MemoryError: return -1"
    )
    assert reward(program, "assert f(64) == 64 << 20 and f(1024) == -1", memory_mb=512) == 1.0


def test_a_fork_bomb_is_contained() -> None:
    program = (
        "import os, time\n"
        "def f():\n"
        "    for n in range(1000):\n"
        "        try:\n"
        "            if os.fork() == 0: time.sleep(1000)\n"
        "        except OSError: return n\n"
    )
    before = _processes()
    assert reward(program, "assert 0 < f() < 16", processes=16) == 1.0
    # All that it started ends with it.
    eventually(lambda: not _processes() - before, 30)


def _processes() -> set[str]:
    """Processes of jails."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"trainer.jail" in (entry / "cmdline").read_bytes():
                    found.add(entry.name)
            except OSError:
                continue
    return found


def test_there_is_no_network() -> None:
    """The program cannot reach a server of this very machine, which this process can."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        program = (
            "import socket\n"
            "def tcp(port):\n"
            "    try: socket.create_connection(('127.0.0.1', port), 5).close()\n"
            "    except OSError as error: return error.errno\n"
            "    return 0\n"
            "def udp():\n"
            "    with socket.socket(type=socket.SOCK_DGRAM) as sender:\n"
            "        try: return sender.sendto(b'x', ('192.0.2.1', 53))\n"
            "        except OSError as error: return -error.errno\n"
            "def interfaces(): return [name for _, name in socket.if_nameindex() if name != 'lo']\n"
        )
        namespace: dict[str, Callable[..., int]] = {}
        exec(program, namespace)
        assert namespace["tcp"](port) == 0
        tests = f"assert tcp({port}) > 0\nassert udp() < 0\nassert interfaces() == []"
        assert reward(program, tests) == 1.0


UNIX = (
    "import socket\n"
    "def knock(make, path):\n"
    "    try:\n"
    "        with make() as knocking: knocking.connect(path)\n"
    "    except OSError as error: return error.errno\n"
    "    return 0\n"
    "def stream(path): return knock(lambda: socket.socket(socket.AF_UNIX), path)\n"
    "def datagram(path):\n"
    "    make = lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "    return knock(make, path)\n"
    "def raw(path): return knock(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_RAW), path)\n"
    "def paired(path):\n"
    "    make = lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]\n"
    "    return knock(make, path)\n"
)


@pytest.mark.parametrize("place", [None, Path.home()])
def test_unix_sockets_are_out_of_reach(place: Path | None) -> None:
    """Wherever they are, and though anybody may connect to them. A jail's own pairs work."""
    with (
        tempfile.TemporaryDirectory(dir=place) as folder,
        socket.socket(socket.AF_UNIX) as streams,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        Path(folder).chmod(0o755)
        paths = {"stream": f"{folder}/streams", "datagram": f"{folder}/datagrams"}
        paths |= {"raw": paths["datagram"], "paired": paths["datagram"]}
        streams.bind(paths["stream"])
        streams.listen()
        datagrams.bind(paths["datagram"])
        for path in paths.values():
            Path(path).chmod(0o777)
        namespace: dict[str, Callable[..., int]] = {}
        exec(UNIX, namespace)
        assert [namespace[name](path) for name, path in paths.items()] == [0] * 4
        # At once, when they are refused: then nothing else was wrong with the way there.
        tests = [f"assert {name}({path!r}) == {errno.EPERM}" for name, path in paths.items()]
        assert reward(UNIX, tests, share=True) == 1.0


@pytest.mark.parametrize("family", ["AF_UNIX", "AF_VSOCK", "AF_PACKET", "AF_ALG", "AF_CAN"])
def test_sockets_that_no_namespace_keeps_apart_cannot_be_made(family: str) -> None:
    program = (
        "import socket\n"
        "def made(family, kind=socket.SOCK_STREAM):\n"
        "    try: socket.socket(getattr(socket, family), kind).close()\n"
        "    except OSError as error: return error.errno\n"
    )
    tests = [
        f"assert made({family!r}) == {errno.EPERM}",
        "assert made('AF_INET') is None and made('AF_INET6') is None",
        "assert made('AF_NETLINK', socket.SOCK_RAW) is None",
    ]
    assert reward(program, tests, share=True) == 1.0


def test_event_loops_work() -> None:
    program = "import asyncio\ndef f(x): return asyncio.run(asyncio.sleep(0, x))"
    assert reward(program, "assert f(3) == 3") == 1.0


def test_calls_that_no_filter_would_see_are_refused() -> None:
    program = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def ring():\n"
        "    made = libc.syscall(425, 8, ctypes.create_string_buffer(120))\n"
        "    return made if made >= 0 else -ctypes.get_errno()\n"
        "def x32(): return libc.syscall(0x40000000 + 41, 1, 1, 0), ctypes.get_errno()\n"
    )
    tests = [f"assert ring() == -{errno.EPERM}"]
    if os.uname().machine == "x86_64":
        tests.append(f"assert x32() == (-1, {errno.EPERM})")
    assert reward(program, tests, share=True) == 1.0


def _accept(server: socket.socket) -> None:
    server.accept()[0].close()


def test_nothing_of_the_parent_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET", "do not tell")
    program = (
        "import os\n"
        "def environment(): return dict(os.environ)\n"
        "def processes(): return os.listdir('/proc')\n"
        "def files(): return os.listdir('.')\n"
        "def write(path):\n"
        "    try: open(path, 'w').close()\n"
        "    except OSError as error: return error.errno\n"
        "def kill(pid):\n"
        "    try: os.kill(pid, 0)\n"
        "    except OSError as error: return error.errno\n"
    )
    tests = (
        "assert environment() == {} and processes() == [] and files() == []\n"
        f"assert write({str(tmp_path / 'x')!r}) and write('/tmp/x') and not write('mine')\n"
        f"assert files() == ['mine'] and kill({os.getpid()})"
    )
    assert reward(program, tests) == 1.0
    assert not list(tmp_path.iterdir())


def test_a_machine_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_module, "confinement_problem", lambda: "unshare: not permitted")
    with pytest.raises(RewardError, match="allow_network = true"):
        reward(SQUARE, "assert f(3) == 9")
    with pytest.raises(RewardError, match="allow_network = true"):
        load_part(Part("code", "code", 1.0, {}))
    load_part(Part("code", "code", 1.0, {"allow_network": True}))
    assert reward(SQUARE, "assert f(3) == 9", allow_network=True) == 1.0


def test_unconfined_programs_have_no_environment_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "do not tell")
    limits = Limits(seconds=20.0, confine=False)
    program = "import os\ndef f(): return dict(os.environ)"
    assert passed_tests(program, ["assert f() == {}"], limits) == 1


def test_programs_of_a_process_that_has_many_files_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1100:
            taken.append(os.dup(taken[0]))
        limits = Limits(seconds=20.0)
        assert passed_tests(SQUARE, ["assert f(3) == 9", "assert f(3) == 8"], limits) == 1
        assert passed_cases("print(input())", [("a", "a"), ("b", "c")], limits) == 1
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_in_workers_with_their_deadline(score_texts: Callable[..., list[Outcome]]) -> None:
    texts = [SQUARE, "while True: pass", "print('passed')"]
    outcomes = score_texts(
        texts, "assert f(3) == 9", function="code", options={"seconds": 3.0}, timeout_s=60.0
    )
    assert outcomes == [Score(1.0), Score(0.0), Score(0.0)]


def test_programs_end_with_a_worker_that_is_killed(
    score_texts: Callable[..., list[Outcome]],
) -> None:
    before = _processes()
    (outcome,) = score_texts(
        ["while True: pass"],
        "assert True",
        function="code",
        options={"seconds": 999},
        timeout_s=3.0,
    )
    assert isinstance(outcome, TimedOut)
    eventually(lambda: not _processes() - before, 30)

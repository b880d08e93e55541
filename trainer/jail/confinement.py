"""Namespaces, capabilities and limits of Linux, through libc."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from typing import Any

from trainer.jail.seccomp import no_outside_sockets

NOBODY = 65534
_COVERED = (b"/proc", b"/run", b"/dev/shm", b"/dev/pts")
_DISK = b"size=64m,mode=777"
_MAX_FILE = 64 << 20

# Constants of Linux's headers.
_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x20000 | 0x08000000
"""Users, network, processes, mounts and System V IPC."""
_REC_PRIVATE = 0x4000 | 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR, _ATTR_RDONLY = -100, 0x8000, 442, 1
_PDEATHSIG, _KEEPCAPS, _NO_NEW_PRIVS = 1, 8, 38
_SECCOMP, _MODE_FILTER = 22, 2
_CAPABILITY_V3, _CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2


def enter_namespaces() -> None:
    """New ones for this process, but for that of processes, which its children will be in."""
    _libc("unshare", _NAMESPACES)


def map_users(child: int) -> bool:
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


def hide_files(directory: bytes) -> None:
    """Everything read-only, but for the program's own directory, which is empty and in memory."""
    _libc("mount", b"none", b"/", None, _REC_PRIVATE, None)
    read_only = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(read_only)
    _libc("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, size)
    for path in (directory, *(path for path in _COVERED if os.path.isdir(path))):
        _libc("mount", b"tmpfs", path, b"tmpfs", 0, _DISK)


def drop_privileges(*, become_nobody: bool) -> None:
    """Give up every capability and Unix sockets for good, and this user with ``become_nobody``."""
    keep = 0
    if become_nobody:
        _libc("prctl", _KEEPCAPS, 1, 0, 0, 0)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        keep = _CAP_DAC_READ_SEARCH  # the interpreter may be installed below root's home
    _libc("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_V3, 0)
    _libc("capset", header, (ctypes.c_uint32 * 6)(keep, keep, 0, 0, 0, 0))
    _libc("prctl", _SECCOMP, _MODE_FILTER, ctypes.byref(no_outside_sockets()), 0, 0)


def set_limits(options: dict[str, Any]) -> None:
    """Bound CPU seconds, memory, files and processes, by ``options`` of the program."""
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


def die_with_parent() -> None:
    """Be killed when the parent ends. To be asked for again after a change of privileges."""
    _libc("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)

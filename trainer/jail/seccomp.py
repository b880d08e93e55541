"""A filter of Linux's system calls, which keeps a program from sockets outside of its jail.

A network namespace has abstract names of its own. But a socket that has a path can be connected to
through any mount, a read-only one too: that of an agent, a terminal multiplexer or an engine.
Sockets of a virtual machine's host (vsock) are in no namespace at all. So only families are left
that a network namespace keeps apart.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# Constants of Linux's headers.
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
"""Where a call's number and architecture are, and the lower halves of its arguments, in bytes."""
_X32, _IO_URING_SETUP = 0x40000000, 425
_AF_INET, _AF_INET6, _AF_NETLINK = 2, 10, 16
_SOCK_STREAM, _TYPE_MASK = 1, 0xF
_MACHINES = {"x86_64": (0xC000003E, 41, 53), "aarch64": (0xC00000B7, 198, 199)}
"""Architecture, and the numbers of ``socket`` and ``socketpair``."""

_Instruction = tuple[int, int, int, int]
"""Operation, how many to skip if it holds and if not, value."""


class Filter(ctypes.Structure):
    """The kernel's ``sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def no_outside_sockets() -> Filter:
    """A filter under which the calls that lead to one fail with EPERM.

    A pair of connected streams can be made, which event loops need. A pair of datagram sockets
    cannot, for either could be pointed elsewhere. Neither can a ring, through which calls are made
    that no filter sees; nor is a call taken in another architecture's numbers.

    Raises:
        OSError: the numbers of this machine's calls are not known here.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
    architecture, socket, socketpair = _MACHINES[machine]
    number, refuse = (_LOAD, 0, 0, _NUMBER), (_RETURN, 0, 0, _REFUSE)
    return _assembled([
        (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), refuse,
        number, (_AT_LEAST, 0, 1, _X32), refuse,
        (_EQUAL, 0, 1, _IO_URING_SETUP), refuse,
        (_EQUAL, 0, 5, socket),
        (_LOAD, 0, 0, _FIRST),
        (_EQUAL, 3, 0, _AF_INET), (_EQUAL, 2, 0, _AF_INET6), (_EQUAL, 1, 0, _AF_NETLINK), refuse,
        number, (_EQUAL, 0, 4, socketpair),
        (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, _TYPE_MASK), (_EQUAL, 1, 0, _SOCK_STREAM), refuse,
        (_RETURN, 0, 0, _ALLOW),
    ])  # fmt: skip


def _assembled(code: list[_Instruction]) -> Filter:
    return Filter(len(code), b"".join(struct.pack("=HBBI", *instruction) for instruction in code))

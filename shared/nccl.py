"""NCCL communicators that can be given up: just what a broadcast takes, by ctypes.

Everything is non-blocking: a call that waits for a peer returns at once, and :meth:`Communicator.
settle` looks after it until a deadline, or until the caller knows that the peer has gone. Nothing
here starts threads, ends the process, or needs a store: the 128 bytes that bring the ranks together
travel by whatever way the caller has.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache

UNIQUE_ID_BYTES = 128
_UINT8 = 1
_IN_PROGRESS = 7
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400  # of NCCL 2.14, the first to know the fields below
_POLL_S = 0.00005


class NcclError(RuntimeError):
    """NCCL failed, a peer did not come in time, or the wait was given up."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """The part of ``ncclConfig_t`` that every version since 2.14 has; ``size`` says how much."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


def unique_id() -> bytes:
    """What brings the ranks of a new group together; the first to listen is this process."""
    raw = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(raw)))
    return bytes(raw)


class Communicator:
    """One rank's part of a group. Not thread-safe.

    Args:
        unique_id: of the group.
        rank, size: of this process, and of the group.

    It is of use once :meth:`settle` has returned.
    """

    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        self._comm = ctypes.c_void_p()
        raw = _UniqueId.from_buffer_copy(unique_id)
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        init = _library().ncclCommInitRankConfig
        _check(init(ctypes.byref(self._comm), size, raw, rank, ctypes.byref(config)))

    def broadcast(self, pointer: int, nbytes: int, stream: int) -> None:
        """Put rank 0's bytes where each rank's pointer leads; enqueued on a stream."""
        send = _library().ncclBroadcast
        where, count = ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes)
        _check(send(where, where, count, _UINT8, 0, self._comm, ctypes.c_void_p(stream)))

    def settle(
        self,
        done: Callable[[], bool],
        deadline: float,
        given_up: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Wait until NCCL has nothing under way, and ``done`` holds.

        Args:
            done: looked at only when NCCL is idle.
            deadline: by ``time.monotonic``.
            given_up: why there is no sense in waiting, if there is none.

        Raises:
            NcclError: see there; the communicator must be aborted.
        """
        state = ctypes.c_int()
        while True:
            _check(_library().ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
            _check(state.value)
            if state.value != _IN_PROGRESS and done():
                return
            if why := given_up():
                raise NcclError(why)
            if time.monotonic() > deadline:
                raise NcclError("a peer did not take part in time")
            time.sleep(_POLL_S)

    def abort(self) -> None:
        """End the group on this side; kernels that wait for a peer end too."""
        if self._comm:
            _library().ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")  # the one that torch has loaded
    except OSError as error:
        raise NcclError(f"there is no NCCL: {error}") from None
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _check(code: int) -> None:
    if code not in (0, _IN_PROGRESS):
        raise NcclError(f"NCCL says: {_library().ncclGetErrorString(code).decode()} ({code})")

"""Memory of a GPU that two processes share, by CUDA's driver API; no torch, nothing to compile.

A handle is 64 opaque bytes (``CUipcMemHandle``, the same as ``cudaIpcMemHandle_t``), good for any
other process of the host that sees the GPU. The caller has made the device's context current, as
any use of the GPU by torch does for its thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class CudaError(RuntimeError):
    """The driver refused."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class DeviceMemory:
    """Bytes on a GPU, freed or unmapped when nobody refers to them any more.

    Tensors over it are made with ``torch.as_tensor``, and keep it.

    Args:
        pointer: address on the device.
        nbytes: size.
        mapped: it is another process's.

    Attributes:
        pointer, nbytes: see above.
    """

    def __init__(self, pointer: int, nbytes: int, *, mapped: bool) -> None:
        self.pointer, self.nbytes, self._mapped = pointer, nbytes, mapped

    @classmethod
    def allocate(cls, nbytes: int) -> DeviceMemory:
        """New memory on the current device, apart from any allocator's pools.

        Raises:
            CudaError: there is too little.
        """
        pointer = ctypes.c_uint64()
        _check(_driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)))
        return cls(pointer.value, nbytes, mapped=False)

    @classmethod
    def opened(cls, handle: bytes, nbytes: int) -> DeviceMemory:
        """Another process's memory, of the current device.

        Raises:
            CudaError: the handle is no good here.
        """
        pointer = ctypes.c_uint64()
        raw = _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        _check(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), raw, flags))
        return cls(pointer.value, nbytes, mapped=True)

    def handle(self) -> bytes:
        """What another process opens it with."""
        raw = _Handle()
        _check(_driver().cuIpcGetMemHandle(ctypes.byref(raw), ctypes.c_uint64(self.pointer)))
        return bytes(raw.reserved)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        free = _driver().cuIpcCloseMemHandle if self._mapped else _driver().cuMemFree_v2
        free(ctypes.c_uint64(self.pointer))  # whatever it says, nobody is left to be told


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"there is no CUDA driver: {error}") from None


def _check(code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise CudaError(f"CUDA's driver says {(name.value or b'?').decode()} ({code})")

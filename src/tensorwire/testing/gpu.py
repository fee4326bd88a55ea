"""Uses a GPU without torch, for checks: memory and streams by the driver.

Works with NVIDIA's driver and with a stand-in for it (TENSORWIRE_CUDA_LIBRARY) alike.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL(os.environ.get("TENSORWIRE_CUDA_LIBRARY") or "libcuda.so.1")


def _call(function: str, *args: Any) -> None:
    result = getattr(_driver(), function)(*args)
    if result != 0:
        raise RuntimeError(f"{function} gave {result}")


def missing_gpu() -> str:
    """Returns why no GPU can be used here, "" if one can."""
    try:
        count = ctypes.c_int()
        for function, args in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
            if result := getattr(_driver(), function)(*args):
                return f"no GPU: {function} gave {result}"
    except (OSError, AttributeError) as error:
        return f"no NVIDIA driver: {error}"
    return "" if count.value else "no GPU"


@functools.cache
def _context(gpu: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), gpu)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _enter(gpu: int) -> None:
    _call("cuCtxSetCurrent", _context(gpu))


class GpuArray:
    """Bytes on a GPU that no Node knows, as an array library would have them.

    Attributes:
        nbytes: its length.
        gpu: the number of the GPU.
    """

    def __init__(self, content: int | bytes | NDArray[Any], gpu: int = 0) -> None:
        self.gpu = gpu
        data = None if isinstance(content, int) else np.frombuffer(content, np.uint8)
        self.nbytes = content if isinstance(content, int) else data.nbytes  # type: ignore[union-attr]
        self._address = ctypes.c_uint64()
        _enter(gpu)
        _call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(max(1, self.nbytes)))
        if data is not None:
            self.fill(data.tobytes())

    def __del__(self) -> None:
        if self._address.value:
            _enter(self.gpu)
            _call("cuMemFree_v2", self._address)

    @property
    def address(self) -> int:
        """The address of the memory."""
        return self._address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The description of the memory that array libraries exchange."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def fill(self, data: bytes, start: int = 0) -> None:
        """Puts bytes there, and waits for it."""
        poke(self.address + start, data, self.gpu)

    def tobytes(self) -> bytes:
        """Returns the bytes that are there now."""
        return peek(self.address, self.nbytes, self.gpu)

    def __getitem__(self, piece: slice) -> _GpuSlice:
        start, stop, _ = piece.indices(self.nbytes)
        return _GpuSlice(self, start, max(0, stop - start))


class _GpuSlice:
    def __init__(self, whole: GpuArray, start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._whole = whole
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (whole.address + start, False),
            "version": 3,
        }


class _PinnedBytes:
    def __init__(self, size_bytes: int) -> None:
        self._address = ctypes.c_void_p()
        _enter(0)
        _call("cuMemHostAlloc", ctypes.byref(self._address), ctypes.c_size_t(size_bytes), 1)
        self.memory = (ctypes.c_uint8 * size_bytes).from_address(self._address.value or 0)

    def __del__(self) -> None:
        if self._address.value:
            _enter(0)
            _call("cuMemFreeHost", self._address)


def pinned_array(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a copy of these bytes in pinned memory of the host."""
    pinned = _PinnedBytes(max(1, data.nbytes))
    pinned.memory.keep = pinned  # type: ignore[attr-defined]
    array = np.ctypeslib.as_array(pinned.memory)[: data.nbytes]
    array[:] = data.reshape(-1)
    return array


def peek(address: int, size_bytes: int, gpu: int = 0) -> bytes:
    """Returns the bytes at an address of a GPU."""
    target = ctypes.create_string_buffer(max(1, size_bytes))
    _enter(gpu)
    if size_bytes:
        _call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
    return target.raw[:size_bytes]


def poke(address: int, data: bytes, gpu: int = 0) -> None:
    """Puts bytes at an address of a GPU, and waits until they are there."""
    _enter(gpu)
    if data:
        _call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
        _call("cuCtxSynchronize")


class GpuStream:
    """A stream of a GPU on which a test puts work.

    Args:
        gpu: its number.
        blocking: the legacy default stream and this one wait for each other.

    Attributes:
        cuda_stream: the driver's handle.
        device: as a torch.cuda.Stream tells it.
    """

    class _Device:
        def __init__(self, gpu: int) -> None:
            self.index = gpu

    def __init__(self, gpu: int = 0, blocking: bool = False) -> None:
        handle = ctypes.c_void_p()
        _enter(gpu)
        _call("cuStreamCreate", ctypes.byref(handle), 0 if blocking else 1)
        self.cuda_stream = int(handle.value or 0)
        self.device = self._Device(gpu)
        self._kept: list[Any] = []

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function of this process when all earlier work of the stream is done."""
        kept = _HostFunction(lambda _: function() and None)
        self._kept.append(kept)
        _enter(self.device.index)
        _call("cuLaunchHostFunc", ctypes.c_void_p(self.cuda_stream), kept, None)

    def pause(self, seconds: float) -> None:
        """Keeps the stream from its next work for some seconds."""
        self.call(lambda: time.sleep(seconds))

    def fill(self, array: GpuArray, value: int) -> None:
        """Gives all bytes of an array a value."""
        _enter(self.device.index)
        _call(
            "cuMemsetD8Async",
            ctypes.c_uint64(array.address),
            ctypes.c_ubyte(value),
            ctypes.c_size_t(array.nbytes),
            ctypes.c_void_p(self.cuda_stream),
        )

    def synchronize(self) -> None:
        """Waits for all work of the stream."""
        _enter(self.device.index)
        _call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))
        self._kept.clear()

    def close(self) -> None:
        """Ends the stream once all its work is done."""
        self.synchronize()
        _call("cuStreamDestroy_v2", ctypes.c_void_p(self.cuda_stream))

"""Copies tensors between the memory of a device and of the host.

Servers may keep parameters in the host's memory. The copy engines of a device then copy tensors
there and back, in a stream of their own, from and to memory whose pages are locked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tensorwire.errors import UnavailableError
from tensorwire.parameters import Bytes

KINDS = ("cpu", "cuda")
"""The kinds of devices that parameters can be on."""

# Tests of what is done for devices, where there is none: tensors of the CPU are treated alike.
_STAGES_CPU = os.environ.get("TENSORWIRE_STAGE_CPU") == "1"

_PAGE_BYTES = 4096
_PINNED_BYTES = 64 << 20  # torch keeps pinned memory for good; what is larger goes the slow way
_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…, in CUDA's driver API


def is_on_host(tensor: torch.Tensor) -> bool:
    """Tells whether the CPU computes with a tensor where it lies, so that no copy is needed."""
    return tensor.is_meta or (tensor.is_cpu and not _STAGES_CPU)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Returns the one device of the tensors that are not on the host; None if all are there.

    Raises:
        UnavailableError: there are several.
    """
    found = {tensor.device for tensor in tensors if not is_on_host(tensor)}
    if len(found) > 1:
        listed = ", ".join(sorted(map(str, found)))
        raise UnavailableError(
            f"parameters of one model are on {listed}; they can be on one device (and on the CPU "
            "besides): start a worker for each device"
        )
    return found.pop() if found else None


def host_tensor(memory: Bytes) -> torch.Tensor:
    """Returns a tensor over bytes that the caller keeps alive; read-only ones stay unwritten."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    there = (ctypes.c_ubyte * memory.nbytes).from_address(memory.ctypes.data)
    return torch.frombuffer(there, dtype=torch.uint8)


class _DeviceBytes:
    """Bytes of a device tensor, for `torch.as_tensor`, which then makes a storage of its own."""

    def __init__(self, whole: torch.Tensor, start: int, stop: int) -> None:
        self._whole = whole  # whose memory lives as long as this
        self.__cuda_array_interface__ = {
            "shape": (stop - start,),
            "typestr": "|u1",
            "data": (whole.data_ptr() + start, False),
            "strides": None,
            "version": 3,
        }


def part_of(whole: torch.Tensor, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """Returns bytes [start, stop) of `whole`, of uint8, in the form of `like`.

    Its storage has no other bytes. The memory belongs to `whole`, and lives as long as either.
    """
    if start == stop:
        return torch.empty_strided(
            like.size(), like.stride(), dtype=like.dtype, device=whole.device
        )
    if whole.device.type == "cpu":
        part = torch.frombuffer(whole.numpy()[start:stop], dtype=torch.uint8)
    else:
        part = torch.as_tensor(_DeviceBytes(whole, start, stop), device=whole.device)
    return part.view(like.dtype).as_strided(like.size(), like.stride())


class CopyStream:
    """A stream in which a device copies to the host beside its computations. One thread at a time.

    Args:
        device: that copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._is_cuda = device.type == "cuda"
        self._index = torch.cuda._utils._get_device_index(device, True) if self._is_cuda else 0
        options = {"device": device} if self._is_cuda else {}
        self._stream = self._module.Stream(**options)

    def current(self) -> int:
        """Returns the number of the stream that the device works for now; quick."""
        return torch._C._cuda_getCurrentRawStream(self._index) if self._is_cuda else 0

    def to_host(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], behind: int | None = None
    ) -> Any:
        """Starts to copy tensors to the host's memory, as a stream leaves them.

        Their memory is not given to others before that is done.

        Args:
            copies: each a target and a source.
            behind: the number of the stream to copy after; None: the current one.

        Returns:
            An event; `synchronize()` of it returns when the targets are there.
        """
        stream = self._stream
        self._wait_for(self.current() if behind is None else behind)
        with self._module.stream(stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                if self._is_cuda:
                    source.record_stream(stream)
        return self.mark(stream)

    def bring(
        self, work: Callable[[], Sequence[torch.Tensor]], behind: Iterable[int]
    ) -> list[torch.Tensor]:
        """Gives the device some work, after the present work of some streams, and waits for it.

        Args:
            work: gives the device what to do; its tensors stay as they are meanwhile.
            behind: the numbers of the streams to work after.

        Returns:
            What `work` returns, in new memory of the host.
        """
        for number in set(behind):
            self._wait_for(number)
        with self._module.stream(self._stream):
            found = [
                each.to("cpu", non_blocking=each.nbytes <= _PINNED_BYTES, copy=True)
                for each in work()
            ]
        self.mark(self._stream).synchronize()
        return found

    def _wait_for(self, number: int) -> None:
        """Makes later work of this stream wait for the present work of another one."""
        if not self._is_cuda:
            return
        if number:
            other = torch.cuda.ExternalStream(number, self._device)
        else:  # for which ExternalStream makes a new one
            other = torch.cuda.default_stream(self._device)
        self._stream.wait_stream(other)

    def mark(self, stream: Any = None) -> Any:
        """Returns an event after the present work of a stream, or of the current one."""
        event = self._module.Event()
        if stream is None:
            stream = self._module.current_stream(self._index if self._is_cuda else None)
        event.record(stream)
        return event


class PageLocks:
    """Memory of the host whose pages are locked, so that a device's copy engine reaches it.

    Copies from and to other memory go by way of a buffer of the driver, at a fraction of the speed,
    and the caller waits for them.

    Args:
        device: that copies.

    Attributes:
        why_not: why memory could not be locked; "" if all was.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: list[tuple[int, list[Bytes]]] = []  # the memory stays until it is let go
        self.why_not = ""
        self._driver: Any = None
        if device.type == "cuda":
            self._driver = ctypes.CDLL("libcuda.so.1")  # torch has loaded it
        # Else the driver would take other memory at these addresses for locked.
        self._unlock = weakref.finalize(self, _unlock, self._driver, self._locked)
        self._unlock.atexit = False

    def lock(self, memories: Iterable[Bytes]) -> None:
        """Locks the pages of some memory; those that are close to each other together.

        It begins on a page, or is a part of memory that does and is locked whole: the driver copies
        nothing that is locked in part, and no other memory may be on its pages.
        """
        spans: list[tuple[int, int, list[Bytes]]] = []
        for memory in sorted(memories, key=lambda each: each.ctypes.data):
            if not memory.nbytes:
                continue
            start = memory.ctypes.data // _PAGE_BYTES * _PAGE_BYTES
            stop = -(-(memory.ctypes.data + memory.nbytes) // _PAGE_BYTES) * _PAGE_BYTES
            if spans and start <= spans[-1][1]:
                first, last, held = spans.pop()
                spans.append((first, max(last, stop), [*held, memory]))
            else:
                spans.append((start, stop, [memory]))
        for start, stop, held in spans if self._driver is not None else ():
            self._lock(start, stop, held)

    def _lock(self, start: int, stop: int, held: list[Bytes]) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().query()  # this thread has the device's context
            for flags in (_PORTABLE, _PORTABLE | _READ_ONLY):
                error = self._driver.cuMemHostRegister_v2(
                    ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ctypes.c_uint(flags)
                )
                if error == 0:
                    self._locked.append((start, held))
                    return
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(error, ctypes.byref(text))
        said = (text.value or b"").decode()
        self.why_not = f"the driver does not lock its pages: {said or error}"

    def release(self) -> None:
        """Unlocks the pages, before their memory is freed; no copy may be under way."""
        _unlock(self._driver, self._locked)


def _unlock(driver: Any, locked: list[tuple[int, list[Bytes]]]) -> None:
    for start, _ in locked:
        driver.cuMemHostUnregister(ctypes.c_void_p(start))
    locked.clear()


def locked_memory(size_bytes: int, locks: PageLocks) -> Bytes:
    """Returns zeroed memory of this process whose pages are locked, and have nothing else."""
    memory = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8)[:size_bytes]
    locks.lock([memory])
    return memory

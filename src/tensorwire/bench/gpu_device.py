"""Runs the pair of processes in which transfers that involve a GPU are measured.

Both processes use one GPU. The driver writes to memory of the target, from Python and from C++;
the limit is NVIDIA's cuMemcpyAsync, waited for, between the very addresses that a write reaches.
Beside the write from Python, `Tensor.copy_` of torch between the same addresses is measured.
Kinds of memory: "gpu", "host" (pages of the host that nobody has pinned) and "pinned".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tensorwire.bench import device
from tensorwire.bench.harness import time_each
from tensorwire.bench.operations import (
    COPY_ENGINE,
    CPP,
    PATIENCE_S,
    PYTHON,
    TORCH_COPY,
    Runner,
    loops,
)
from tensorwire.bench.processes import serve_messages
from tensorwire.memory import Node, RemoteRegion
from tensorwire.memory.core import core_of

_DEVICE, _GPU = "cuda:0", 0
_TARGETS = {"gpu": "bench-target-gpu", "pinned": "bench-target-host"}


class Driver(device.Driver):
    """The measured side; see `device.Driver`, of which it has the timing.

    `options`: size_bytes (of the largest case).
    """

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        self._link = link
        self._target_pid = int(link.recv())
        self._node = Node("bench-driver", transports=["shm"])
        self._size = int(options["size_bytes"])
        self._peer = self._node.connect(self._tell("address"))
        self._client = None
        self._runners: dict[str, Runner] = {}
        self._batches: dict[str, int] = {}
        self._near: dict[str, tuple[Any, int]] = {}

    def _memory_of(self, kind: str) -> tuple[Any, int]:
        """Returns memory of a kind and its address; with torch it is a tensor, as users have it."""
        if kind not in self._near:
            self._near[kind] = self._new_memory(kind)
        return self._near[kind]

    def _new_memory(self, kind: str) -> tuple[Any, int]:
        if kind == "host":
            array = np.ones(self._size, np.uint8)
            return array, array.ctypes.data
        torch = _torch_with_cuda()
        if torch is None:
            region = self._node.allocate(
                self._size, access="none", device=_DEVICE if kind == "gpu" else None
            )
            return region, int(core_of(region).address)
        where = {"device": _DEVICE} if kind == "gpu" else {"pin_memory": True}
        tensor = torch.ones(self._size, dtype=torch.uint8, **where)
        torch.cuda.synchronize()
        return tensor, int(tensor.data_ptr())

    def prepare(self, case: str, size_bytes: int) -> list[str]:
        """Prepares a case such as "write_gpu_to_pinned"; returns the systems that can run it."""
        _, near_kind, _, far_kind = case.split("_")
        whole, address = self._memory_of(near_kind)
        near, far = whole[:size_bytes], self._peer.region(_TARGETS[far_kind])[:size_bytes]
        prepared = self._peer.prepare_write([near], [far])
        far.write(near).wait(PATIENCE_S)  # pins memory of the host
        self._runners = {
            PYTHON: lambda count, batch: time_each(lambda: far.write(near).wait(PATIENCE_S), count),
            CPP: partial(loops.start_complete, core_of(prepared), []),
        }
        if (copy := _copy_of_torch(near, _address(far), far_kind)) is not None:
            self._runners[TORCH_COPY] = lambda count, batch: time_each(copy, count)
        self._runners[COPY_ENGINE] = partial(
            loops.gpu_copies, _GPU, _address(far), address, size_bytes
        )
        self._batches = {}
        return list(self._runners)

    def close(self) -> None:
        """Ends the connection and the node."""
        self._link.send(("stop",))
        self._node.close()
        os._exit(0)


def _address(remote: RemoteRegion) -> int:
    return int(loops.mapped_address(core_of(remote)))


class _Mapped:
    """The target's memory on the GPU, for `torch.as_tensor`."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _copy_of_torch(near: Any, address: int, far_kind: str) -> Callable[[], None] | None:
    """Returns a function that copies to the target's memory by torch; None without CUDA."""
    torch = _torch_with_cuda()
    if torch is None:
        return None
    size_bytes = near.nbytes
    source = torch.from_numpy(near) if isinstance(near, np.ndarray) else near
    if far_kind == "gpu":
        target = torch.as_tensor(_Mapped(address, size_bytes), device=_DEVICE)
    else:
        target = torch.frombuffer(
            (ctypes.c_ubyte * size_bytes).from_address(address), dtype=source.dtype
        )
    stream = torch.cuda.current_stream()

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        stream.synchronize()

    return copy


def _torch_with_cuda() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Runs the target: owns the memory, and does nothing."""
    node = Node("bench-target", transports=["shm"])
    for kind, name in _TARGETS.items():
        node.allocate(
            int(options["size_bytes"]), name=name, device=_DEVICE if kind == "gpu" else None
        )
    handlers: dict[str, Callable[..., object]] = {"address": lambda: node.address}
    try:
        serve_messages(link, handlers)
    finally:
        node.close()
    os._exit(0)

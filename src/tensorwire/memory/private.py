"""Maps shared memory copy-on-write: writes of others appear, own writes stay private.

For memory that a script may reach by accident and must not change for others. Knows no peers: a
`Region` or `RemoteRegion` makes one of its memory, and `local_memory` of memory without a Node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tensorwire import _core

from .buffers import array_over


class PrivateMapping:
    """A private mapping (mmap's MAP_PRIVATE) of a whole region, writable.

    Made by `Region.private`, `RemoteRegion.private` and `local_memory`. It shows what others write
    until this process writes to a page here: that page becomes this process's own copy, which no
    longer follows. `written` finds such pages, `revert` lets go of them. It keeps the memory alive;
    arrays over it keep the mapping alive. One thread at a time calls its methods.

    Attributes:
        size_bytes: of the region.
        compares: the kernel does not tell which pages were written here, so `written` compares a
            part of them per call.
    """

    __slots__ = ("__weakref__", "_core", "compares", "size_bytes")

    def __init__(self, core: _core.PrivateMapping) -> None:
        self._core = core
        self.size_bytes = core.size_bytes
        self.compares = not told_by_kernel()

    def memoryview(self) -> memoryview:
        """Returns the bytes, writable.

        Raises:
            ClosedError: this process was forked from the one that made the mapping.
        """
        core: Any = self._core  # before Python 3.12 stubs cannot say that it is a buffer
        return memoryview(core)

    def array(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None
    ) -> NDArray[Any]:
        """Returns a writable numpy array over the mapping; arguments as for `Region.array`."""
        return array_over(self, dtype, shape)

    def written(self) -> list[tuple[int, int]]:
        """Returns [start, stop) in bytes of the pages that this process has written to, rising.

        Also pages whose bytes were overwritten with the same ones. Takes about 1 ns per page of
        the mapping where the kernel notes writes (Linux 6.7, userfaultfd allowed, no large pages of
        shared memory), else 25. Where `compares`, a call sees a 32nd of the pages, in turn, and
        only those whose bytes differ.

        Raises:
            UnavailableError: the kernel has stopped telling.
            ClosedError: in a forked child.
        """
        return self._core.written(self.compares)

    def revert(self) -> None:
        """Makes all bytes equal to the shared memory again; they follow its changes.

        Raises:
            UnavailableError: the pages are locked (mlockall).
            ClosedError: in a forked child.
        """
        self._core.revert()


def told_by_kernel() -> bool:
    """Tells whether the kernel can list the pages that a process has written (tried here)."""
    return _core.PrivateMapping.told_by_kernel


def memory_file(name: str, size_bytes: int) -> int:
    """Makes a memfd that has no pages yet and can be sealed; the caller closes it.

    Raises:
        MemoryError, BusyError, UnavailableError: see `local_memory`.
    """
    descriptor: int = _core.memory_file(name, size_bytes)
    return descriptor


def local_memory(size_bytes: int) -> tuple[NDArray[Any], PrivateMapping]:
    """Returns zeroed memory of this process, as uint8, and a private mapping of it.

    Both begin on a page boundary.

    Raises:
        MemoryError, BusyError: no memory, or no descriptor for it.
        UnavailableError: the system refuses memfd_create; the message says what to do.
    """
    memory: Any = _core.LocalMemory(size_bytes)
    private = PrivateMapping(memory.map_private())
    return np.ndarray(size_bytes, np.uint8, buffer=memoryview(memory)), private

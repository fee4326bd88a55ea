"""Allocates bytes that are filled before other code sees them, as targets of reads.

Many fresh bytes come in large pages, where the system has them. Filling 64 MiB of Python's own
takes several times as long, nearly all of it in page faults.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire._core import Buffer, copied_bytes, unfilled_bytes

from .gpu import OnStream


class FreshBytes:
    """Bytes with any content, which transfers fill piece by piece.

    Args:
        size_bytes: how many.
    """

    def __init__(self, size_bytes: int) -> None:
        self._data, self._address = unfilled_bytes(size_bytes)
        self._size_bytes = size_bytes

    def __getitem__(self, piece: slice) -> FreshPiece:
        """Returns the bytes [a:b], to be filled by `RemoteRegion.read`.

        Raises:
            ValueError: not 0 <= a <= b <= size, or a step.
        """
        start, stop, step = piece.start or 0, piece.stop, piece.step
        stop = self._size_bytes if stop is None else stop
        if not 0 <= start <= stop <= self._size_bytes or step is not None:
            raise ValueError(
                f"[{start}:{stop}{'' if step is None else f':{step}'}] is not a slice within "
                f"{self._size_bytes} bytes: use 0 <= start <= stop <= {self._size_bytes}, no step"
            )
        return FreshPiece(Buffer(self._address + start, stop - start, True, self._data))

    def fill(self, at: int, memory: NDArray[np.uint8]) -> None:
        """Copies contiguous memory of this process to the bytes from `at` on. Releases the GIL.

        Raises:
            ValueError: it does not fit there.
        """
        if not 0 <= at <= at + memory.nbytes <= self._size_bytes:
            raise ValueError(
                f"{memory.nbytes} bytes do not fit at offset {at} of {self._size_bytes} bytes"
            )
        ctypes.memmove(self._address + at, memory.ctypes.data, memory.nbytes)

    def take(self) -> bytes:
        """Returns the bytes; nothing may fill them from now on."""
        return self._data


class FreshPiece:
    """A part of `FreshBytes`.

    Attributes:
        size_bytes: of the part.
    """

    __slots__ = ("_buffer", "size_bytes")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.size_bytes: int = buffer.size_bytes

    def _local_buffer(self) -> tuple[Buffer, OnStream | None]:
        return self._buffer, None


def copied(memory: Any) -> bytes:
    """Returns bytes(memory) of contiguous memory; a large copy releases the GIL.

    Raises:
        TypeError, ValueError: as for `RemoteRegion.write`.
    """
    return copied_bytes(memory)

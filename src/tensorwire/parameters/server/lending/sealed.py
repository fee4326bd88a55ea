"""Allocates memory that is written once, sealed and lent: snapshots for readers lie in it.

It is written as a file is: no page is zeroed or mapped before it is filled, and no mapping for
writing ever exists.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tensorwire import _core
from tensorwire.memory import Node, memory_file
from tensorwire.memory.lent import LentRegion

from ...messages import Bytes
from .room import check_room
from .spare import whole_pages

_CHUNK_BYTES = 8 << 20
_BLOCK_BYTES = 512  # of st_blocks
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SealedMemory:
    """Memory with these pieces, which peers of a Node read by its name.

    Args:
        node: that lends it.
        name: of the region.
        size_bytes: at least 1.
        pieces: where each goes, and its bytes; what lies between them is zero.
        threads: that write.
        go_on: called often; what it raises ends the writing.
        spare: memory to write to, as `SpareMemory.take` gives it, of whole pages for that size;
            owned. None: fresh memory.

    Attributes:
        size_bytes: of it.
        descriptor: of the memory, for reading alone, until `free`.

    Raises:
        MemoryError: the system has not enough, or would have next to nothing left.
        BusyError: no descriptor is left, or the Node has as many regions as it can have.
        ClosedError: the Node was closed.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        size_bytes: int,
        pieces: Iterable[tuple[int, Bytes]],
        threads: int,
        go_on: Callable[[], None],
        spare: int | None = None,
    ) -> None:
        self.size_bytes, self.descriptor = size_bytes, -1
        pages = whole_pages(size_bytes)
        writing = memory_file("tensorwire snapshot", pages) if spare is None else spare
        try:
            limit, what = _core.memory_limit()
            if size_bytes > limit:
                raise MemoryError(f"{size_bytes} bytes are more than {what} ({limit} bytes)")
            check_room(max(size_bytes - os.fstat(writing).st_blocks * _BLOCK_BYTES, 0))
            _write(writing, pieces, threads, go_on)
            fcntl.fcntl(writing, fcntl.F_ADD_SEALS, _SEALS)
            # One for reading alone, as is wanted for lending.
            self.descriptor = os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
            self._lent: LentRegion = node.lend(self.descriptor, name=name, size_bytes=size_bytes)
        except BaseException as error:
            self._close()
            if isinstance(error, OSError) and error.errno is not None:
                text = f"{size_bytes} bytes of memory cannot be had: {error.strerror}"
                raise MemoryError(text) from error
            raise
        finally:
            os.close(writing)

    def free(self) -> None:
        """Takes the memory away from new peers; it goes when the last one has unmapped it."""
        self._lent.free()
        self._close()

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _write(
    descriptor: int,
    pieces: Iterable[tuple[int, Bytes]],
    threads: int,
    go_on: Callable[[], None],
) -> None:
    def write(chunk: tuple[int, Bytes]) -> None:
        go_on()
        at, data = chunk
        while len(data):
            done = os.pwrite(descriptor, data.data, at)
            at, data = at + done, data[done:]

    chunks = list(_chunks(pieces))
    if threads == 1 or len(chunks) < 2 * threads:
        for chunk in chunks:
            write(chunk)
        return
    with ThreadPoolExecutor(threads, "tensorwire-snapshot") as pool:
        list(pool.map(write, chunks))


def _chunks(pieces: Iterable[tuple[int, Bytes]]) -> Iterator[tuple[int, Bytes]]:
    for at, data in pieces:
        for start in range(0, len(data), _CHUNK_BYTES):
            yield at + start, data[start : start + _CHUNK_BYTES]

"""Makes calls by hand: the limit of `bench rpc` between two processes.

Both know each other's memory and the sizes of the buffers. On shm each copies the buffers into
shared memory and wakes the other by an eventfd; on tcp each sends them on one socket. Both read
every byte, in place or in fresh bytes objects. Nothing is framed, serialized, dispatched or
checked.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.memory.fresh import copied

Look = Callable[[Any], object]
"""A function that reads every byte of a buffer."""
Array = NDArray[np.uint8]
Buffers = Sequence[Any]
Take = Callable[[Sequence[Array]], Buffers]
"""A function from received buffers to the buffers that are read and sent back."""


def in_place(arrived: Sequence[Array]) -> Buffers:
    """Returns the buffers themselves."""
    return arrived


def as_bytes(arrived: Sequence[Array]) -> Buffers:
    """Returns a fresh bytes object of each buffer."""
    return [copied(each) for each in arrived]


_PAGE = mmap.PAGESIZE
_CALL, _END = 1, 2


def _span(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


class _HandMemory:
    """Shared memory for the buffers of both directions, and an eventfd for each direction.

    Args:
        sizes: of the buffers, in bytes.
        descriptors: of the memory and the eventfds; owned from now on.
    """

    def __init__(self, sizes: Sequence[int], descriptors: Sequence[int]) -> None:
        file, self.asked, self.answered = descriptors
        memory = mmap.mmap(file, 2 * sum(map(_span, sizes)))
        os.close(file)
        self.there: list[Array] = []
        self.back: list[Array] = []
        at = 0
        for side in (self.there, self.back):
            for size in sizes:
                side.append(np.frombuffer(memory, np.uint8, size, at))
                at += _span(size)

    def close(self) -> None:
        """Closes the eventfds; the memory is freed with the arrays."""
        os.close(self.asked)
        os.close(self.answered)


def _answer_by_memory(memory: _HandMemory, take: Take, look: Look) -> None:
    while os.eventfd_read(memory.asked) != _END:
        buffers = take(memory.there)
        for each in buffers:
            look(each)
        for back, each in zip(memory.back, buffers, strict=True):
            np.copyto(back, np.frombuffer(each, np.uint8))
        os.eventfd_write(memory.answered, 1)
    memory.close()


def _received(connection: socket.socket, buffers: Sequence[Array]) -> bool:
    """Fills the buffers; returns False if the other end has closed."""
    for each in buffers:
        view = each.data
        while view:
            size = connection.recv_into(view)
            if size == 0:
                return False
            view = view[size:]
    return True


def _answer_by_socket(
    listener: socket.socket, sizes: Sequence[int], take: Take, look: Look
) -> None:
    arrived = [np.empty(size, np.uint8) for size in sizes]
    with listener, listener.accept()[0] as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _received(connection, arrived):
            buffers = take(arrived)
            for each in buffers:
                look(each)
            for each in buffers:
                connection.sendall(memoryview(each))


class HandServer:
    """The server's end: a thread for each set of buffers, until the client closes it.

    Args:
        link: to the client.
        look: reads a received buffer.
    """

    def __init__(self, link: Connection, look: Look) -> None:
        self._link = link
        self._look = look

    def begin(self, wire: str, sizes: Sequence[int], take: Take) -> int:
        """Starts to answer calls with buffers of these sizes; returns the port, or 0 for shm."""
        port = 0
        if wire == "shm":
            memory = _HandMemory(sizes, [reduction.recv_handle(self._link) for _ in range(3)])
            work: tuple[Any, ...] = (_answer_by_memory, memory, take, self._look)
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            work = (_answer_by_socket, listener, sizes, take, self._look)
        threading.Thread(target=work[0], args=work[1:], name="by-hand", daemon=True).start()
        return port


@contextlib.contextmanager
def calls_by_hand(
    link: Connection, wire: str, parts: Sequence[Array], take: Take, look: Look
) -> Iterator[Callable[[], None]]:
    """Yields a function that calls the server with these buffers.

    Args:
        link: to the server.
        wire: "shm" or "tcp".
        parts: the buffers.
        take: `in_place` or `as_bytes`, used at both ends.
        look: reads a buffer of the answer.
    """
    sizes = [part.nbytes for part in parts]
    link.send(("by_hand", wire, sizes, take))
    if wire == "shm":
        file = os.memfd_create("by-hand")
        os.ftruncate(file, 2 * sum(map(_span, sizes)))
        descriptors = [file, os.eventfd(0), os.eventfd(0)]
        for each in descriptors:
            reduction.send_handle(link, each, os.getppid())
        memory = _HandMemory(sizes, descriptors)
        link.recv()

        def call() -> None:
            for there, part in zip(memory.there, parts, strict=True):
                np.copyto(there, part)
            os.eventfd_write(memory.asked, _CALL)
            os.eventfd_read(memory.answered)
            for each in take(memory.back):
                look(each)

        try:
            yield call
        finally:
            os.eventfd_write(memory.asked, _END)
            memory.close()
        return
    arrived = [np.empty_like(part) for part in parts]
    with socket.create_connection(("127.0.0.1", link.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def call_by_socket() -> None:
            for part in parts:
                connection.sendall(part.data)
            if not _received(connection, arrived):
                raise ConnectionError("the server has closed the socket")
            for each in take(arrived):
                look(each)

        yield call_by_socket

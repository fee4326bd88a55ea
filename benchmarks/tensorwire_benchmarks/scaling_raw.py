"""Makes the steps of `scaling.py` with plain sockets: the limit set by links and arrivals.

Workers sleep like the workers of `scaling_worker.py`, and send as many bytes at the same times,
each gradient in equal shares to all servers. A server that has all bytes of a step, in sync from
every worker, sends its share of the parameters back. Nothing is computed, and no byte is read. A
connection begins with the size of a share in bytes, and whether the mode is sync.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import queue
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from tensorwire_benchmarks import worker
from tensorwire_benchmarks.scaling_worker import Replayer
from tensorwire_benchmarks.traffic import FLOAT_BYTES

serve = worker.serve
_CHUNK = 1 << 18
_HEAD = struct.Struct("<Q?")


def shares(size_bytes: int, count: int) -> list[int]:
    """Returns the bytes of a gradient for each of `count` servers."""
    cuts = [size_bytes * index // count for index in range(count + 1)]
    return [stop - start for start, stop in itertools.pairwise(cuts)]


class Driver(Replayer):
    """A worker with a connection to each server, and a sending thread for each."""

    def begin(self, plan: dict[str, Any]) -> None:
        """Connects, and sends all bytes once, as a job does that publishes its first values."""
        self._sizes = [FLOAT_BYTES * math.prod(shape) for _, shape in plan["tensors"]]
        parts = (shares(size, len(self._addresses)) for size in self._sizes)
        self._pulled = [sum(each) for each in zip(*parts, strict=True)]
        self._sockets: list[socket.socket] = []
        self._queues: list[queue.SimpleQueue[int]] = []
        self._selector = selectors.DefaultSelector()
        self._memory = bytearray(_CHUNK)
        for address, share in zip(self._addresses, self._pulled, strict=True):
            host, _, port = address.rpartition(":")
            each = socket.create_connection((host, int(port)))
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.sendall(_HEAD.pack(share, plan["mode"] == "sync"))
            self._selector.register(each, selectors.EVENT_READ)
            self._sockets.append(each)
            self._queues.append(queue.SimpleQueue())
            threading.Thread(target=_send, args=(each, self._queues[-1]), daemon=True).start()
        for tensor in range(len(self._sizes)):
            self.push(tensor)
        self.advance()

    def push(self, tensor: int) -> None:
        """Lets the threads send the shares of a gradient."""
        parts = shares(self._sizes[tensor], len(self._queues))
        for each, share in zip(self._queues, parts, strict=True):
            each.put(share)

    def advance(self) -> None:
        """Waits for the parameters from all servers."""
        left = dict(zip(self._sockets, self._pulled, strict=True))
        while any(left.values()):
            for key, _ in self._selector.select():
                each = key.fileobj
                assert isinstance(each, socket.socket)
                got = each.recv_into(self._memory, min(_CHUNK, left[each]))
                if got == 0:
                    raise ConnectionError("a server of plain sockets has closed its connection")
                left[each] -= got

    def leave(self) -> None:
        """Closes the connections."""
        for each in self._sockets:
            each.close()


def _send(connection: socket.socket, sizes: queue.SimpleQueue[int]) -> None:
    memory = memoryview(bytes(_CHUNK))
    while True:
        left = sizes.get()
        while left:
            left -= connection.send(memory[: min(_CHUNK, left)])


def main(arguments: Sequence[str]) -> None:
    """Serves all workers until they have left."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--address-fd", type=int, required=True)
    options, _ = parser.parse_known_args(arguments)
    barrier = threading.Barrier(options.workers)
    host, _, port = options.listen.rpartition(":")
    with socket.create_server((host, int(port)), backlog=options.workers) as listener:
        os.write(options.address_fd, f"{host}:{listener.getsockname()[1]}\n".encode())
        os.close(options.address_fd)
        threads = []
        for _ in range(options.workers):
            connection = listener.accept()[0]
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads.append(threading.Thread(target=_answer, args=(connection, barrier)))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _answer(connection: socket.socket, barrier: threading.Barrier) -> None:
    memory, first = bytearray(_CHUNK), True
    with connection:
        share, sync = _HEAD.unpack(connection.recv(_HEAD.size, socket.MSG_WAITALL))
        parameters = bytes(share)
        while True:
            left = share
            while left:
                got = connection.recv_into(memory, min(_CHUNK, left))
                if got == 0:
                    return
                left -= got
            if sync or first:
                barrier.wait()
            first = False
            connection.sendall(parameters)

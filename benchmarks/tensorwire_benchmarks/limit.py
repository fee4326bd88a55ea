"""Measures the limit of an exchange: the time that the machine needs without any protocol.

A C loop on as many threads as tensorwire's server uses, in mapped and touched shared memory, reads
the gradients of all workers, parameters and state once and writes parameters and state once
(`bench_loops.exchange_limit`). Of parameters with sparse gradients only the rows that the batches
look up count (`Traffic`). They are contiguous here, while a server has to find them in its tables.

On tcp the limit includes the transfer: a raw C socket receives the gradients of each worker and
sends the parameters to each worker, of sparse ones rows with their indices, one worker after the
other as one thread would serve them. The kernel places all threads, as it does for the systems;
pinning the ends of the socket to separate cores was slower at every size. A system that sends
during backward has less to transfer after the last gradient, and may be faster than the limit.

Between two hosts (`link.py`) both directions are transferred at the same time, on a socket each:
the link is full duplex, and cores do not limit it.
"""

from __future__ import annotations

import math
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire._core import bench_loops
from tensorwire.bench.machine import process_cpu_seconds
from tensorwire.bench.processes import serve_messages
from tensorwire.bench.raw_socket import LOOPBACK, RawClient, RawServer
from tensorwire_benchmarks.link import Hosts
from tensorwire_benchmarks.traffic import FLOAT_BYTES, Traffic

STATES = {"plain-sgd": 0, "sgd": 1, "adamw": 2}
"""The number of arrays of optimizer state, by optimizer."""


Floats = NDArray[np.float32]


class LimitTimes(NamedTuple):
    """Seconds of one sample: the C loop, all gradients in, all parameters out.

    Between two hosts `into_s` is the time of both directions at once, and `out_s` is 0.
    """

    apply_s: float
    into_s: float
    out_s: float


def _memory(elements: int, value: float) -> Floats:
    """Returns a touched array in shared memory."""
    array = np.frombuffer(mmap.mmap(-1, FLOAT_BYTES * elements), np.float32)  # anonymous, shared
    array[:] = value
    return array


class Driver:
    """The process that runs the C loop, and the workers' end of the raw socket."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        self._target_pid = int(link.recv())
        self._traffic: Traffic = options["traffic"]
        self._workers = int(options["workers"])
        self._threads = int(options["threads"])
        values = [1.0, *([0.0] * STATES[options["optimizer"]]), *([1e-3] * self._workers)]
        self._arrays = [_memory(_elements(self._traffic), value) for value in values]
        self._clients: list[RawClient] = []
        hosts: Hosts | None = options["hosts"]
        self._duplex = ThreadPoolExecutor(2) if hosts is not None else None
        if hosts is not None:
            hosts[1].enter()
        host = LOOPBACK if hosts is None else hosts[0].address
        for mode, array, size_bytes in (
            ("send", self._arrays[-1], self._traffic.up_bytes),
            ("fetch", self._arrays[0], self._traffic.down_bytes),
        ):
            if options["wire"] != "shm":
                link.send(("listen", mode, size_bytes, host))
                port, token = link.recv()
                memory = array.view(np.uint8)[:size_bytes]
                self._clients.append(RawClient(host, port, token, mode, memory))

    def block(self, count: int) -> tuple[list[LimitTimes], float, float]:
        """Returns `count` samples, and the CPU seconds of this process and of the other end.

        One more sample runs first, unmeasured.
        """
        self._sample()
        local, remote = time.process_time(), process_cpu_seconds(self._target_pid)
        samples = [self._sample() for _ in range(count)]
        remote = process_cpu_seconds(self._target_pid) - remote
        return samples, time.process_time() - local, remote

    def _sample(self) -> LimitTimes:
        apply_s = self._apply()
        if self._duplex is not None:
            begin = time.monotonic()
            list(self._duplex.map(lambda client: client.run(self._workers), self._clients))
            return LimitTimes(apply_s, time.monotonic() - begin, 0.0)
        ways = [math.fsum(client.run(self._workers)) for client in self._clients]
        return LimitTimes(apply_s, *(ways or (0.0, 0.0)))

    def _apply(self) -> float:
        """Applies everything once: elements with gradients of one worker, of two, and so on."""
        seconds, at = 0.0, 0  # bytes
        for gradients, elements in enumerate(self._traffic.applied, 1):
            if elements:
                first, *others = (array.ctypes.data + at for array in self._arrays)
                states, mine = others[: -self._workers], others[-self._workers :]
                seconds += bench_loops.exchange_limit(
                    first, states, mine[:gradients], elements, self._threads, 1
                )[0]
                at += FLOAT_BYTES * elements
        return seconds

    def close(self) -> None:
        """Ends the sockets; the process ends right after it."""
        for client in self._clients:
            client.close()


def _elements(traffic: Traffic) -> int:
    """Returns the elements of an array with room for all that is applied or transferred."""
    carried = max(traffic.up_bytes, traffic.down_bytes)
    return max(1, traffic.elements, -(-carried // FLOAT_BYTES))


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Serves the server's end of the raw socket; on shm only waits for the end."""
    if options["hosts"] is not None:
        options["hosts"][0].enter()
    memory = _memory(_elements(options["traffic"]) if options["wire"] != "shm" else 1, 1.0)
    servers: list[RawServer] = []

    def listen(mode: str, size_bytes: int, host: str) -> tuple[int, str]:
        servers.append(RawServer(host))
        return servers[-1].listen(mode, size_bytes, memory)

    serve_messages(link, {"listen": listen})
    for server in servers:
        server.close()

"""What plain sockets make of the steps of `scaling.py`: the limit that links and arrivals set.

Workers sleep as those of `scaling_worker.py` do, and send as many bytes at the same moments, each
gradient in equal shares to all servers. A server that has all bytes of a step, in sync from every
worker, sends its share of the parameters back. Nobody computes anything or looks at the bytes.

    scaling_raw.py worker       reads the plan as `scaling_worker.py` does, with `addresses`
    scaling_raw.py server       reads a plan with `workers`, `sync`, `share`; prints its port
"""

from __future__ import annotations

import itertools
import json
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_CHUNK = 1 << 18


def main() -> None:
    """Runs one of the two."""
    plan = json.loads(sys.stdin.readline())
    {"worker": _work, "server": _serve}[sys.argv[1]](plan)


def shares(size_bytes: int, count: int) -> list[int]:
    """A gradient's bytes for each of so many servers."""
    cuts = [size_bytes * index // count for index in range(count + 1)]
    return [stop - start for start, stop in itertools.pairwise(cuts)]


# --- a worker -----------------------------------------------------------------------------------


class _Servers:
    """A connection to each server, with a thread that sends."""

    def __init__(self, addresses: list[list[Any]]) -> None:
        self.sockets = [socket.create_connection((host, port)) for host, port in addresses]
        self._queues: list[queue.SimpleQueue[int]] = []
        self._selector = selectors.DefaultSelector()
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(each, selectors.EVENT_READ)
            self._queues.append(queue.SimpleQueue())
            threading.Thread(target=_send, args=(each, self._queues[-1]), daemon=True).start()
        self._memory = bytearray(_CHUNK)

    def push(self, size_bytes: int) -> None:
        """Sends that many bytes, in equal shares, without waiting."""
        for each, share in zip(self._queues, shares(size_bytes, len(self._queues)), strict=True):
            each.put(share)

    def pull(self, sizes: list[int]) -> None:
        """Waits for so many bytes from each server."""
        left = dict(zip(self.sockets, sizes, strict=True))
        while any(left.values()):
            for key, _ in self._selector.select():
                each = key.fileobj
                assert isinstance(each, socket.socket)
                got = each.recv_into(self._memory, min(_CHUNK, left[each]))
                if got == 0:
                    raise ConnectionError("a server of plain sockets has closed its connection")
                left[each] -= got


def _send(connection: socket.socket, sizes: queue.SimpleQueue[int]) -> None:
    memory = memoryview(bytes(_CHUNK))
    while True:
        left = sizes.get()
        while left:
            left -= connection.send(memory[: min(_CHUNK, left)])


def _work(plan: dict[str, Any]) -> None:
    servers = _Servers(plan["addresses"])
    sizes: list[int] = plan["sizes"]
    pulled = [0] * len(servers.sockets)
    for size in sizes:
        for index, share in enumerate(shares(size, len(pulled))):
            pulled[index] += share
    for size in sizes:  # all workers begin together, as those of a job that publishes do
        servers.push(size)
    servers.pull(pulled)
    seconds, cpu_s = replay(
        plan, lambda tensor: servers.push(sizes[tensor]), lambda: servers.pull(pulled)
    )
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s}), flush=True)


def replay(
    plan: dict[str, Any], push: Callable[[int], object], advance: Callable[[], object]
) -> tuple[list[float], float]:
    """Sleeps where the steps of a plan computed; the seconds of each, and CPU seconds of all.

    Args:
        plan: its steps, and how many of them are made.
        push: sends a gradient, at the moment at which the recorded backward had made it.
        advance: ends a step.
    """
    seconds, steps = [], plan["steps"]
    cpu = time.process_time()
    for number in range(plan["count"]):
        step = steps[number % len(steps)]
        begin = time.monotonic()
        time.sleep(step["forward_s"])
        backward = time.monotonic()
        for tensor, at in step["ready"]:
            _sleep_until(backward + at)
            push(tensor)
        _sleep_until(backward + step["backward_s"])
        advance()
        seconds.append(time.monotonic() - begin)
    return seconds, time.process_time() - cpu


def _sleep_until(at: float) -> None:
    if (left := at - time.monotonic()) > 0:
        time.sleep(left)


# --- a server -----------------------------------------------------------------------------------


def _serve(plan: dict[str, Any]) -> None:
    workers, barrier = plan["workers"], threading.Barrier(plan["workers"])
    with socket.create_server((plan["host"], 0), backlog=workers) as listener:
        print(listener.getsockname()[1], flush=True)
        threads = []
        for _ in range(workers):
            connection = listener.accept()[0]
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arguments = connection, plan["share"], barrier, plan["sync"]
            threads.append(threading.Thread(target=_answer, args=arguments))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _answer(connection: socket.socket, share: int, barrier: threading.Barrier, sync: bool) -> None:
    memory = bytearray(_CHUNK)
    parameters = bytes(share)
    first = True
    with connection:
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


if __name__ == "__main__":
    main()

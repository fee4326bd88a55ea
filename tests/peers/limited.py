"""Process functions for test_limits.py: processes that the system grants little."""

import os
import resource
import time
from typing import Any

import numpy as np
from actor import PATIENCE_S, Actor, cpu_seconds, error_of, growth_since, memory_of, serve

from tensorwire import Node
from tensorwire.testing import Channel, Footprint


class Descriptors:
    """Leaves this process a number of descriptors that it can still open."""

    def __init__(self) -> None:
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._fill: list[int] = []

    def leave(self, count: int) -> None:
        # The limit is on numbers, so there must be no gap below.
        used = [int(name) for name in os.listdir("/proc/self/fd")]
        while True:
            self._fill.append(os.open("/dev/null", os.O_RDONLY))
            if self._fill[-1] > max(used):
                break
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._fill[-1] + 1 + count, self._hard))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._soft, self._hard))
        while self._fill:
            os.close(self._fill.pop())


def all_of_it(transports: list[str], address: str) -> None:
    """Opens everything that needs descriptors once, as a new Node does."""
    with Node("poor", transports=transports) as node:
        own = node.allocate(64, name="own")
        peer = node.connect(address, timeout_s=2.0)
        remote = peer.region("r")
        data, back = np.arange(8), np.zeros(8, int)
        remote.write(data).wait(PATIENCE_S)
        remote.read(back).wait(PATIENCE_S)
        assert (back == data).all()
        peer.allocate(4096).write(data).wait(PATIENCE_S)
        own.free()


def poor_client(
    channel: Channel, transports: list[str], address: str
) -> list[tuple[int, str, list[str]]]:
    """Tries everything with 0, 1, 2, ... descriptors to spare, until it works.

    Gives, for each number, the error, and what was not given back.
    """
    all_of_it(transports, address)  # imports and what is made once
    descriptors = Descriptors()
    seen = []
    for count in range(64):
        before = Footprint.now()
        descriptors.leave(count)
        try:
            error = words(error_of(all_of_it, transports, address))
        finally:
            descriptors.lift()
        all_of_it(transports, address)
        left = growth_since(before)
        seen.append((count, error, left))
        if not error:
            return seen
    return seen


def poor_node(channel: Channel, transports: list[str], address: str) -> list[tuple[int, str]]:
    """One more poor Node, which has all it needs to live; it must survive each attempt."""
    with Node("poor", transports=transports) as node:
        descriptors = Descriptors()

        def use() -> None:
            region = node.allocate(64)
            region.free()
            peer = node.connect(address, timeout_s=2.0)
            try:
                remote = peer.region("r")
                remote.write(b"x").wait(PATIENCE_S)
                peer.allocate(4096).write(b"y").wait(PATIENCE_S)
            finally:
                peer.close()

        use()
        seen = []
        for count in range(32):
            descriptors.leave(count)
            try:
                error = words(error_of(use))
            finally:
                descriptors.lift()
            use()
            seen.append((count, error))
            if not error:
                break
        return seen


def words(error: Exception | None) -> str:
    """An error as text, which holds nothing that the failed call had."""
    return "" if error is None else f"{type(error).__name__}: {error}"


class PoorActor(Actor):
    """An Actor whose limits a test can set."""

    def leave_descriptors(self, count: int) -> None:
        self._descriptors = Descriptors()
        self._cpu, self._since = cpu_seconds(), time.monotonic()
        self._descriptors.leave(count)

    def lift(self) -> tuple[float, float]:
        """Lifts the limit; gives the processor seconds and the seconds since it was set."""
        self._descriptors.lift()
        return cpu_seconds() - self._cpu, time.monotonic() - self._since

    def leave_memory(self, size_bytes: int) -> None:
        """Limits the address space to its present size and this many bytes more."""
        limit = memory_of("self")["VmSize"] + size_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def try_allocate(self, size_bytes: int) -> str:
        return words(error_of(self._node.allocate, size_bytes))

    def try_lease(self, size_bytes: int) -> str:
        return words(error_of(self._link.allocate, size_bytes))

    def try_region(self, name: str) -> str:
        return words(error_of(self._link.region, name))

    def is_connected(self) -> bool:
        """Tells whether the connection still works."""
        return not self._link.lost and error_of(self._link.region, "small") is None


def poor_actor(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: a PoorActor."""
    serve(channel, PoorActor(options))

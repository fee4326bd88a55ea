"""What measure.py lets a process in a machine measure."""

import statistics
import time
from typing import Any

import numpy as np
from actor import MIB, Actor, serve

from tensorwire._core import bench_loops
from tensorwire.testing import Channel

DEPTH = 16
WRITES = 100
SMALL = 300


class Measurer(Actor):
    """Measures writes into the remote region."""

    def write_seconds(self) -> float:
        """Of one write of 1 MiB, DEPTH of them under way at a time."""
        local = np.ones(MIB, np.uint8)
        core, remote = self._link._core, self._remote._core
        total = bench_loops.write_pipelined(core, local.ctypes.data, MIB, remote, 0, WRITES, DEPTH)
        return total / WRITES

    def latency_seconds(self) -> float:
        """Of one completed write of 8 bytes."""
        local = np.ones(8, np.uint8)
        core, remote = self._link._core, self._remote._core
        samples = bench_loops.write_complete(core, local.ctypes.data, 8, remote, 0, SMALL, 1)
        return statistics.median(samples)

    def python_seconds(self) -> float:
        """The same from Python."""
        local, remote = np.ones(8, np.uint8), self._remote[:8]
        seconds = []
        for _ in range(SMALL):
            start = time.perf_counter()
            remote.write(local).wait()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


def serve_measurer(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: a Measurer that is told what to do until the channel ends."""
    serve(channel, Measurer(options))

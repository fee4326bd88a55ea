"""The measurements that measure.py makes in a process of a machine."""

import statistics
import time
from typing import Any

import numpy as np
from actor import MIB, Actor, serve

from tensorwire._core import bench_loops
from tensorwire.memory.core import core_of
from tensorwire.testing import Channel

DEPTH = 16
WRITES = 100
SMALL = 300


class Measurer(Actor):
    """Measures writes into the remote region."""

    def write_seconds(self) -> float:
        """Returns the seconds of one write of 1 MiB, DEPTH of them under way at a time."""
        prepared = self._link.prepare_write([np.ones(MIB, np.uint8)], [self._remote[:MIB]])
        return bench_loops.start_pipelined(core_of(prepared), WRITES, DEPTH) / WRITES

    def latency_seconds(self) -> float:
        """Returns the seconds of one completed write of 8 bytes."""
        prepared = self._link.prepare_write([np.ones(8, np.uint8)], [self._remote[:8]])
        return statistics.median(bench_loops.start_complete(core_of(prepared), [], SMALL, 1))

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

"""Operations on one connection that are timed, and their limits: for the bench and the doctor.

All regions have 4 KiB pages, touched before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tensorwire import _core
from tensorwire.bench.harness import time_each
from tensorwire.memory import Peer, RemoteRegion, RemoteWord, Word
from tensorwire.memory.core import core_of

PYTHON, CPP = "tensorwire", "tensorwire-c++"
TORCH_COPY = "torch-copy"
"""The copy that a Python program uses where its memory is mapped: `Tensor.copy_`, then a wait."""

MEMCPY, RAW, COPY_ENGINE = "memcpy", "raw-socket", "cuMemcpyAsync"
LIMITS = {"shm": MEMCPY, "tcp": RAW, "gpu": COPY_ENGINE}
"""The limit measured beside each path. A path without one is compared with its promise."""

PATIENCE_S = 30.0

Runner = Callable[[int, int], Sequence[float]]
"""Runs `count` samples of `batch` operations each."""

# Any: the loops take the core's objects, which the public ones wrap.
loops: Any = _core.bench_loops


def moving(remote: RemoteRegion, local: Any, read: bool) -> Runner:
    """Returns a write of an array, or a read into it, from the call until it is complete."""
    call = remote.read if read else remote.write
    return lambda count, batch: time_each(lambda: call(local).wait(PATIENCE_S), count)


def copying(remote: RemoteRegion, local: Any, read: bool) -> Runner:
    """Returns a memcpy between an array and the pages that a write to the region reaches."""
    ends = loops.mapped_address(core_of(remote)), local.ctypes.data
    target, source = ends[::-1] if read else ends
    return partial(loops.copy_pieces, target, source, local.nbytes, 0, 1)


def ping(
    mine: Word, theirs: RemoteWord, values: Iterable[int], peer: Peer | None = None,
    pause_s: float = 0.0,
) -> list[float]:  # fmt: skip
    """Returns the seconds of a signal's round trips, while the other side runs `pong`.

    A pause before each lets the other side sleep. With `peer` the waiting ends if it is lost.
    """
    clock, samples = time.perf_counter, []
    for value in values:
        if pause_s:
            time.sleep(pause_s)
        begin = clock()
        theirs.set(value)
        mine.wait_until(value, PATIENCE_S, peer=peer)
        samples.append(clock() - begin)
    return samples


def pong(
    mine: Word, theirs: RemoteWord, values: Iterable[int], peer: Peer | None = None,
    timeout_s: float = PATIENCE_S,
) -> None:  # fmt: skip
    """Answers the signals of `ping`."""
    for value in values:
        mine.wait_until(value, timeout_s, peer=peer)
        theirs.set(value)

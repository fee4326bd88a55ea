"""Runs the pair of processes in which tensorwire itself and its limits are measured.

The driver writes to, reads from and signals the memory of the target, from Python ("tensorwire")
and from C++ ("tensorwire-c++"). The limits run in the same two processes on the same memory: memcpy
into the very pages that a write reaches (shm), and a raw TCP socket that sends from and receives
into them (tcp). A signal's figure is the whole round trip.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tensorwire.bench.harness import Block, Series, alternate, run_block, time_each, warm_up
from tensorwire.bench.machine import pin_process, process_cpu_seconds
from tensorwire.bench.operations import (
    CPP,
    MEMCPY,
    PATIENCE_S,
    PYTHON,
    RAW,
    Runner,
    copying,
    loops,
    moving,
    ping,
    pong,
)
from tensorwire.bench.processes import serve_messages
from tensorwire.bench.raw_socket import LOOPBACK, RawClient, RawServer
from tensorwire.memory import Node, RemoteRegion
from tensorwire.memory.core import core_of

PAUSE_S = 2e-3
"""Far above every spin bound: after it the other side sleeps."""

_TARGET, _TARGET_WORDS, _DRIVER_WORDS = "bench-target", "bench-target-words", "bench-driver-words"
_WORDS_BYTES = 4096
_MIN_SAMPLE_S = 2e-6
"""The least time of a sample, in seconds.

The C++ loops average over as many operations as it needs.
"""

_UNTIMED_PINGS = 20


def batch_of(case: str) -> tuple[int, int]:
    """Returns pieces and bytes per piece of a case like "batch_256x1KiB_by_index"."""
    pieces, _, piece = case.split("_")[1].partition("x")
    return int(pieces), int(piece.removesuffix("KiB")) << 10


class Driver:
    """The measured side. Methods are called one at a time, by name, from the bench's process.

    `options`: wire ("shm" or "tcp"), size_bytes (of the largest case).
    """

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        self._link = link
        self._wire = str(options["wire"])
        self._target_pid = int(link.recv())
        self._node = Node("bench-driver", transports=[self._wire])
        self._local = self._node.allocate(options["size_bytes"], access="none")
        self._words = self._node.allocate(_WORDS_BYTES, name=_DRIVER_WORDS)
        self._array = self._local.array()
        self._array[:] = 1
        self._peer = self._node.connect(self._tell("address"))
        self._tell("join")
        self._remote = self._peer.region(_TARGET)
        self._remote_words = self._peer.region(_TARGET_WORDS)
        self._peer.write(self._array, self._remote).wait()
        self._client: RawClient | None = None
        self._runners: dict[str, Runner] = {}
        self._batches: dict[str, int] = {}
        self._signals = 0

    def _tell(self, *message: Any) -> Any:
        self._link.send(message)
        return self._link.recv()

    def spin_bound_s(self) -> float | None:
        """Returns how long this node polls before it sleeps; the value may change with the load."""
        spin_bound_ns = self._node.stats().get("spin_bound_ns")
        return None if spin_bound_ns is None else spin_bound_ns / 1e9

    def pin(self, driver_cores: Sequence[int], target_cores: Sequence[int]) -> None:
        """Lets every thread of the two processes run on these cores only."""
        pin_process(driver_cores)
        self._tell("pin", list(target_cores))

    # --- preparing a case -----------------------------------------------------------------------

    def prepare(self, case: str, size_bytes: int) -> list[str]:
        """Makes a case ready; returns the systems that can do it, the limit last if it has one."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._batches = {}
        makers: dict[str, Callable[[str, int], dict[str, Runner]]] = {
            "write": self._move,
            "read": self._move,
            "round": self._move,
            "batch": self._batch,
            "signal": self._signal,
            "fetch": self._fetch_add,
        }
        self._runners = makers[case.partition("_")[0]](case, size_bytes)
        return list(self._runners)

    def _raw(self, mode: str, size_bytes: int) -> dict[str, Runner]:
        """Returns the limit of tcp; nothing on shm."""
        if self._wire == "shm":
            return {}
        port, token = self._tell("raw", mode, size_bytes)
        self._client = RawClient(LOOPBACK, port, token, mode, self._array[:size_bytes])
        return {RAW: self._client.run}

    def _move(self, case: str, size_bytes: int) -> dict[str, Runner]:
        near, far, read = self._array[:size_bytes], self._remote[:size_bytes], case == "read"
        prepare = self._peer.prepare_read if read else self._peer.prepare_write
        runners: dict[str, Runner] = {
            PYTHON: moving(far, near, read),
            CPP: partial(loops.start_complete, core_of(prepare([near], [far])), []),
        }
        if self._wire == "shm":
            return {**runners, MEMCPY: copying(far, near, read)}
        modes = {"read": "fetch", "round_trip": "echo"}
        return runners | self._raw(modes.get(case, "send"), size_bytes)

    def _batch(self, case: str, size_bytes: int) -> dict[str, Runner]:
        pieces, piece = batch_of(case)
        stride = 2 * piece  # apart, so that nothing merges
        begins = range(0, pieces * stride, stride)
        prepared = self._peer.prepare_write(
            [self._array[begin : begin + piece] for begin in begins],
            [self._remote[begin : begin + piece] for begin in begins],
        )
        indices = np.arange(pieces, dtype=np.int64) if case.endswith("_by_index") else None
        chosen = [] if indices is None else indices.tolist()
        runners: dict[str, Runner] = {
            PYTHON: lambda count, batch: time_each(lambda: prepared.start(indices).wait(), count),
            CPP: partial(loops.start_complete, core_of(prepared), chosen),
        }
        if self._wire == "shm":
            ends = loops.mapped_address(core_of(self._remote)), self._array.ctypes.data
            runners[MEMCPY] = partial(loops.copy_pieces, *ends, piece, stride, pieces)
        return runners | self._raw("send", size_bytes)

    def _signal(self, case: str, size_bytes: int) -> dict[str, Runner]:
        pause_s = PAUSE_S if case.endswith("asleep") else 0.0
        runners: dict[str, Runner] = {
            PYTHON: lambda count, batch: self._ping(PYTHON, count, pause_s),
            CPP: lambda count, batch: self._ping(CPP, count, pause_s),
        }
        return runners if pause_s else runners | self._raw("echo", size_bytes)

    def _ping(self, system: str, count: int, pause_s: float) -> Sequence[float]:
        extra = 0 if pause_s else _UNTIMED_PINGS
        first, count = self._signals + 1, count + extra
        self._signals += count
        self._link.send(("pong", system, first, count))
        samples: Sequence[float]
        if system == PYTHON:
            words = self._words.word(0), self._remote_words.word(0)
            samples = ping(*words, range(first, first + count), pause_s=pause_s)
        else:
            samples = loops.signal_ping(
                core_of(self._node), core_of(self._words), 0, core_of(self._peer),
                core_of(self._remote_words), 0, first, count, pause_s, PATIENCE_S,
            )  # fmt: skip
        self._link.recv()
        return samples[extra:]

    def _fetch_add(self, case: str, size_bytes: int) -> dict[str, Runner]:
        word, peer = self._remote_words.word(64), self._peer
        runners: dict[str, Runner] = {
            PYTHON: lambda count, batch: time_each(lambda: peer.fetch_add(word, 1).wait(), count),
            CPP: partial(loops.fetch_add_complete, core_of(peer), core_of(self._remote_words), 64),
        }
        return runners | self._raw("echo", size_bytes)

    # --- running it -----------------------------------------------------------------------------

    def warm(self, system: str, max_s: float) -> float:
        """Warms a system up, chooses its batch, and returns the length of one sample."""
        runner = self._runners[system]
        each = warm_up(lambda count: runner(count, 1), max_s)
        batch = 1 if system == PYTHON else max(1, round(_MIN_SAMPLE_S / max(each, 1e-9)))
        if batch > 1:  # the clock itself was most of that figure
            each = min(runner(10, batch))
            batch = max(1, min(2000, round(_MIN_SAMPLE_S / max(each, 1e-9))))
        self._batches[system] = batch
        return each * batch

    def block(self, system: str, count: int) -> Block:
        """Returns one block of a system, with the CPU that both processes spent on it."""
        runner, batch = self._runners[system], self._batches[system]
        return run_block(lambda n: runner(n, batch), count, self._target_pid, batch)

    def lap(
        self, systems: Sequence[str], limit: str | None, counts: dict[str, int], rounds: int
    ) -> dict[str, Series]:
        """Returns the series of `rounds` alternations inside this process."""
        return alternate(self.block, systems, limit, counts, rounds)

    def waiting(self, seconds: float) -> tuple[float, float]:
        """Returns wall and CPU time of the target while it waits for a word that stays as it is."""
        self._link.send(("wait", seconds))
        time.sleep(0.25)  # its spin is over and its interpreter at rest
        cpu, begin = process_cpu_seconds(self._target_pid), time.perf_counter()
        time.sleep(max(0.1, seconds - 0.5))
        wall = time.perf_counter() - begin
        used = process_cpu_seconds(self._target_pid) - cpu
        self._link.recv()
        return wall, used

    def close(self) -> None:
        """Ends the connection and the node."""
        if self._client is not None:
            self._client.close()
        self._link.send(("stop",))
        self._node.close()
        os._exit(0)  # numpy views keep the regions; there is nothing left to do


def serve(link: Connection, options: dict[str, Any]) -> None:
    """Runs the target: owns the memory, answers signals, serves the raw socket."""
    server = RawServer()
    node = Node("bench-target", transports=[options["wire"]])
    region = node.allocate(options["size_bytes"], name=_TARGET)
    words = node.allocate(_WORDS_BYTES, name=_TARGET_WORDS)
    array = region.array()
    array[:] = 2
    joined: list[RemoteRegion] = []

    def join() -> bool:
        joined.append(node.accept(PATIENCE_S).region(_DRIVER_WORDS))
        return True

    def answer(system: str, first: int, count: int) -> bool:
        (theirs,) = joined
        if system == PYTHON:
            pong(words.word(0), theirs.word(0), range(first, first + count))
        else:
            loops.signal_pong(
                core_of(node), core_of(words), 0, core_of(theirs.peer), core_of(theirs), 0,
                first, count, PATIENCE_S,
            )  # fmt: skip
        return True

    def wait(seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            words.word(128).wait_until(1, seconds)
        return True

    handlers: dict[str, Callable[..., object]] = {
        "address": lambda: node.address,
        "join": join,
        "pong": answer,
        "raw": lambda mode, size_bytes: server.listen(mode, size_bytes, array),
        "wait": wait,
    }
    try:
        serve_messages(link, handlers)
    finally:
        server.close()
        node.close()
    os._exit(0)

"""The pair of processes in which tensorwire itself and its limits are measured.

The driver writes to, reads from and signals the memory of the target, from Python ("tensorwire")
and from C++ ("tensorwire-c++"). The limits run in the same two processes on the same memory: memcpy
into the very pages that a write reaches (shm), and a raw TCP socket that sends from and receives
into them (tcp). All of it uses regions of 4 KiB pages, touched before the clock starts. A signal's
figure is the whole round trip.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tensorwire import _core
from tensorwire.bench.harness import Block, Series, alternate, run_block, time_each, warm_up
from tensorwire.bench.machine import pin_process, process_cpu_seconds
from tensorwire.bench.processes import serve_messages
from tensorwire.bench.raw_socket import LOOPBACK, RawClient, RawServer
from tensorwire.memory import Node

PYTHON, CPP = "tensorwire", "tensorwire-c++"
LIMITS = {"shm": "memcpy", "tcp": "raw-socket"}
PAUSE_S = 2e-3
"""Far above every spin bound: after it the other side sleeps."""

_WAIT_S = 30.0
_WORDS_BYTES = 4096
_MIN_SAMPLE_S = 2e-6
"""The C++ loops average over so many operations that a sample is at least this long."""

_UNTIMED_PINGS = 20

Samples = Sequence[float]
Runner = Callable[[int, int], Samples]
"""Runs `count` samples of `batch` operations each."""

# Any: the loops also take what _native finds behind the public objects.
_loops: Any = _core.bench_loops


def batch_of(case: str) -> tuple[int, int]:
    """Pieces and bytes per piece of a case like "batch_256x1KiB_by_index"."""
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
        link.send(("start", options["wire"], options["size_bytes"]))
        address = link.recv()
        self._node = Node("bench-driver", transports=[self._wire])
        self._local = self._node.allocate(options["size_bytes"], access="none")
        self._words = self._node.allocate(_WORDS_BYTES, name="bench-driver-words")
        self._array = self._local.array()
        self._array[:] = 1
        self._peer = self._node.connect(address)
        self._link.send(("join",))
        self._link.recv()
        self._remote = self._peer.region("bench-target")
        self._remote_words = self._peer.region("bench-target-words")
        self._peer.write(self._array, self._remote).wait()
        self._client: RawClient | None = None
        self._runners: dict[str, Runner] = {}
        self._batches: dict[str, int] = {}
        self._signals = 0
        self._size_bytes = 0

    def spin_bound_s(self) -> float | None:
        """How long this node polls before it sleeps, as of now; it may change with the load."""
        spin_bound_ns = self._node.stats().get("spin_bound_ns")
        return None if spin_bound_ns is None else spin_bound_ns / 1e9

    def pin(self, driver_cores: Sequence[int], target_cores: Sequence[int]) -> None:
        """Lets every thread of the two processes run on these cores only."""
        pin_process(driver_cores)
        self._link.send(("pin", list(target_cores)))
        self._link.recv()

    # --- preparing a case -----------------------------------------------------------------------

    def prepare(self, case: str, size_bytes: int) -> list[str]:
        """Makes a case ready; returns the systems that can do it, the limit last if it has one."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._size_bytes = size_bytes
        self._batches = {}
        kind = case.partition("_")[0]
        makers: dict[str, Callable[[str, int], dict[str, Runner]]] = {
            "write": self._move,
            "read": self._move,
            "round": self._move,
            "batch": self._batch,
            "signal": self._signal,
            "fetch": self._fetch_add,
        }
        self._runners = makers[kind](case, size_bytes)
        return list(self._runners)

    def _raw(self, mode: str, size_bytes: int) -> Runner:
        self._link.send(("raw", mode, size_bytes))
        port, token = self._link.recv()
        self._client = RawClient(LOOPBACK, port, token, mode, self._array[:size_bytes])
        return self._client.run

    def _move(self, case: str, size_bytes: int) -> dict[str, Runner]:
        source, target = self._array[:size_bytes], self._remote[:size_bytes]
        near, peer, far = self._array.ctypes.data, _native(self._peer), _native(self._remote)
        read = case == "read"
        call = target.read if read else target.write

        def native(count: int, batch: int) -> Samples:
            loop = _loops.read_complete if read else _loops.write_complete
            samples: Samples = loop(peer, near, size_bytes, far, 0, count, batch)
            return samples

        runners: dict[str, Runner] = {
            PYTHON: lambda count, batch: time_each(lambda: call(source).wait(), count),
            CPP: native,
        }
        if self._wire == "shm":
            mapped = _loops.mapped_address(far)
            to, origin = (near, mapped) if read else (mapped, near)
            runners["memcpy"] = lambda count, batch: _loops.copy_memory(
                to, origin, size_bytes, count, batch
            )
        elif case == "round_trip":
            runners["raw-socket"] = self._raw("echo", size_bytes)
        else:
            runners["raw-socket"] = self._raw("fetch" if read else "send", size_bytes)
        return runners

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
        native_list = _native(prepared)

        def native(count: int, batch: int) -> Samples:
            samples: Samples = _loops.start_complete(native_list, chosen, count, batch)
            return samples

        runners: dict[str, Runner] = {
            PYTHON: lambda count, batch: time_each(lambda: prepared.start(indices).wait(), count),
            CPP: native,
        }
        if self._wire == "shm":
            near, mapped = self._array.ctypes.data, _loops.mapped_address(_native(self._remote))
            runners["memcpy"] = lambda count, batch: _loops.copy_pieces(
                mapped, near, piece, stride, pieces, count, batch
            )
        else:
            runners["raw-socket"] = self._raw("send", size_bytes)
        return runners

    def _signal(self, case: str, size_bytes: int) -> dict[str, Runner]:
        pause_s = PAUSE_S if case.endswith("asleep") else 0.0
        runners: dict[str, Runner] = {
            PYTHON: lambda count, batch: self._ping(count, pause_s),
            CPP: lambda count, batch: self._ping_native(count, pause_s),
        }
        if self._wire == "tcp" and not pause_s:
            runners["raw-socket"] = self._raw("echo", size_bytes)
        return runners

    def _next_signals(self, system: str, count: int) -> int:
        first = self._signals + 1
        self._signals += count
        self._link.send(("pong", system, first, count))
        return first

    def _ping(self, count: int, pause_s: float) -> Samples:
        extra = 0 if pause_s else _UNTIMED_PINGS
        first = self._next_signals(PYTHON, count + extra)
        mine, theirs = self._words.word(0), self._remote_words.word(0)
        clock, samples = time.perf_counter, []
        for value in range(first, first + count + extra):
            if pause_s:
                time.sleep(pause_s)
            begin = clock()
            theirs.set(value)
            mine.wait_until(value, _WAIT_S)
            samples.append(clock() - begin)
        self._link.recv()
        return samples[extra:]

    def _ping_native(self, count: int, pause_s: float) -> Samples:
        extra = 0 if pause_s else _UNTIMED_PINGS
        first = self._next_signals(CPP, count + extra)
        samples: Samples = _loops.signal_ping(
            _native(self._node), _native(self._words), 0, _native(self._peer),
            _native(self._remote_words), 0, first, count + extra, pause_s, _WAIT_S,
        )  # fmt: skip
        self._link.recv()
        return samples[extra:]

    def _fetch_add(self, case: str, size_bytes: int) -> dict[str, Runner]:
        word, peer = self._remote_words.word(64), self._peer
        native_peer, native_words = _native(peer), _native(self._remote_words)

        def native(count: int, batch: int) -> Samples:
            samples: Samples = _loops.fetch_add_complete(
                native_peer, native_words, 64, count, batch
            )
            return samples

        runners: dict[str, Runner] = {
            PYTHON: lambda count, batch: time_each(lambda: peer.fetch_add(word, 1).wait(), count),
            CPP: native,
        }
        if self._wire == "tcp":
            runners["raw-socket"] = self._raw("echo", size_bytes)
        return runners

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
        """One block of a system, with the CPU that both processes spent on it."""
        runner, batch = self._runners[system], self._batches[system]
        return run_block(lambda n: runner(n, batch), count, self._target_pid, batch)

    def lap(
        self, systems: Sequence[str], limit: str | None, counts: dict[str, int], rounds: int
    ) -> dict[str, Series]:
        """`rounds` alternations inside this process."""
        return alternate(self.block, systems, limit, counts, rounds)

    def waiting(self, seconds: float) -> tuple[float, float]:
        """Wall time and CPU time of the target while it waits for a word that nobody stores."""
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
    """The target: owns the memory, answers signals, serves the raw socket."""
    del options
    state: dict[str, Any] = {}
    server = RawServer()

    def start(wire: str, size_bytes: int) -> str:
        node = Node("bench-target", transports=[wire])
        state["node"] = node
        state["region"] = node.allocate(size_bytes, name="bench-target")
        state["words"] = node.allocate(_WORDS_BYTES, name="bench-target-words")
        state["array"] = state["region"].array()
        state["array"][:] = 2
        return str(node.address)

    def join() -> bool:
        state["peer"] = state["node"].accept(_WAIT_S)
        state["theirs"] = state["peer"].region("bench-driver-words")
        return True

    def pong(system: str, first: int, count: int) -> bool:
        mine, theirs = state["words"].word(0), state["theirs"].word(0)
        if system == CPP:
            _loops.signal_pong(
                _native(state["node"]), _native(state["words"]), 0, _native(state["peer"]),
                _native(state["theirs"]), 0, first, count, _WAIT_S,
            )  # fmt: skip
            return True
        for value in range(first, first + count):
            mine.wait_until(value, _WAIT_S)
            theirs.set(value)
        return True

    def raw(mode: str, size_bytes: int) -> tuple[int, str]:
        return server.listen(mode, size_bytes, state["array"])

    def wait(seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            state["words"].word(128).wait_until(1, seconds)
        return True

    try:
        serve_messages(
            link,
            {"start": start, "join": join, "pong": pong, "raw": raw, "wait": wait},
        )
    finally:
        server.close()
        if "node" in state:
            state["node"].close()
    os._exit(0)


def _native(wrapped: Any) -> Any:
    """The compiled object behind one of the public API; the C++ loops take nothing else."""
    return wrapped._core

"""Figures of one path: writes, reads and signals from Python, beside the limit of that path.

Bounded in time and bytes. tensorwire and its limit take turns, so that what disturbs the machine
disturbs both.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensorwire import _core
from tensorwire.bench.harness import Ratio, median, paired_ratio, time_each
from tensorwire.bench.raw_socket import RawClient
from tensorwire.bench.rows import Row, format_seconds, format_size
from tensorwire.doctor.facts import Facts
from tensorwire.doctor.mailbox import (
    AREA_BYTES,
    CLIENT_REGION,
    PING_WORD,
    RAW_PATIENCE_S,
    SERVER_REGION,
    Mailbox,
)
from tensorwire.errors import BusyError, PeerLostError
from tensorwire.memory import Handle, Node, RemoteRegion
from tensorwire.memory.handle import split_address

BENCH = "doctor"
OWN, MEMCPY, RAW = "tensorwire", "memcpy", "raw-socket"
LIMITS = {"shm": MEMCPY, "tcp": RAW}
"""What bounds a path, measured beside it. A path that is not here is compared with its promise."""

LARGE_BYTES = 64 << 10
"""From here on bandwidth is what counts, below it latency."""

_PATIENCE_S = 30.0
_BLOCK_S = 2e-3
_MAX_BLOCK, _MAX_ROUNDS = 200, 200

_loops: Any = _core.bench_loops

Run = Callable[[int], Sequence[float]]
Progress = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much may be spent.

    Attributes:
        seconds: on all paths together, roughly.
        sizes: bytes of one write and one read, rising.
        case_bytes: most payload of one case, tensorwire and limit together.
    """

    seconds: float = 8.0
    sizes: tuple[int, ...] = (8, 1 << 20, 64 << 20)
    case_bytes: int = 8 << 30

    def gentle(self) -> Effort:
        """For a Node that has work of its own."""
        return replace(
            self,
            seconds=min(self.seconds, 1.0),
            sizes=tuple(size for size in self.sizes if size <= 1 << 20),
            case_bytes=16 << 20,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """What is done, how large, and its share of the time of a path."""

    action: str
    size_bytes: int
    share: float


def plan(effort: Effort, helped: bool) -> list[Case]:
    """The cases of one path; signals need the other end's help."""
    sizes = effort.sizes
    found = []
    for size in sizes:
        actions = ("write",) if size < LARGE_BYTES else ("write", "read")
        found += [Case(action, size, 1.0 + 2 * (size > 1 << 20)) for action in actions]
        if size == sizes[0] and helped:
            found.append(Case("signal", 8, 1.0))
    whole = sum(case.share for case in found)
    return [replace(case, share=case.share / whole) for case in found]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one operation takes: a start, and a time for each byte. For estimates only."""

    start_s: float
    per_byte_s: float

    def of(self, size_bytes: int) -> float:
        """Seconds of one operation of this size."""
        return self.start_s + self.per_byte_s * size_bytes


class Session:
    """A connection to the peer by one path, with what measuring needs on both sides.

    Attributes:
        helped: whether the peer is a doctor.
        facts: what the peer says of its machine, if it is a doctor of the same format.
        reason: why this path.

    Raises:
        UnavailableError: the path cannot be had.
        PeerLostError, TimeoutError, PermissionError, ValueError: as for `Node.connect`.
    """

    def __init__(self, address: str, path: str, secret: bytes | None = None) -> None:
        self.facts: Facts | None = None
        self.facts_fault = ""
        self._address = address
        self._signals = 0
        self._raw: RawClient | None = None
        self.node = Node(f"doctor-{os.getpid()}-{path}", secret=secret, transports=[path])
        try:
            mine = self.node.allocate(AREA_BYTES, name=CLIENT_REGION)
            self.peer = self.node.connect(address, require=path)
            self.transport, self.reason = self.peer._core.transport, self.peer._core.reason
            self._box = Mailbox(mine, None, self.peer)
            try:
                self.peer.region(SERVER_REGION)
                self.helped = True
            except LookupError:
                self.helped = False
            if self.helped:
                self._meet()
        except BaseException:
            self.node.close()
            raise

    def _meet(self) -> None:
        hello = self._box.receive()
        handle = Handle.from_bytes(bytes.fromhex(str(hello.get("handle"))))
        self._box.theirs = self.peer.region(handle)
        try:
            self.facts = Facts.from_json(hello.get("facts"))
        except ValueError as error:
            self.facts_fault = str(error)

    def interface_there(self) -> str | None:
        """The peer's interface that has the address by which it was reached."""
        if not self.helped:
            return None
        try:
            host = socket.getaddrinfo(split_address(self._address)[0], None)[0][4][0]
            name = self._box.ask({"do": "interface", "host": host}).get("name")
        except (socket.gaierror, ValueError):
            return None
        return name if isinstance(name, str) else None

    def close(self) -> None:
        """Ends the connection; what was leased is freed there. Idempotent."""
        if self._raw is not None:
            self._raw.close()
        self.node.close()

    # --- measuring ------------------------------------------------------------------------------

    def measure(self, effort: Effort, seconds: float, progress: Progress) -> Iterator[Row]:
        """All cases of this path, in about `seconds`; each row as soon as it is known.

        Raises:
            PeerLostError, TimeoutError: the peer went away, or does not answer.
        """
        largest = max(effort.sizes)
        try:
            remote = self.peer.allocate(largest)
        except (BusyError, MemoryError) as error:
            note = f"no memory to measure with: {error}"
            yield Row(BENCH, f"{self.transport}.write", OWN, largest, note=note)
            return
        local = self.node.allocate(largest, access="none").array()
        local[:] = 1
        end = time.perf_counter() + seconds
        cost: Cost | None = None
        for index, case in enumerate(plan(effort, self.helped)):
            if case.size_bytes > LARGE_BYTES and cost is None:
                small = _once(_writing(remote, local[:8]))
                large = _once(_writing(remote, local[:LARGE_BYTES]))
                cost = Cost(small, max(0.0, large - small) / LARGE_BYTES)
            name = f"{self.transport}.{case.action}"
            progress(index, f"{name} {format_size(case.size_bytes)}")
            budget = seconds * case.share
            expected = 0.0 if cost is None else cost.of(case.size_bytes)
            # At least four operations: each system once to warm up and once to count. Time that
            # other cases did not need may go into it.
            left = end - time.perf_counter()
            if 4 * expected > max(2 * budget, left / 2, 0.1):
                note = f"left out: each takes about {format_seconds(expected)}; give more --seconds"
                yield Row(BENCH, name, OWN, case.size_bytes, note=note)
                continue
            made = self._measure(case, name, local, remote, budget, effort.case_bytes)
            yield from made
            if cost is not None and made[0].seconds_median:
                spent = max(0.0, made[0].seconds_median - cost.start_s)
                cost = replace(cost, per_byte_s=spent / case.size_bytes)
        remote.free()

    def _measure(
        self, case: Case, name: str, local: Any, remote: Any, budget: float, case_bytes: int
    ) -> list[Row]:
        near, far = local[: case.size_bytes], remote[: case.size_bytes]
        if case.action == "signal":
            own: Run = self._ping
        else:
            call = far.read if case.action == "read" else far.write

            def own(count: int) -> Sequence[float]:
                return time_each(lambda: call(near).wait(_PATIENCE_S), count)

        limit, fault = self._limit(case, near, remote)
        try:
            taken = take(own, limit, budget, case.size_bytes, case_bytes)
        finally:
            if self._raw is not None:
                self._raw.close()
                self._raw = None
        return _rows(name, case, LIMITS.get(self.transport, ""), taken, fault)

    def _limit(self, case: Case, near: Any, remote: Any) -> tuple[Run | None, str]:
        """The limit beside a case, or None and the reason if there should be one."""
        kind = LIMITS.get(self.transport)
        if kind == MEMCPY and case.action != "signal" and case.size_bytes >= LARGE_BYTES:
            mapped = _loops.mapped_address(remote._core)
            ends = (mapped, near.ctypes.data)
            target, source = ends if case.action == "write" else ends[::-1]

            def copy(count: int) -> Sequence[float]:
                samples: Sequence[float] = _loops.copy_memory(
                    target, source, case.size_bytes, count, 1
                )
                return samples

            return copy, ""
        if kind != RAW or not self.helped:
            return None, ""
        mode = {"write": "send", "read": "fetch", "signal": "echo"}[case.action]
        try:
            made = self._box.ask({"do": "raw", "mode": mode, "bytes": case.size_bytes})
            host, port = split_address(self._address)[0], int(made["port"])
            memory = np.ones(case.size_bytes, np.uint8)
            token = str(made["token"])
            self._raw = RawClient(host, port, token, mode, memory, RAW_PATIENCE_S)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            if isinstance(error, PeerLostError):
                raise
            return None, f"no raw socket beside it: {error}"
        return self._raw.run, ""

    def _ping(self, count: int) -> Sequence[float]:
        """Round trips of a signal; the first of them wakes the other side and is not counted."""
        assert self._box.theirs is not None
        first, count = self._signals + 1, count + 1
        self._signals += count
        self._box.ask({"do": "pong", "first": first, "count": count})
        mine, theirs = self._box.mine.word(PING_WORD), self._box.theirs.word(PING_WORD)
        clock, samples = time.perf_counter, []
        for value in range(first, first + count):
            begin = clock()
            theirs.set(value)
            mine.wait_until(value, _PATIENCE_S, peer=self.peer)
            samples.append(clock() - begin)
        return samples[1:]


def _writing(remote: RemoteRegion, source: Any) -> Callable[[], object]:
    return lambda: remote.write(source).wait(_PATIENCE_S)


def _once(operation: Callable[[], object]) -> float:
    operation()
    return time_each(operation, 1)[0]


@dataclass(frozen=True, slots=True)
class Taken:
    """Samples of tensorwire and of the limit beside it."""

    own: list[float]
    limit: list[float]
    ratio: Ratio | None


def take(own: Run, limit: Run | None, seconds: float, size_bytes: int, case_bytes: int) -> Taken:
    """Alternates the two for about `seconds`, and never for more payload than `case_bytes`.

    Each runs once to warm up, and at least once to count.
    """
    end = time.perf_counter() + seconds
    runs = [own] if limit is None else [own, limit]
    counts = [max(1, min(_MAX_BLOCK, int(_BLOCK_S / max(run(1)[0], 1e-9)))) for run in runs]
    samples: list[list[float]] = [[] for _ in runs]
    medians: list[list[float]] = [[] for _ in runs]
    moved, round_s = len(runs) * size_bytes, 0.0
    for done in range(_MAX_ROUNDS):
        begin = time.perf_counter()
        if done and (begin + round_s > end or moved + sum(counts) * size_bytes > case_bytes):
            break
        if moved + sum(counts) * size_bytes > case_bytes:
            counts = [1] * len(runs)
        for run, count, found, middle in zip(runs, counts, samples, medians, strict=True):
            block = list(run(count))
            found += block
            middle.append(median(block))
        moved += sum(counts) * size_bytes
        round_s = time.perf_counter() - begin
    ratio = paired_ratio(medians[1], medians[0]) if limit is not None else None
    return Taken(samples[0], samples[1] if limit is not None else [], ratio)


def _rows(name: str, case: Case, limit: str, taken: Taken, fault: str) -> list[Row]:
    def row(system: str, samples: list[float], note: str) -> Row:
        made = Row(BENCH, name, system, case.size_bytes, note=note)
        return made.timed(samples, moves=case.action != "signal")

    mine = row(OWN, taken.own, fault)
    if not taken.limit:
        return [mine]
    mine = mine.beside(taken.ratio if case.action != "signal" else None)
    return [mine, row(limit, taken.limit, "the limit")]

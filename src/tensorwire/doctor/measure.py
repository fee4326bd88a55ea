"""Measures one path: writes, reads and signals from Python, beside the limit of that path.

Bounded in time and bytes. tensorwire and its limit take turns, so that what disturbs the machine
disturbs both.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensorwire.bench.harness import Budget, Ratio, Runner, median, paired_ratio, time_each
from tensorwire.bench.operations import (
    LIMITS,
    MEMCPY,
    PATIENCE_S,
    PYTHON,
    RAW,
    copying,
    moving,
    ping,
)
from tensorwire.bench.raw_socket import RawClient
from tensorwire.bench.rows import Row, format_seconds, format_size
from tensorwire.doctor.dialogue import (
    AREA_BYTES,
    CLIENT_REGION,
    RAW_PATIENCE_S,
    SERVER_REGION,
    Dialogue,
)
from tensorwire.doctor.facts import Facts
from tensorwire.errors import BusyError, PeerLostError
from tensorwire.membership.status import DOCTOR
from tensorwire.memory import Handle, Node, RemoteRegion
from tensorwire.memory.devices import Interface
from tensorwire.memory.handle import split_address

BENCH = "doctor"

LARGE_BYTES = 64 << 10
"""The size from which bandwidth matters, and below it latency."""

_BLOCK = Budget(block_s=2e-3, max_count=200)
_MAX_ROUNDS = 200

Progress = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """The time and payload that may be spent.

    Attributes:
        seconds: on all paths together, roughly.
        sizes: bytes of one write and one read, rising.
        case_bytes: most payload of one case, tensorwire and limit together.
    """

    seconds: float = 8.0
    sizes: tuple[int, ...] = (8, 1 << 20, 64 << 20)
    case_bytes: int = 8 << 30

    def gentle(self) -> Effort:
        """Returns a smaller effort, for a Node that has work of its own."""
        return replace(
            self,
            seconds=min(self.seconds, 1.0),
            sizes=tuple(size for size in self.sizes if size <= 1 << 20),
            case_bytes=16 << 20,
        )


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """A case to measure: the action, its size, and its share of the path's time."""

    action: str
    size_bytes: int
    share: float


def plan(effort: Effort, helped: bool) -> list[ProbeCase]:
    """Returns the cases of one path; signals need the other end's help."""
    sizes = effort.sizes
    found = []
    for size in sizes:
        actions = ("write",) if size < LARGE_BYTES else ("write", "read")
        found += [ProbeCase(action, size, 1.0 + 2 * (size > 1 << 20)) for action in actions]
        if size == sizes[0] and helped:
            found.append(ProbeCase("signal", 8, 1.0))
    whole = sum(case.share for case in found)
    return [replace(case, share=case.share / whole) for case in found]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one operation: a start, and a time for each byte. For estimates only."""

    start_s: float
    per_byte_s: float

    def of(self, size_bytes: int) -> float:
        """Returns the seconds of one operation of this size."""
        return self.start_s + self.per_byte_s * size_bytes


class PathProbe:
    """A connection to the peer by one path, with everything for measuring on both sides.

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
        self.helped = False
        self.transport = path
        self._host = split_address(address)[0]
        self._signals = 0
        self.node = Node(f"{DOCTOR}{os.getpid()}-{path}", secret=secret, transports=[path])
        try:
            mine = self.node.allocate(AREA_BYTES, name=CLIENT_REGION)
            self.peer = self.node.connect(address, require=path)
            self.reason = self.peer.path.reason
            self._dialogue = Dialogue(mine, self.peer)
            with contextlib.suppress(LookupError):
                self.peer.region(SERVER_REGION)
                self.helped = True
            if self.helped:
                self._meet()
        except BaseException:
            self.node.close()
            raise

    def _meet(self) -> None:
        hello = self._dialogue.receive()
        handle = Handle.from_bytes(bytes.fromhex(str(hello.get("handle"))))
        self._dialogue.answer_to(self.peer.region(handle))
        try:
            self.facts = Facts.from_json(hello.get("facts"))
        except ValueError as error:
            self.facts_fault = str(error)

    def interface_there(self) -> Interface | None:
        """Returns the peer's interface that has the address by which it was reached."""
        if self.facts is None:
            return None
        try:
            host = socket.getaddrinfo(self._host, None)[0][4][0]
            name = self._dialogue.ask({"do": "interface", "host": host}).get("name")
        except (socket.gaierror, ValueError):
            return None
        return next((each for each in self.facts.interfaces if each.name == name), None)

    def close(self) -> None:
        """Ends the connection; leased memory is freed there. Idempotent."""
        self.node.close()

    # --- measuring ------------------------------------------------------------------------------

    def measure(self, effort: Effort, seconds: float, progress: Progress) -> Iterator[Row]:
        """Yields all cases of this path, in about `seconds`; each row as soon as it is known.

        Raises:
            PeerLostError, TimeoutError: the peer went away, or does not answer.
        """
        largest = max(effort.sizes)
        try:
            remote = self.peer.allocate(largest)
        except (BusyError, MemoryError) as error:
            note = f"no memory to measure with: {error}"
            yield Row(BENCH, f"{self.transport}.write", PYTHON, largest, note=note)
            return
        local = self.node.allocate(largest, access="none").array()
        local[:] = 1
        end = time.perf_counter() + seconds
        cost: Cost | None = None
        for index, case in enumerate(plan(effort, self.helped)):
            if case.size_bytes > LARGE_BYTES and cost is None:
                small, large = (_once(remote, local[:size]) for size in (8, LARGE_BYTES))
                cost = Cost(small, max(0.0, large - small) / LARGE_BYTES)
            name = f"{self.transport}.{case.action}"
            progress(index, f"{name} {format_size(case.size_bytes)}")
            row = Row(BENCH, name, PYTHON, case.size_bytes)
            budget = seconds * case.share
            expected = 0.0 if cost is None else cost.of(case.size_bytes)
            # At least four operations: each system once to warm up and once to count. Time that
            # other cases did not need may go into it.
            left = end - time.perf_counter()
            if 4 * expected > max(2 * budget, left / 2, 0.1):
                note = f"left out: each takes about {format_seconds(expected)}; give more --seconds"
                yield replace(row, note=note)
                continue
            made = self._measure(case, row, local, remote, budget, effort.case_bytes)
            yield from made
            if cost is not None and made[0].seconds_median:
                spent = max(0.0, made[0].seconds_median - cost.start_s)
                cost = replace(cost, per_byte_s=spent / case.size_bytes)
        remote.free()

    def _measure(
        self, case: ProbeCase, row: Row, local: Any, remote: RemoteRegion, budget: float,
        case_bytes: int,
    ) -> list[Row]:  # fmt: skip
        """Returns the row of a case, and the row of its limit if there is one."""
        near, far, moves = local[: case.size_bytes], remote[: case.size_bytes], True
        if case.action == "signal":
            own, moves = self._ping, False
        else:
            move = moving(far, near, case.action == "read")

            def own(count: int) -> Sequence[float]:
                return move(count, 1)

        with contextlib.ExitStack() as stack:
            limit, fault = self._limit(case, near, far, stack)
            taken = take(own, limit, budget, case.size_bytes, case_bytes)
        mine = replace(row, note=fault).timed(taken.own, moves=moves)
        if not taken.limit:
            return [mine]
        beside = replace(row, system=LIMITS[self.transport], note="the limit")
        ratio = taken.ratio if moves else None
        return [mine.beside(ratio), beside.timed(taken.limit, moves=moves)]

    def _limit(
        self, case: ProbeCase, near: Any, far: RemoteRegion, stack: contextlib.ExitStack
    ) -> tuple[Runner | None, str]:
        """Returns the limit beside a case, or None and the reason if there should be one.

        The stack closes everything that this opens.
        """
        kind = LIMITS.get(self.transport)
        if kind == MEMCPY and case.action != "signal" and case.size_bytes >= LARGE_BYTES:
            copy = copying(far, near, case.action == "read")
            return lambda count: copy(count, 1), ""
        if kind != RAW or not self.helped:
            return None, ""
        mode = {"write": "send", "read": "fetch", "signal": "echo"}[case.action]
        try:
            made = self._dialogue.ask({"do": "raw", "mode": mode, "bytes": case.size_bytes})
            port, token = int(made["port"]), str(made["token"])
            memory = np.ones(case.size_bytes, np.uint8)
            client = RawClient(self._host, port, token, mode, memory, RAW_PATIENCE_S)
        except PeerLostError:
            raise
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            return None, f"no raw socket beside it: {error}"
        return stack.enter_context(contextlib.closing(client)).run, ""

    def _ping(self, count: int) -> Sequence[float]:
        """Returns round trips of a signal, without the first, which wakes the other side."""
        first, count = self._signals + 1, count + 1
        self._signals += count
        self._dialogue.ask({"do": "pong", "first": first, "count": count})
        return ping(*self._dialogue.ping_words, range(first, first + count), self.peer)[1:]


def _once(remote: RemoteRegion, source: Any) -> float:
    """Returns the seconds of a write that directly follows another one."""
    return time_each(lambda: remote.write(source).wait(PATIENCE_S), 2)[1]


@dataclass(frozen=True, slots=True)
class Taken:
    """Samples of tensorwire and of the limit beside it."""

    own: list[float]
    limit: list[float]
    ratio: Ratio | None


def take(
    own: Runner, limit: Runner | None, seconds: float, size_bytes: int, case_bytes: int
) -> Taken:
    """Alternates the two for about `seconds`, and never for more payload than `case_bytes`.

    Each runs once to warm up, and at least once to count.
    """
    end = time.perf_counter() + seconds
    runs = [own] if limit is None else [own, limit]
    counts = [_BLOCK.count(run(1)[0]) for run in runs]
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
    if limit is None:
        return Taken(samples[0], [], None)
    return Taken(samples[0], samples[1], paired_ratio(medians[1], medians[0]))

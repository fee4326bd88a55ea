"""Compares the cost of messages in gRPC with `tensorwire.rpc`.

One client, one servicer that returns its request, each in a process; both read the whole payload.
All systems take turns, block by block; the first block of each, in which memory is made, does not
count. Systems:

    grpcio          raw bytes, limits raised, on shm over a unix socket
    bytes           the same program with tensorwire's server and channel
    tensor          arrays as messages
    runtime         as `bytes`, and calls are frames in memory instead of HTTP/2
    by-hand         two processes copy into shared memory and wake each other by eventfds, or send
                    on one socket (tcp)
    by-hand-bytes   the same, and make bytes objects of the received buffers
    in-turn(-bytes) the same after a call of grpcio with a small message, which payload outside its
                    message needs
    memcpy          a copy in each direction, and a read of each, in one process
    grpcio-marked   grpcio with as much metadata as attachments need
    grpcio-tensor   grpcio with the same messages as `tensor`, made by hand

Cases:

    unary        one request and answer; the payload moves twice
    stream       a stream of eight answers, where a row is one message
    aio          as `unary`, in event loops
    skew         messages of ten buffers, as fields of bytes or as arrays (tensor, runtime-tensor)
    clients16    16 threads of a client call at the same time, with 8 bytes; the CPU time of both
                 processes per call is compared
    channel      a channel for each call
    descriptors  file descriptors of a client with a thousand channels to twenty servers
    slow_reader  memory of both ends while a client reads no further after one message

Not measured: other sizes of pools and threads.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tensorwire.bench.harness import median, paired_ratio
from tensorwire.bench.measuring import measuring, take_turns
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire.bench.rows import Report, Row, Verdict
from tensorwire.bench.verdicts import EQUAL, MIB, Bar
from tensorwire.command import Told

from .rpc_names import (
    AIO,
    BY_HAND,
    BYTES,
    CASES,
    CHANNEL,
    CROWD,
    GRPCIO,
    HELD,
    LARGE_LIMITS,
    LIMITS,
    MEMCPY,
    RUNTIME,
    RUNTIME_TENSOR,
    SKEW,
    SKEW_SIZES,
    SMALL_LIMITS,
    STREAM,
    SYSTEMS,
    TENSOR,
    UNARY,
    WIRES,
)

SMALL_BYTES = 4096
_CROWD_BYTES = 8
_LEAST_STREAMED = 4096
_FEW_ROUNDS = 6

_Taken = tuple[list[float], float, float]
"""Seconds of each call of a block, and CPU seconds of the client and of the servers."""


@dataclass(frozen=True, slots=True)
class RpcSettings:
    """What to run.

    Attributes:
        sizes: of payload, in bytes; multiples of 8.
        wires, cases: some of `WIRES` and `CASES`.
        rounds: blocks of each system, one pair of times each; fewer for messages over 64 MiB.
        block_s: about the seconds of a block of grpcio.
        channels: the number of channels in the case `descriptors`.
    """

    sizes: Sequence[int] = (
        8, 4096, 1 << 16, 1 << 18, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB
    )  # fmt: skip
    wires: Sequence[str] = WIRES
    cases: Sequence[str] = CASES
    rounds: int = 16
    block_s: float = 0.2
    channels: int = 1000


def run(settings: RpcSettings, tell: Told) -> Report:
    """Measures everything in turns; Ctrl-C ends it with the rows so far."""
    questions = list(_questions(settings))
    with measuring("rpc", dataclasses.asdict(settings) | {"held": {}}) as report:
        try:
            with ProcessPair(f"{__package__}.rpc_pair", {"wires": list(settings.wires)}) as pair:
                for number, (wire, case, size) in enumerate(questions):
                    tell(number, len(questions), f"{wire} {case} {size >> 10} KiB")
                    if case in HELD:
                        _measure_held(report, settings, wire, case)
                    else:
                        _measure(report, pair, settings, wire, case, size)
        except PairError as error:
            report.rows += [
                Row("rpc", f"{wire}.{case}", system, size, note=str(error))
                for wire, case, size in questions
                for system in _systems(wire, case, size)
                if report.find(f"{wire}.{case}", system, size) is None
            ]
    report.verdicts = [_with_limit(bar, bar.judge(report), report) for bar in BARS]
    report.verdicts += [judge(report, wire) for judge in (_tail, _crowd_cpu) for wire in WIRES]
    report.verdicts += [
        _held(report, wire, case, system)
        for case in HELD
        for wire in WIRES
        for system in (BYTES, RUNTIME)
    ]
    return report


def _questions(settings: RpcSettings) -> Iterator[tuple[str, str, int]]:
    for wire in settings.wires:
        for case in settings.cases:
            if case in (CROWD, CHANNEL):
                yield wire, case, _CROWD_BYTES
            elif case in HELD:
                yield wire, case, MIB
            elif case == SKEW:
                yield wire, case, sum(SKEW_SIZES)
            else:
                for size in settings.sizes:
                    if case != STREAM or size >= _LEAST_STREAMED:
                        yield wire, case, size


def _systems(wire: str, case: str, size: int) -> tuple[str, ...]:
    thresholds, left_out = _thresholds(), list[str]()
    if size < min(thresholds[each] for each in WIRES):
        left_out += LARGE_LIMITS
    if size >= thresholds[wire]:
        left_out += SMALL_LIMITS.values()
    return tuple(each for each in SYSTEMS[case] if each not in left_out)


def _thresholds() -> dict[str, int]:
    """Returns by wire the bytes from which payload does not travel in grpcio's message."""
    from tensorwire.rpc.payload.route import THRESHOLDS  # which imports grpcio

    return THRESHOLDS


def _measure_held(report: Report, settings: RpcSettings, wire: str, case: str) -> None:
    """Adds the number that each system holds to `report.settings["held"]`, and rows of its time."""
    name, held = f"{wire}.{case}", {}
    for system in SYSTEMS[case]:
        row = Row("rpc", name, system, MIB)
        try:
            with ProcessPair(f"{__package__}.rpc_held", {"wire": wire, "system": system}) as pair:
                held[system], each_s = pair.call(case, settings.channels)
        except PairError as error:
            report.rows.append(dataclasses.replace(row, note=str(error)))
        else:
            report.rows.append(row.timed([each_s], note=f"{held[system]} held"))
    report.settings["held"][name] = held


def _block(
    pair: ProcessPair, settings: RpcSettings, wire: str, case: str, system: str, size: int,
    count: int,
) -> _Taken:  # fmt: skip
    """Runs a block: `count` calls, or calls for `block_s` in the case CROWD."""
    if case == CROWD:
        taken: _Taken = pair.call("crowd", wire, system, size, settings.block_s)
        return taken
    return pair.call("time", wire, case, system, size, count), 0.0, 0.0


def _measure(
    report: Report, pair: ProcessPair, settings: RpcSettings, wire: str, case: str, size: int
) -> None:
    """Measures all systems of a case in turns and adds rows."""
    name, count, warm = f"{wire}.{case}", 0, 1
    rounds = settings.rounds if size <= 64 * MIB else min(settings.rounds, _FEW_ROUNDS)
    if case == CROWD:
        warm = 0  # a block makes its own memory
    else:
        probe = median(_block(pair, settings, wire, case, GRPCIO, size, 2)[0])
        count = max(1, min(200, int(settings.block_s / probe)))
    # In random order: the block before influences caches and cores.
    ways = {
        system: partial(_block, pair, settings, wire, case, system, size, count)
        for system in _systems(wire, case, size)
    }
    taken = take_turns(ways, rounds, warm, random.Random(17))
    middles = {system: [median(times) for times, _, _ in each] for system, each in taken.items()}
    for system, each in taken.items():
        samples = [one for times, _, _ in each for one in times]
        row = Row("rpc", name, system, size).timed(samples, moves=case not in (CROWD, CHANNEL))
        if row.gb_per_s is not None and case != STREAM:  # a call moves its payload twice
            row = dataclasses.replace(row, gb_per_s=2 * row.gb_per_s)
        if case == CROWD:
            here, there = (median([one[at] / len(one[0]) for one in each]) for at in (1, 2))
            row = dataclasses.replace(row, cpu_seconds_local=here, cpu_seconds_remote=there)
        if MEMCPY in middles and system != MEMCPY:
            row = row.beside(paired_ratio(middles[MEMCPY], middles[system]))
        report.rows.append(row)
        if system not in (GRPCIO, MEMCPY) and case != CROWD:
            for rival in (GRPCIO, BY_HAND) if system == RUNTIME else (GRPCIO,):
                if rival in middles:
                    report.compare(name, size, system, rival, middles[rival], middles[system])


def _against(wire: str, system: str, bar: float, least: int, most: float) -> Bar:
    reach = f"from {least >> 20} MiB" if most > 1 << 40 else f"at {least >> 20} MiB"
    return Bar(f"{wire} {system} against grpcio's bytes, {reach}", ">=", bar, "x as fast",
               f"{wire}.{UNARY}", system, least=least, most=most, rival=GRPCIO)  # fmt: skip


def _limit_of(bar: Bar, size: int) -> str:
    """Returns the system that is the limit of a bar's system, for payload of this size."""
    wire, _, case = bar.case.partition(".")
    if bar.rival == GRPCIO and bar.bar <= 1 and size < _thresholds()[wire]:
        return SMALL_LIMITS.get(bar.system, BY_HAND)
    return LIMITS.get(bar.system, BY_HAND) if case == UNARY else BY_HAND


def _with_limit(bar: Bar, verdict: Verdict, report: Report) -> Verdict:
    """Adds to a missed verdict the speed of the limit on this machine."""
    if verdict.met is not False or bar.rival != GRPCIO:
        return verdict
    ratios: dict[tuple[str, int], float] = {}
    for each in report.comparisons:
        if (each.case, each.rival) == (bar.case, bar.rival):
            upper = each.interval[1] if bar.upper_end and each.interval else each.ratio
            ratios[each.system, each.bytes] = upper
    missed = [
        size
        for (system, size), ratio in ratios.items()
        if system == bar.system and bar.least <= size <= bar.most and ratio < bar.bar
    ]
    limits = [
        (ratios[limit], limit[0])
        for size in missed
        if (limit := (_limit_of(bar, size), size)) in ratios
    ]
    if not limits:
        return verdict
    least, system = min(limits)
    detail = f"{system}: {least:.3g} {bar.unit}".rstrip()
    if len(limits) == len(missed) and max(limits)[0] < bar.bar:  # at each size that misses it
        detail = f"beyond this machine, {detail}"
    detail = f"{verdict.detail}; {detail}" if verdict.detail else detail
    return dataclasses.replace(verdict, detail=detail)


def _tail(report: Report, wire: str) -> Verdict:
    """Judges the ratio of the runtime's p99 to grpcio's, at the worst of the small sizes."""
    found = []
    for row in report.rows:
        rival = report.find(row.case, GRPCIO, row.bytes)
        if (row.case, row.system) != (f"{wire}.{UNARY}", RUNTIME) or row.bytes > SMALL_BYTES:
            continue
        if row.seconds_p99 is not None and rival is not None and rival.seconds_p99 is not None:
            found.append(row.seconds_p99 / rival.seconds_p99)
    name = f"{wire} runtime, p99 of small calls by grpcio's"
    detail = "" if found else "no small sizes were measured"
    return Verdict.of(name, "<=", 0.5, "", max(found, default=None), None, detail)


def _crowd_cpu(report: Report, wire: str) -> Verdict:
    """Judges the ratio of the runtime's calls per CPU second, of both ends, to grpcio's."""
    spent = []
    for system in (GRPCIO, RUNTIME, BY_HAND):
        row = report.find(f"{wire}.{CROWD}", system, _CROWD_BYTES)
        if row is not None and row.cpu_seconds_local and row.cpu_seconds_remote:
            spent.append(row.cpu_seconds_local + row.cpu_seconds_remote)
    name = f"{wire} runtime, calls of 16 clients for each CPU second, by grpcio's"
    if len(spent) < 3:
        return Verdict.of(name, ">=", 3.0, "x", None, None, "the case was not measured")
    verdict = Verdict.of(name, ">=", 3.0, "x", spent[0] / spent[1])
    detail = "" if verdict.met else f"{BY_HAND}: {spent[0] / spent[2]:.3g} x"
    return dataclasses.replace(verdict, detail=detail)


def _held(report: Report, wire: str, case: str, system: str) -> Verdict:
    """Judges the ratio of descriptors or bytes that a system holds to grpcio's."""
    found = report.settings["held"].get(f"{wire}.{case}", {})
    name = f"{wire} {system}, {case.replace('_', ' ')} by grpcio's"
    if system not in found or GRPCIO not in found:
        return Verdict.of(name, "<=", 2.0, "x", None, None, "the case was not measured")
    detail = f"{found[system]} by {found[GRPCIO]}"
    return Verdict.of(name, "<=", 2.0, "x", found[system] / found[GRPCIO], None, detail)


_MOST_EQUAL = 64 * MIB
_MOST_BY_HAND = 4 * MIB

BARS = (
    *(
        _against("shm", system, bar, size, size)
        for system in (BYTES, TENSOR, RUNTIME)
        for size, bar in ((MIB, 3.0), (16 * MIB, 5.0), (64 * MIB, 8.0))
    ),
    *(_against("tcp", system, 1.2, MIB, float("inf")) for system in (BYTES, TENSOR, RUNTIME)),
    Bar("shm tensors of memcpy, from 64 MiB", ">=", 0.8, "", f"shm.{UNARY}", TENSOR,
        least=64 * MIB),
    Bar("shm tensors of memcpy, streamed, from 64 MiB", ">=", 0.8, "", f"shm.{STREAM}", TENSOR,
        least=64 * MIB),
    *(
        Bar(f"{wire} runtime, small calls against grpcio's", ">=", bar, "x as fast",
            f"{wire}.{UNARY}", RUNTIME, most=SMALL_BYTES, rival=GRPCIO)
        for wire, bar in (("shm", 4.0), ("tcp", 2.0))
    ),
    Bar("shm runtime, arrays of skew sizes against grpcio's bytes", ">=", 8.0, "x as fast",
        f"shm.{SKEW}", RUNTIME_TENSOR, rival=GRPCIO),
    *(
        Bar(f"{wire} {case} {system} against grpcio's bytes, 8 B to 64 MiB, upper end", ">=", bar,
            "", f"{wire}.{case}", system, most=_MOST_EQUAL, rival=GRPCIO, upper_end=True)
        for wire in WIRES
        for case in (UNARY, AIO)
        for system, bar in ((BYTES, EQUAL), (TENSOR, 0.9))
    ),
    *(
        Bar(f"{wire} runtime, of the speed by hand, 8 B to 4 MiB", ">=", bar, "", f"{wire}.{UNARY}",
            RUNTIME, most=_MOST_BY_HAND, rival=BY_HAND)
        for wire, bar in (("shm", 1 / 2.5), ("tcp", 1 / 3))
    ),
    *(
        Bar(f"{wire} {system}, a channel for each call", ">=", 0.5, "x as fast",
            f"{wire}.{CHANNEL}", system, rival=GRPCIO)
        for wire in WIRES
        for system in (BYTES, RUNTIME)
    ),
)  # fmt: skip

"""What do messages cost in gRPC, and what with `tensorwire.rpc`?

One client, one servicer that gives back what it got, each in a process; both read the whole
payload. grpcio: raw bytes, limits raised, on shm over a unix socket. bytes: the same program with
the two lines changed. tensor: arrays as messages. runtime: as `bytes`, and calls go by frames in
memory instead of HTTP/2. torch-rpc: tensors by `rpc_sync`, in processes of its own. by-hand: two
processes copy into shared memory and raise eventfds on which the other one sleeps, or send on one
socket (tcp). by-hand-bytes: and make bytes of what came. in-turn, in-turn-bytes: the same behind a
call of grpcio with a small message, as payload that travels beside its message needs. memcpy: a
copy there and one back, and a look at each, in one process. grpcio-marked: grpcio with as much
metadata as attachments need; grpcio-tensor: with the same messages as `tensor`, made by hand. All
take turns, block by block; the first block of each, in which memory is made, does not count. A call
moves its payload twice; of a stream of answers a row is one message of eight. aio and aio_stream:
the same in event loops. uniform, random, skew: messages of ten buffers, as fields of bytes or as
arrays (tensor, runtime-tensor). clients1, 4, 16: so many threads of one client call at a time, with
8 bytes; the CPU time of both processes by calls is what counts; by-hand has a thread at the server
for each. processes1, 4, 16: the same with so many processes. requests: a stream of eight requests.
push_pull: three processes call two servers at a time, over and over, with the ten buffers of skew;
a row is the time by all calls. channel: a channel for each call. descriptors: those of a client
that has a thousand channels to twenty servers. slow_reader: memory of both ends while a client that
has read one message of a stream reads no more.

Not measured: other sizes of pools and threads.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
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
    CROWDS,
    GRPCIO,
    HELD,
    LARGE_LIMITS,
    LIMITS,
    MEMCPY,
    PROCESSES,
    PUSH_PULL,
    RUNTIME,
    RUNTIME_TENSOR,
    SCHEMES,
    SERVERS,
    SKEW,
    SMALL_LIMITS,
    STREAM,
    STREAMS,
    SYSTEMS,
    TENSOR,
    TORCH,
    UNARY,
    WIRES,
    WORKERS,
)
from .rpc_workers import Workers

SMALL_BYTES = 4096
_CROWD_BYTES = 8
_LEAST_STREAMED = 4096
_FEW_ROUNDS = 6

_Taken = tuple[list[float], float, float]
"""Seconds of each call of a block, and CPU time at both ends divided by the calls."""


@dataclass(frozen=True, slots=True)
class RpcSettings:
    """What to run.

    Attributes:
        sizes: of payload, in bytes; multiples of 8.
        wires, cases: of `WIRES` and `CASES`.
        rounds: blocks of each system; one pair of times each. Of the longest messages fewer.
        torch: torch RPC is a system too, where it is installed.
        block_s: about how long a block of grpcio takes.
        channels: of a client that holds many.
    """

    sizes: Sequence[int] = (
        8, 4096, 1 << 16, 1 << 18, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB
    )  # fmt: skip
    wires: Sequence[str] = WIRES
    cases: Sequence[str] = CASES
    rounds: int = 16
    torch: bool = True
    block_s: float = 0.2
    channels: int = 1000


def run(settings: RpcSettings, tell: Told) -> Report:
    """Measures everything in turns; Ctrl-C ends it with the rows so far."""
    questions = list(_questions(settings))
    module, options = f"{__package__}.rpc_pair", {"wires": list(settings.wires)}
    with measuring("rpc", dataclasses.asdict(settings) | {"held": {}}) as report:
        try:
            with (
                closing(_TorchPairs()) as torch, ProcessPair(module, options) as pair,
                closing(_Crew(settings)) as crew,
            ):  # fmt: skip
                for number, (wire, case, size) in enumerate(questions):
                    tell(number, len(questions), f"{wire} {case} {size >> 10} KiB")
                    if case in CROWDS:
                        _measure_crowd(report, pair, settings, wire, case)
                    elif case in PROCESSES:
                        _measure_processes(report, pair, crew, settings, wire, case)
                    elif case == PUSH_PULL:
                        _measure_push_pull(report, pair, crew, settings, wire)
                    elif case in HELD:
                        _measure_held(report, settings, wire, case)
                    else:
                        _measure(report, pair, torch, settings, wire, case, size)
        except PairError as error:
            report.rows += [
                Row("rpc", f"{wire}.{case}", system, size, note=str(error))
                for wire, case, size in questions
                for system in _systems(settings, wire, case, size)
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
            if case in CROWDS or case in PROCESSES or case == CHANNEL:
                yield wire, case, _CROWD_BYTES
            elif case in HELD:
                yield wire, case, MIB
            elif case in SCHEMES or case == PUSH_PULL:
                yield wire, case, _scheme_bytes(SKEW if case == PUSH_PULL else case)
            else:
                for size in settings.sizes:
                    if case not in STREAMS or size >= _LEAST_STREAMED:
                        yield wire, case, size


def _scheme_bytes(case: str) -> int:
    from .rpc_payloads import total_bytes  # which imports grpcio

    return total_bytes(case)


def _systems(settings: RpcSettings, wire: str, case: str, size: int) -> tuple[str, ...]:
    thresholds = _thresholds()
    left_out = [] if settings.torch else [TORCH]
    if size < min(thresholds[each] for each in WIRES):
        left_out += LARGE_LIMITS
    if size >= thresholds[wire]:
        left_out += SMALL_LIMITS.values()
    return tuple(each for each in SYSTEMS[case] if each not in left_out)


def _thresholds() -> dict[str, int]:
    """From how many bytes payload travels beside messages of grpcio, by wire."""
    from tensorwire.rpc.payload.route import THRESHOLDS  # which imports grpcio

    return THRESHOLDS


class _TorchPairs:
    """The processes of torch RPC, one pair for each wire, which begin when they are asked for."""

    def __init__(self) -> None:
        self._pairs: dict[str, ProcessPair] = {}

    def time(self, wire: str, size: int, count: int) -> list[float]:
        """Seconds of each call; PairError if there are none."""
        pair = self._pairs.get(wire)
        if pair is None or pair.closed:
            # On shm the reactor of TensorPipe polls: on two cores that takes one from the others.
            module = f"{__package__}.rpc_torch"
            pair = self._pairs[wire] = ProcessPair(module, {"wire": wire}, polls=True)
        found: list[float] = pair.call("time", size, count)
        return found

    def close(self) -> None:
        """Ends them."""
        for pair in self._pairs.values():
            pair.close()


class _Crew:
    """Client processes and a second pair of servers, which begin when they are asked for."""

    def __init__(self, settings: RpcSettings) -> None:
        self._wires = list(settings.wires)
        most = max((PROCESSES.get(case, 0) for case in settings.cases), default=0)
        self._count = max(most, WORKERS)
        self._workers: Workers | None = None
        self._others: list[ProcessPair] = []

    def workers(self, pair: ProcessPair) -> Workers:
        """The processes, connected to the servers of the pair and to the others."""
        if self._workers is None:
            for _ in range(SERVERS - 1):
                self._others.append(ProcessPair(f"{__package__}.rpc_pair", {"wires": self._wires}))
            targets = [each.call("targets") for each in (pair, *self._others)]
            self._workers = Workers(self._count, targets)
        return self._workers

    def remote_cpu(self, pair: ProcessPair) -> float:
        """Seconds of CPU time of all servers so far."""
        return sum(float(each.call("remote_cpu")) for each in (pair, *self._others))

    def close(self) -> None:
        """Ends them."""
        if self._workers is not None:
            self._workers.close()
        for each in self._others:
            each.close()


def _measure_processes(
    report: Report, pair: ProcessPair, crew: _Crew, settings: RpcSettings, wire: str, case: str
) -> None:
    workers = crew.workers(pair)

    def block(system: str) -> _Taken:
        there = crew.remote_cpu(pair)
        times, here = workers.call(PROCESSES[case], wire, system, _CROWD_BYTES, settings.block_s)
        there = crew.remote_cpu(pair) - there
        return times, here / len(times), there / len(times)

    _add_crowd(report, f"{wire}.{case}", _CROWD_BYTES, _blocks(block, settings, case))


def _measure_push_pull(
    report: Report, pair: ProcessPair, crew: _Crew, settings: RpcSettings, wire: str
) -> None:
    workers, name, size = crew.workers(pair), f"{wire}.{PUSH_PULL}", _scheme_bytes(SKEW)

    def block(system: str) -> _Taken:
        there = crew.remote_cpu(pair)
        took, calls, here = workers.push_pull(WORKERS, wire, system, settings.block_s)
        there = crew.remote_cpu(pair) - there
        return [took / calls], here / calls, there / calls

    rounds = _blocks(block, settings, PUSH_PULL)
    _add_crowd(report, name, size, rounds, moves=True)
    samples = {system: [times[0] for times, _, _ in each] for system, each in rounds.items()}
    for system in samples:
        if system != GRPCIO:
            report.compare(name, size, system, GRPCIO, samples[GRPCIO], samples[system])


def _measure_held(report: Report, settings: RpcSettings, wire: str, case: str) -> None:
    """Adds to `settings["held"]` of the report what each system holds; the rows have its time."""
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


def _measure_crowd(
    report: Report, pair: ProcessPair, settings: RpcSettings, wire: str, case: str
) -> None:
    def block(system: str) -> _Taken:
        asked = wire, system, _CROWD_BYTES, settings.block_s, CROWDS[case]
        found: _Taken = pair.call("crowd", *asked)
        return found

    _add_crowd(report, f"{wire}.{case}", _CROWD_BYTES, _blocks(block, settings, case))


def _blocks(
    block: Callable[[str], _Taken], settings: RpcSettings, case: str
) -> dict[str, list[_Taken]]:
    """All systems of a case in turns."""
    ways = {system: partial(block, system) for system in SYSTEMS[case]}
    return take_turns(ways, settings.rounds, warm=0)


def _add_crowd(
    report: Report, name: str, size: int, rounds: dict[str, list[_Taken]], moves: bool = False
) -> None:
    """Rows of seconds of each call, and of CPU time at both ends by calls."""
    for system, each in rounds.items():
        samples = [sample for times, _, _ in each for sample in times]
        local, remote = median([one[1] for one in each]), median([one[2] for one in each])
        row = Row("rpc", name, system, size).timed(
            samples, moves=moves, cpu_seconds_local=local, cpu_seconds_remote=remote
        )
        report.rows.append(_both_ways(row))


def _both_ways(row: Row) -> Row:
    """A call moves its payload twice."""
    return row if row.gb_per_s is None else dataclasses.replace(row, gb_per_s=2 * row.gb_per_s)


def _measure(
    report: Report,
    pair: ProcessPair,
    torch: _TorchPairs,
    settings: RpcSettings,
    wire: str,
    case: str,
    size: int,
) -> None:
    name = f"{wire}.{case}"
    probe = median(pair.call("time", wire, case, GRPCIO, size, 2))
    count = max(1, min(200, int(settings.block_s / probe)))
    systems = _systems(settings, wire, case, size)
    blocks: dict[str, list[list[float]]] = {each: [] for each in systems}
    missing = ""
    rounds = settings.rounds if size <= 64 * MIB else min(settings.rounds, _FEW_ROUNDS)
    draw = random.Random(17)
    for number in range(1 + rounds):
        # In an order that is drawn: what runs before a block leaves caches and cores as it likes.
        for system in draw.sample(list(blocks), len(blocks)):
            times: list[float] = []
            if system != TORCH:
                times = pair.call("time", wire, case, system, size, count)
            elif not missing:
                try:
                    times = torch.time(wire, size, count)
                except PairError as error:
                    missing = str(error)
            if number and times:  # the first round makes the memory that all others use again
                blocks[system].append(times)
    middles = {system: [median(block) for block in each] for system, each in blocks.items()}
    for system, each in blocks.items():
        if system == TORCH and missing:
            report.rows.append(Row("rpc", name, system, size, note=missing))
            continue
        samples = [sample for block in each for sample in block]
        row = Row("rpc", name, system, size).timed(samples, moves=case != CHANNEL)
        row = row if case in STREAMS else _both_ways(row)
        if MEMCPY in middles and system != MEMCPY:
            row = row.beside(paired_ratio(middles[MEMCPY], middles[system]))
        report.rows.append(row)
        if system in (GRPCIO, MEMCPY):
            continue
        for rival in (GRPCIO, BY_HAND) if system == RUNTIME else (GRPCIO,):
            if rival in middles:
                report.compare(name, size, system, rival, middles[rival], middles[system])


def _against(wire: str, system: str, bar: float, least: int, most: float) -> Bar:
    reach = f"from {least >> 20} MiB" if most > 1 << 40 else f"at {least >> 20} MiB"
    return Bar(f"{wire} {system} against grpcio's bytes, {reach}", ">=", bar, "x as fast",
               f"{wire}.{UNARY}", system, least=least, most=most, rival=GRPCIO)  # fmt: skip


def _limit_of(bar: Bar, size: int) -> str:
    """The system that says what the one of a bar could come to, with payload of this size."""
    wire, _, case = bar.case.partition(".")
    if bar.rival == GRPCIO and bar.bar <= 1 and size < _thresholds()[wire]:
        return SMALL_LIMITS.get(bar.system, BY_HAND)
    return LIMITS.get(bar.system, BY_HAND) if case == UNARY else BY_HAND


def _with_limit(bar: Bar, verdict: Verdict, report: Report) -> Verdict:
    """A verdict that was missed, with what the same payload costs at least on this machine."""
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
    """The slowest calls of the runtime by those of grpcio, at the worst of the small sizes."""
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
    """Calls of the runtime in a second of CPU time, of both ends, by those of grpcio."""
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
    """Judges the descriptors or bytes that a system holds by those that grpcio holds."""
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

"""Compares the rows of `bench memory` with the bars that it must reach.

A bar over several sizes is judged by the worst of them. A case that was not measured is said to be
so; it never counts as met.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorwire.bench.operations import CPP, PYTHON, TORCH_COPY
from tensorwire.bench.rows import Comparison, Report, Row, Verdict, format_size

MIB = 1 << 20
EQUAL = 0.97
"""A paired ratio from which on a system counts as no slower than its rival."""

Figure = tuple[float, tuple[float, float] | None]
"""A value and its interval."""


def ratio(row: Row) -> Figure | None:
    """Returns the part of the limit's speed."""
    return None if row.ratio_to_limit is None else (row.ratio_to_limit, row.ratio_interval)


def by_limit(row: Row) -> Figure | None:
    """Returns the ratio turned round: own time by the limit's."""
    return _turned(row.ratio_to_limit, row.ratio_interval)


def _turned(value: float | None, interval: tuple[float, float] | None) -> Figure | None:
    if not value:
        return None
    return 1 / value, (1 / interval[1], 1 / interval[0]) if interval and interval[0] > 0 else None


def _microseconds(row: Row) -> Figure | None:
    return None if row.seconds_median is None else (row.seconds_median * 1e6, None)


def _remote_cpu(row: Row) -> Figure | None:
    """Returns the CPU time of the peer, in percent of the duration."""
    if row.seconds_median is None or row.cpu_seconds_remote is None:
        return None
    return 100 * row.cpu_seconds_remote / row.seconds_median, None


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar that a figure must reach.

    Attributes:
        name, direction, bar, unit: as a verdict has them.
        case, system: whose rows count; with a `rival` the comparisons with it, which say how many
            times as fast it is, or with "<=" how many times as much it takes.
        figure: what of a row is judged.
        least, most: bytes of the rows that count.
        upper_end: of the interval of a comparison, not its median, has to reach the bar.
    """

    name: str
    direction: str
    bar: float
    unit: str
    case: str
    system: str
    figure: Callable[[Row], Figure | None] = ratio
    least: int = 0
    most: float = float("inf")
    rival: str = ""
    upper_end: bool = False

    def judge(self, report: Report) -> Verdict:
        """Returns the verdict on a report."""
        found = [
            (*figure, item.bytes)
            for item in (report.comparisons if self.rival else report.rows)
            if self._counts(item) and (figure := self._figure(item)) is not None
        ]
        told = (self.name, self.direction, self.bar, self.unit)
        if not found:
            return Verdict.of(*told, None, None, self._missing(report))
        verdicts = [Verdict.of(*told, value, interval) for value, interval, _ in found]
        pick = min if self.direction == ">=" else max
        value, interval, size_bytes = pick(found, key=lambda each: each[0])
        detail = f"worst at {format_size(size_bytes)}" if len(found) > 1 else ""
        reached = sum(verdict.met is True for verdict in verdicts)
        if len(found) > 1 and reached < len(found):
            detail += f", {reached} of {len(found)} sizes reach it"
        return Verdict.of(*told, value, interval, detail)

    def _counts(self, item: Row | Comparison) -> bool:
        rival = item.rival if isinstance(item, Comparison) else ""
        mine = (item.case, item.system, rival) == (self.case, self.system, self.rival)
        return mine and self.least <= item.bytes <= self.most

    def _figure(self, item: Row | Comparison) -> Figure | None:
        if not isinstance(item, Comparison):
            return self.figure(item)
        if self.direction == "<=":
            return _turned(item.ratio, item.interval)
        value = item.interval[1] if self.upper_end and item.interval else item.ratio
        return value, item.interval

    def _missing(self, report: Report) -> str:
        systems = {self.system, self.rival} - {""}
        notes = {
            row.note
            for row in report.rows
            if row.case == self.case and row.system in systems and not row.measured and row.note
        }
        named = " and ".join(sorted(systems))
        return "; ".join(sorted(notes)) or f"no row of {named} in {self.case} for these sizes"


BARS: tuple[Bar, ...] = (
    *(
        Bar(f"shm {case} of memcpy, 1 MiB up", ">=", 0.9, "", f"shm.{case}", PYTHON, least=MIB)
        for case in ("write", "read")
    ),
    Bar("shm 8 B write from Python", "<=", 2.0, "µs", "shm.write", PYTHON, _microseconds, 8, 8),
    Bar("shm 8 B write from C++", "<=", 0.2, "µs", "shm.write", CPP, _microseconds, 8, 8),
    *(
        Bar(f"shm {case} against {name}, every size", ">=", EQUAL, "", f"shm.{case}", PYTHON,
            rival=rival)
        for rival, name in (("nixl", "NIXL on like pages"), ("nixl-huge", "NIXL on huge pages"))
        for case in ("write", "read")
    ),
    Bar("shm 64 MiB write, remote CPU by its duration", "<=", 1.0, "%", "shm.write", PYTHON,
        _remote_cpu, 64 * MIB, 64 * MIB),
    *(
        Bar(f"tcp {case} of the raw socket, 1 MiB up", ">=", 0.9, "", f"tcp.{case}", CPP,
            least=MIB)
        for case in ("write", "read")
    ),
    *(
        Bar(f"tcp 8 B round trip on {count} {cores}", "<=", bar, "x the raw socket",
            f"tcp.round_trip.{count}_{cores}", CPP, by_limit)
        for count, cores, bar in (("one", "core", 1.6), ("two", "cores", 1.2))
    ),
    *(
        Bar(f"{wire} waiting process, share of a core", "<=", 2.0, "%", f"{wire}.waiting", PYTHON,
            _remote_cpu)
        for wire in ("shm", "tcp")
    ),
    *(
        Bar(f"{pair.replace('_', ' ')} of cuMemcpyAsync, {sizes}", ">=", 0.9, "",
            f"gpu.write_{pair}", system, least=least)
        for pair in ("gpu_to_gpu", "pinned_to_gpu", "gpu_to_pinned")
        for system, sizes, least in ((CPP, "every size from C++", 0), (PYTHON, "1 MiB up", MIB))
    ),
    *(
        Bar(f"{pair.replace('_', ' ')} from Python of torch's copy_, every size", ">=", 0.9, "",
            f"gpu.write_{pair}", PYTHON, rival=TORCH_COPY)
        for pair in ("gpu_to_gpu", "pinned_to_gpu", "gpu_to_pinned")
    ),
    *(
        Bar(f"{pair.replace('_', ' ')} against NIXL, every size", ">=", EQUAL, "",
            f"gpu.write_{pair}", PYTHON, rival="nixl-gpu")
        for pair in ("gpu_to_gpu", "pinned_to_gpu", "gpu_to_pinned")
    ),
    Bar("shm signal ping-pong, both awake", "<=", 10.0, "µs", "shm.signal_awake", PYTHON,
        _microseconds, 8, 8),
)  # fmt: skip


def judge(report: Report) -> list[Verdict]:
    """Returns all verdicts on a report, in the order in which the bars are written down."""
    on_gpu = "gpu" in report.settings.get("wires", ())
    return [bar.judge(report) for bar in BARS if on_gpu or not bar.case.startswith("gpu.")]

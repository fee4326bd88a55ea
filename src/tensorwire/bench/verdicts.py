"""The bars that `bench memory` must reach, and how far the rows are from them.

A bar over several sizes is judged by the worst of them. A case that was not measured is said to be
so; it never counts as met.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorwire.bench.rows import Report, Row, Verdict, format_size

MIB = 1 << 20
EQUAL = 0.97
"""A paired ratio from which on a system counts as no slower than its rival."""


def judge(report: Report) -> list[Verdict]:
    """All verdicts on a report, in the order in which the bars are written down."""
    return [
        *(
            _worst_ratio(report, f"shm.{case}", "tensorwire", 0.9, MIB, f"shm {case} of memcpy")
            for case in ("write", "read")
        ),
        _latency(report, "shm.write", "tensorwire", 8, 2e-6, "shm 8 B write from Python"),
        _latency(report, "shm.write", "tensorwire-c++", 8, 0.2e-6, "shm 8 B write from C++"),
        *(
            _rival(report, f"shm.{case}", rival, name)
            for rival, name in (("nixl", "NIXL on like pages"), ("nixl-huge", "NIXL on huge pages"))
            for case in ("write", "read")
        ),
        _remote_cpu(report, "shm.write", 64 * MIB, 0.01),
        *(
            _worst_ratio(
                report, f"tcp.{case}", "tensorwire-c++", 0.9, MIB, f"tcp {case} of the raw socket"
            )
            for case in ("write", "read")
        ),
        _round_trip(report, "tcp.round_trip.one_core", 1.6, "tcp 8 B round trip on one core"),
        _round_trip(report, "tcp.round_trip.two_cores", 1.2, "tcp 8 B round trip on two cores"),
        *(_waiting(report, wire) for wire in ("shm", "tcp")),
        _latency(
            report, "shm.signal_awake", "tensorwire", 8, 10e-6, "shm signal ping-pong, both awake"
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Figure:
    value: float
    interval: tuple[float, float] | None
    size_bytes: int


def _verdict(
    name: str, bar: float, direction: str, unit: str, figures: Iterable[_Figure], missing: str
) -> Verdict:
    found = list(figures)
    if not found:
        return Verdict(name, bar, direction, unit, detail=missing)
    pick = min if direction == ">=" else max
    worst = pick(found, key=lambda figure: figure.value)
    met = worst.value >= bar if direction == ">=" else worst.value <= bar
    detail = f"worst at {format_size(worst.size_bytes)}" if len(found) > 1 else ""
    if len(found) > 1 and not met:
        reached = sum(f.value >= bar if direction == ">=" else f.value <= bar for f in found)
        detail += f", {reached} of {len(found)} sizes reach it"
    return Verdict(name, bar, direction, unit, worst.value, worst.interval, met, detail)


def _rows(report: Report, case: str, system: str) -> list[Row]:
    return [row for row in report.rows if row.case == case and row.system == system]


def _missing(report: Report, case: str, system: str) -> str:
    notes = {row.note for row in _rows(report, case, system) if not row.measured and row.note}
    return "; ".join(sorted(notes)) or f"no row of {system} in {case} for these sizes"


def _worst_ratio(
    report: Report, case: str, system: str, bar: float, from_bytes: int, name: str
) -> Verdict:
    figures = [
        _Figure(row.ratio_to_limit, row.ratio_interval, row.bytes)
        for row in _rows(report, case, system)
        if row.ratio_to_limit is not None and row.bytes >= from_bytes
    ]
    missing = _missing(report, case, system)
    return _verdict(f"{name}, {format_size(from_bytes)} up", bar, ">=", "", figures, missing)


def _latency(
    report: Report, case: str, system: str, size_bytes: int, bar_s: float, name: str
) -> Verdict:
    figures = [
        _Figure(row.seconds_median * 1e6, None, row.bytes)
        for row in _rows(report, case, system)
        if row.seconds_median is not None and row.bytes == size_bytes
    ]
    return _verdict(name, bar_s * 1e6, "<=", "µs", figures, _missing(report, case, system))


def _rival(report: Report, case: str, rival: str, called: str) -> Verdict:
    figures = [
        _Figure(item.ratio, item.interval, item.bytes)
        for item in report.comparisons
        if (item.case, item.system, item.rival) == (case, "tensorwire", rival)
    ]
    name = f"{case.replace('.', ' ')} against {called}, every size"
    return _verdict(name, EQUAL, ">=", "", figures, _missing(report, case, rival))


def _remote_cpu(report: Report, case: str, size_bytes: int, bar: float) -> Verdict:
    figures = [
        _Figure(row.cpu_seconds_remote / row.seconds_median, None, row.bytes)
        for row in _rows(report, case, "tensorwire")
        if row.bytes == size_bytes
        and row.seconds_median is not None
        and row.cpu_seconds_remote is not None
    ]
    return _verdict(
        f"shm {format_size(size_bytes)} write, remote CPU by its duration",
        bar * 100, "<=", "%",
        [_Figure(f.value * 100, None, f.size_bytes) for f in figures],
        _missing(report, case, "tensorwire"),
    )  # fmt: skip


def _round_trip(report: Report, case: str, bar: float, name: str) -> Verdict:
    """The ratio turned round: own time by the raw socket's."""
    figures = []
    for row in _rows(report, case, "tensorwire-c++"):
        if row.ratio_to_limit is None:
            continue
        interval = None
        if row.ratio_interval is not None:
            interval = (1 / row.ratio_interval[1], 1 / row.ratio_interval[0])
        figures.append(_Figure(1 / row.ratio_to_limit, interval, row.bytes))
    missing = _missing(report, case, "tensorwire-c++")
    return _verdict(name, bar, "<=", "x the raw socket", figures, missing)


def _waiting(report: Report, wire: str) -> Verdict:
    figures = [
        _Figure(100 * row.cpu_seconds_remote / row.seconds_median, None, row.bytes)
        for row in _rows(report, f"{wire}.waiting", "tensorwire")
        if row.seconds_median is not None and row.cpu_seconds_remote is not None
    ]
    return _verdict(
        f"{wire} waiting process, share of a core", 2.0, "<=", "%", figures,
        _missing(report, f"{wire}.waiting", "tensorwire"),
    )  # fmt: skip

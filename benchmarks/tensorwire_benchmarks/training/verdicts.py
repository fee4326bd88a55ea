"""The bars that `bench training` must reach, per model, and how far the comparisons are from them.

A bar that was not measured is said to be so; it never counts as met.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorwire.bench.rows import Report, Verdict
from tensorwire_benchmarks.training.figures import Extra
from tensorwire_benchmarks.training.systems import LIMIT, OWN

LIMIT_BAR = 2.0
GLOO_BAR = 3.0
GRPC_BAR = 4.0
ALONE_BAR_US = 200.0


def judge(report: Report, models: Sequence[str]) -> list[Verdict]:
    """All verdicts on a report, model by model."""
    found = []
    for name in models:
        found.append(of_limit(report, f"shm.{name}.exchange", OWN, LIMIT_BAR))
        found.append(faster(report, f"shm.{name}.exchange", OWN, "ddp-gloo", GLOO_BAR))
        found.append(faster(report, f"tcp.{name}.isolated", OWN, "grpc", GRPC_BAR))
        found.append(faster(report, f"tcp.{name}.exchange", OWN, "grpc", GRPC_BAR))
    return found


def judge_alone(case: str, extra: Extra | None, reason: str) -> Verdict:
    """What a step costs more than without tensorwire; `reason` where it was not measured."""
    name, unit = f"{case}, extra to plain torch", "µs per step"
    if extra is None:
        return Verdict(name, ALONE_BAR_US, "<=", unit, detail=reason)
    value, interval = 1e6 * extra.seconds, None
    if extra.interval is not None:
        interval = (1e6 * extra.interval[0], 1e6 * extra.interval[1])
    return Verdict(name, ALONE_BAR_US, "<=", unit, value, interval, value <= ALONE_BAR_US)


def of_limit(report: Report, case: str, own: str, bar: float) -> Verdict:
    """The ratio turned round: own time by the limit's."""
    name = f"{case} by the limit of an exchange"
    row = next((r for r in report.rows if r.case == case and r.system == own), None)
    if row is None or not row.ratio_to_limit:
        return Verdict(name, bar, "<=", "x", detail=missing(report, case, (own, LIMIT)))
    value, interval = 1 / row.ratio_to_limit, None
    if row.ratio_interval is not None and row.ratio_interval[0] > 0:
        interval = (1 / row.ratio_interval[1], 1 / row.ratio_interval[0])
    return Verdict(name, bar, "<=", "x", value, interval, value <= bar)


def faster(report: Report, case: str, own: str, rival: str, bar: float) -> Verdict:
    """How many times as fast as a rival."""
    name = f"{case} against {rival}"
    for item in report.comparisons:
        if (item.case, item.system, item.rival) == (case, own, rival):
            return Verdict(
                name, bar, ">=", "x as fast", item.ratio, item.interval, item.ratio >= bar
            )
    return Verdict(name, bar, ">=", "x as fast", detail=missing(report, case, (own, rival)))


def missing(report: Report, case: str, systems: Sequence[str]) -> str:
    """Why these systems have no figures in a case."""
    notes = [
        f"{row.system}: {row.note}"
        for row in report.rows
        if row.case == case and row.system in systems and not row.measured
    ]
    return "; ".join(notes) or f"{' and '.join(systems)} did not both run in {case}"

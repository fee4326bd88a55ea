"""The bars of the benches of training steps, as tables, and the verdicts on them.

A bar that was not measured has a verdict that says so, and never counts as met.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tensorwire.bench.rows import Report, Row, Verdict
from tensorwire.bench.verdicts import Bar, by_limit
from tensorwire_benchmarks.figures import End, Extra
from tensorwire_benchmarks.systems import COMPUTATION, COPY, GRPC, LIMIT, OWN, PLAN

TRAINING_BARS = (
    ("shm.{}.exchange", LIMIT, 2.0),
    ("shm.{}.exchange", "ddp-gloo", 3.0),
    ("tcp.{}.isolated", "grpc", 4.0),
    ("tcp.{}.exchange", "grpc", 4.0),
)
"""Case, rival or limit, and bar: at most that many times the limit, or times as fast."""

COMMUNICATION_BOUND = ("alexnet", "vgg16", "fcn5")
"""Models whose communication takes longer than computation in the paper's times."""
EXPOSED = "exposed"
PLACEMENT_BARS = (
    ("{}/shm", LIMIT, 1.5, False),
    ("{}/shm/isolated", LIMIT, 1.5, False),
    # By all clocks: a system that sends during backward has little left to do after it.
    ("{}/shm/isolated", "grpc", 15.0, True),
    ("{}/shm/exposed", "grpc", 15.0, True),
    ("{}/shm", "grpc", 15.0, True),
    # Placement against an RPC that moves large messages one-sidedly on the same transport.
    ("{}/shm/isolated", "grpc-tensorwire", 2.69, True),
    ("{}/tcp/isolated", "grpc", 4.0, False),
    ("{}/tcp/exposed", "grpc", 4.0, False),
    ("{}/tcp", "grpc", 4.0, False),
)
"""Case, rival or limit, bar, and whether the bar is only for `COMMUNICATION_BOUND` models."""
TABLES_BAR = 2.0
LIBRARIES_BAR = 1.0
COPY_BAR = 1.5
LINK_BAR = 0.95
FIRST_LINK = "1gbit"
MOST_BUSY = 0.7
"""The most busy share of all cores at which a link faster than `FIRST_LINK` is judged."""
CPU_BAR = 0.5
ALONE_BAR_US = 200.0
BITS_STEPS = 20
IN_PLACE_BAR = 99.0
_MOST = 100.0  # the largest ratio of differences that is told; beyond it is noise
_LINK_NAME = " exchange of a raw socket, both ways at once"


def judge_training(report: Report, models: Sequence[str]) -> list[Verdict]:
    """All verdicts that rows and comparisons tell, model by model."""
    return [
        _beside(report, case.format(name), OWN, beside, bar)
        for name in models
        for case, beside, bar in TRAINING_BARS
    ]


def judge_parameters(report: Report, models: Sequence[str]) -> list[Verdict]:
    """Judges whole steps against DistributedDataParallel."""
    return [
        _beside(report, f"{wire}.{name}.step", OWN, "ddp-gloo", TABLES_BAR)
        for name in models
        for wire in ("shm", "tcp")
    ]


def judge_links(report: Report, models: Sequence[str]) -> list[Verdict]:
    """Judges push and pull on links by the limit, and their CPU seconds by gRPC's.

    A link that keeps this machine's cores too busy, except the first, is not judged by the limit:
    the cores would be measured instead.
    """
    found = []
    for name in models:
        for wire in report.settings.get("wires", ()):
            case = f"{wire}.{name}.isolated"
            busy = _busy(report, case)
            told = (f"{case} by a raw socket, both ways at once", ">=", LINK_BAR, "")
            if busy is not None and busy > MOST_BUSY and wire != FIRST_LINK:
                share = f"{100 * busy:.0f} % of all cores is busy, more than {100 * MOST_BUSY:.0f}"
                value = None if (row := _row(report, case, OWN)) is None else row.ratio_to_limit
                why = f"{share}: cores bound it, not the link ({value:.2f} of it)"
                found.append(Verdict.of(*told, None, None, why))
            else:
                found.append(Bar(*told, case, OWN).judge(report))
            found.append(_less_cpu(report, case))
    return found


def _busy(report: Report, case: str) -> float | None:
    """Returns the share of all cores that both ends of an exchange use; None if unknown."""
    row = _row(report, case, OWN)
    seconds = None if row is None else _cpu_seconds(row)
    if row is None or seconds is None or row.seconds_median is None:
        return None
    return seconds / row.seconds_median / (os.cpu_count() or 1)


def _cpu_seconds(row: Row) -> float | None:
    if row.cpu_seconds_local is None or row.cpu_seconds_remote is None:
        return None
    return row.cpu_seconds_local + row.cpu_seconds_remote


def _less_cpu(report: Report, case: str) -> Verdict:
    """Judges the ratio of CPU seconds of both sides per exchange to gRPC's."""
    seconds = [
        None if (row := _row(report, case, system)) is None else _cpu_seconds(row)
        for system in (OWN, GRPC.name)
    ]
    name = f"{case} CPU seconds of both sides, by those of gRPC"
    own_s, grpc_s = seconds
    if own_s is None or not grpc_s:
        missing = f"{OWN} and {GRPC.name} did not both run in {case}"
        return Verdict.of(name, "<=", CPU_BAR, "x", None, None, missing)
    return Verdict.of(name, "<=", CPU_BAR, "x", own_s / grpc_s, None)


def judge_libraries(report: Report, cases: Sequence[str]) -> list[Verdict]:
    """Judges whether whole steps of other libraries' loops are as fast as with their own DDP."""
    return [_beside(report, case, OWN, "ddp-gloo", LIBRARIES_BAR) for case in cases]


def judge_placement(report: Report, workloads: Sequence[str]) -> list[Verdict]:
    """All verdicts that rows and comparisons tell, workload by workload."""
    found = []
    linked = "1gbit" in report.settings.get("wires", ())
    for name in workloads:
        for case, beside, bar, bound in PLACEMENT_BARS:
            if name in COMMUNICATION_BOUND or not bound:
                found.append(_beside(report, case.format(name), PLAN.name, beside, bar))
        found += _of_copy(report, f"{name}/shm")
        if linked:
            case = f"{name}/1gbit"
            found.append(
                Bar(f"{case}{_LINK_NAME}", ">=", LINK_BAR, "", case, PLAN.name).judge(report)
            )
    if not linked:
        missing = "it needs --wire 1gbit"
        found.append(Verdict.of(f"1gbit{_LINK_NAME}", ">=", LINK_BAR, "", None, None, missing))
    return found


# --- what rows and comparisons tell -------------------------------------------------------------


def _beside(report: Report, case: str, own: str, beside: str, bar: float) -> Verdict:
    if case.endswith(f"/{EXPOSED}"):
        return _exposed(report, case, beside, bar)
    if beside == LIMIT:
        name = f"{case} by the limit of an exchange"
        return Bar(name, "<=", bar, "x", case, own, by_limit).judge(report)
    name = f"{case} against {beside}"
    return Bar(name, ">=", bar, "x as fast", case, own, rival=beside).judge(report)


def _row(report: Report, case: str, system: str) -> Row | None:
    return next((r for r in report.rows if (r.case, r.system) == (case, system)), None)


def _seconds(report: Report, case: str, system: str) -> float | None:
    row = _row(report, case, system)
    return None if row is None else row.seconds_median


def _exposed(report: Report, case: str, rival: str, bar: float) -> Verdict:
    """Judges the extra time of a step to computation alone, against a rival's."""
    name = f"{case.removesuffix(f'/{EXPOSED}')} exposed communication, against {rival}"
    plan_s, rival_s = (_seconds(report, case, system) for system in (PLAN.name, rival))
    value, detail = None, ""
    if plan_s is None or rival_s is None:
        detail = f"plan, {rival} and computation did not all run"
    elif rival_s <= 0:
        detail = f"{rival}'s step is no longer than its computation"
    elif rival_s >= _MOST * plan_s:
        value, detail = _MOST, f"{_MOST:g} or more"
    else:
        value = rival_s / plan_s
    return Verdict.of(name, ">=", bar, "x as fast", value, None, detail)


def _of_copy(report: Report, case: str) -> list[Verdict]:
    """Judges plan against copy where communication dominates, in the paper or in copy's step."""
    exposed = _exposed(report, f"{case}/{EXPOSED}", COPY.name, COPY_BAR)
    copy_s = _seconds(report, f"{case}/{EXPOSED}", COPY.name)
    computation = _seconds(report, f"{case}/step", COMPUTATION.name)
    if exposed.measured is None or copy_s is None or computation is None:
        return [exposed]
    if copy_s <= computation and case.partition("/")[0] not in COMMUNICATION_BOUND:
        why = "computation takes more of copy's step than communication does"
        return [Verdict.of(exposed.name, ">=", COPY_BAR, "x as fast", None, None, why)]
    paired = (f"{case}/isolated", case)
    return [exposed, *(_beside(report, c, PLAN.name, COPY.name, COPY_BAR) for c in paired)]


# --- what the ends of systems tell --------------------------------------------------------------


def judge_ends(case: str, ends: Mapping[str, End]) -> list[Verdict]:
    """Returns the verdicts on bits and on gradients in place."""
    return [judge_bits(case, ends), judge_in_place(case, ends)]


def judge_bits(case: str, ends: Mapping[str, End]) -> Verdict:
    """Judges the number of steps after which `plan` and `copy` have the same bits."""
    plan, copy = (ends.get(system.name) for system in (PLAN, COPY))
    steps, detail = None, ""
    if plan is None or copy is None:
        detail = "plan and copy did not both run to their end"
    elif plan.steps != copy.steps:
        detail = f"they took {plan.steps} and {copy.steps} steps"
    elif len({*plan.bits, *copy.bits}) == 1:
        steps = float(plan.steps)
    else:
        steps, detail = 0.0, f"they differ after {plan.steps} steps"
    name = f"{case} bits of plan and copy"
    return Verdict.of(name, ">=", BITS_STEPS, "equal steps", steps, None, detail)


def judge_in_place(case: str, ends: Mapping[str, End]) -> Verdict:
    """Judges the share of dense gradients that `plan` produced in place in its last step."""
    end = ends.get(PLAN.name)
    percent, why = None, "plan did not run to its end"
    if end is not None:
        why = "no gradient of plan has a place" if end.in_place is None else ""
        percent = None if end.in_place is None else 100 * end.in_place
    name = f"{case} gradient bytes in place"
    return Verdict.of(name, ">=", IN_PLACE_BAR, "%", percent, None, why)


# --- what one process tells ---------------------------------------------------------------------


def judge_alone(case: str, extra: Extra | None, reason: str) -> Verdict:
    """Judges the extra time of a step with tensorwire; `reason` says why it was not measured."""
    value = interval = None
    if extra is not None:
        value = 1e6 * extra.seconds
        if extra.interval is not None:
            interval = (1e6 * extra.interval[0], 1e6 * extra.interval[1])
    name = f"{case}, extra to plain torch"
    return Verdict.of(name, "<=", ALONE_BAR_US, "µs per step", value, interval, reason)

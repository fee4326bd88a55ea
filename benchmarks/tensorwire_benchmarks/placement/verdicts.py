"""The bars that `bench placement` must reach, per workload, and how far the figures are from them.

A bar that was not measured is said to be so; it never counts as met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorwire.bench.harness import Ratio
from tensorwire.bench.rows import Report, Verdict, format_seconds
from tensorwire_benchmarks.training.stage import End
from tensorwire_benchmarks.training.systems import COMPUTATION, COPY, GRPC, LIMIT, PLAN
from tensorwire_benchmarks.training.verdicts import faster, missing, of_limit

LIMIT_BAR = 1.5
COMMUNICATION_BOUND = ("alexnet", "vgg16", "fcn5")
"""By the paper's computation and wire times."""
GRPC_SHM_BAR = 15.0
GRPC_TCP_BAR = 4.0
COPY_BAR = 1.5
LINK_BAR = 0.95
BITS_STEPS = 20
IN_PLACE_BAR = 99.0
OVERHEAD_BAR = 1.02
OVERHEAD_PAIRS = 30
PLANNING_BAR_S = 10.0
_MOST = 100.0  # a ratio of differences; what is beyond it is noise
_LINK_NAME = " exchange of a raw socket, both ways at once"


def judge(report: Report, workloads: Sequence[str]) -> list[Verdict]:
    """All verdicts that rows and comparisons tell, workload by workload."""
    found = []
    for name in workloads:
        shm, tcp = f"{name}/shm", f"{name}/tcp"
        found.append(of_limit(report, shm, PLAN.name, LIMIT_BAR))
        found.append(of_limit(report, f"{shm}/isolated", PLAN.name, LIMIT_BAR))
        if name in COMMUNICATION_BOUND:
            found += _of_grpc(report, shm, GRPC_SHM_BAR)
        found += _of_grpc(report, tcp, GRPC_TCP_BAR)
        found += _of_copy(report, shm)
        if "1gbit" in report.settings.get("wires", ()):
            found.append(_of_link(report, f"{name}/1gbit"))
    if "1gbit" not in report.settings.get("wires", ()):
        found.append(
            Verdict(f"1gbit{_LINK_NAME}", LINK_BAR, ">=", "", detail="it needs --wire 1gbit")
        )
    return found


def _of_link(report: Report, case: str) -> Verdict:
    """What both ways of a raw socket take at once, by the exchange's time."""
    name = f"{case}{_LINK_NAME}"
    for row in report.rows:
        if (row.case, row.system) == (case, PLAN.name) and row.ratio_to_limit is not None:
            ratio = row.ratio_to_limit
            return Verdict(name, LINK_BAR, ">=", "", ratio, row.ratio_interval, ratio >= LINK_BAR)
    return Verdict(name, LINK_BAR, ">=", "", detail=missing(report, case, (PLAN.name, LIMIT)))


def _of_copy(report: Report, case: str) -> list[Verdict]:
    """Where communication dominates: in the paper, or it takes more of copy's step here."""
    exposed = _exposed(report, case, COPY.name, COPY_BAR)
    copy_s = _seconds(report, f"{case}/exposed", COPY.name)
    computation = _seconds(report, f"{case}/step", COMPUTATION.name)
    if exposed.measured is None or copy_s is None or computation is None:
        return [exposed]
    if copy_s <= computation and case.partition("/")[0] not in COMMUNICATION_BOUND:
        why = "computation takes more of copy's step than communication does"
        return [Verdict(exposed.name, COPY_BAR, ">=", "x as fast", detail=why)]
    return [
        exposed,
        faster(report, f"{case}/isolated", PLAN.name, COPY.name, COPY_BAR),
        faster(report, case, PLAN.name, COPY.name, COPY_BAR),
    ]


def _of_grpc(report: Report, case: str, bar: float) -> list[Verdict]:
    """By all clocks: one that sends during backward has little left to do behind it."""
    return [
        faster(report, f"{case}/isolated", PLAN.name, GRPC.name, bar),
        _exposed(report, case, GRPC.name, bar),
        faster(report, case, PLAN.name, GRPC.name, bar),
    ]


def _exposed(report: Report, case: str, rival: str, bar: float) -> Verdict:
    """What a step takes longer than computation alone."""
    name = f"{case} exposed communication, against {rival}"
    plan_s = _seconds(report, f"{case}/exposed", PLAN.name)
    rival_s = _seconds(report, f"{case}/exposed", rival)
    if plan_s is None or rival_s is None:
        why = f"plan, {rival} and computation did not all run"
        return Verdict(name, bar, ">=", "x as fast", detail=why)
    if rival_s <= 0:
        why = f"{rival}'s step is no longer than its computation"
        return Verdict(name, bar, ">=", "x as fast", detail=why)
    beyond = plan_s * _MOST <= rival_s
    ratio = _MOST if beyond else rival_s / plan_s
    detail = f"{_MOST:g} or more" if beyond else ""
    return Verdict(name, bar, ">=", "x as fast", ratio, None, ratio >= bar, detail)


def _seconds(report: Report, case: str, system: str) -> float | None:
    rows = [row for row in report.rows if (row.case, row.system) == (case, system)]
    return rows[0].seconds_median if rows else None


def judge_bits(case: str, ends: Mapping[str, End]) -> Verdict:
    """Whether `plan` and `copy` had the same bits after the same number of steps, and how many."""
    name = f"{case} bits of plan and copy"
    plan, copy = (ends.get(system.name) for system in (PLAN, COPY))
    if plan is None or copy is None:
        why = "plan and copy did not both run to their end"
        return Verdict(name, BITS_STEPS, ">=", "equal steps", detail=why)
    if plan.steps != copy.steps:
        other = f"they took {plan.steps} and {copy.steps} steps"
        return Verdict(name, BITS_STEPS, ">=", "equal steps", detail=other)
    equal = len({*plan.bits, *copy.bits}) == 1
    steps = float(plan.steps) if equal else 0.0
    detail = "" if equal else f"they differ after {plan.steps} steps"
    return Verdict(name, BITS_STEPS, ">=", "equal steps", steps, None, steps >= BITS_STEPS, detail)


def judge_in_place(case: str, ends: Mapping[str, End]) -> Verdict:
    """How much of its dense gradients `plan` produced in place, in its last step."""
    name = f"{case} gradient bytes in place"
    end = ends.get(PLAN.name)
    if end is None or end.in_place is None:
        why = "plan did not run to its end" if end is None else "no gradient of plan has a place"
        return Verdict(name, IN_PLACE_BAR, ">=", "%", detail=why)
    percent = 100 * end.in_place
    return Verdict(name, IN_PLACE_BAR, ">=", "%", percent, None, percent >= IN_PLACE_BAR)


def judge_overhead(case: str, ratio: Ratio | None, reason: str = "") -> Verdict:
    """CPU time of steps with placement by those without; few pairs say nothing about 2 %.

    `reason`: why there is none, as below.
    """
    name = f"{case} CPU seconds, against copy"
    if ratio is None:
        return Verdict(name, OVERHEAD_BAR, "<=", "x", detail=reason)
    if ratio.pairs < OVERHEAD_PAIRS:
        why = f"{ratio.median:.3g} x after {ratio.pairs} pairs; it counts from {OVERHEAD_PAIRS} on"
        return Verdict(name, OVERHEAD_BAR, "<=", "x", detail=why)
    met = ratio.median <= OVERHEAD_BAR
    return Verdict(name, OVERHEAD_BAR, "<=", "x", ratio.median, ratio.interval, met)


def judge_planning(case: str, taken: tuple[float, float] | None, reason: str = "") -> Verdict:
    """What the first steps took longer with placement, and the part that is learning, in seconds.

    Copies that are saved can outweigh the rest: at least the learning counts.
    """
    name = f"{case} trace and plan"
    if taken is None:
        return Verdict(name, PLANNING_BAR_S, "<=", "s", detail=reason)
    extra_s, learning_s = taken
    worst_s = max(extra_s, learning_s)
    extra = f"{format_seconds(abs(extra_s))} {'more' if extra_s > 0 else 'less'} than copy"
    detail = f"to begin takes {extra}; learning allocations {format_seconds(learning_s)}"
    met = worst_s <= PLANNING_BAR_S
    return Verdict(name, PLANNING_BAR_S, "<=", "s", worst_s, None, met, detail)

"""Runs the benches whose cases are training steps; a `Bench` describes one.

Measured on one host per model and wire, with workers in lockstep, reduction and optimizer included:

- the *isolated* exchange: its clock starts when all gradients exist and none was sent, and ends
  when the slowest worker may read the updated parameters;
- the *exchange* within a step: from the last gradient that any worker produced, so without what a
  system did during backward;
- the whole *step*, and in `placement` its *exposed* part: the time beyond a step of workers that
  only compute.

`contest.py` lets systems take turns. On the wire `alone` the cost of a script in one process is
measured (`alone.py`).

Not measured: real networks, accelerators, more workers than cores allow, accuracy. Images and
sequences are small, so computation is a smaller part of a step than in practice. That the systems
compute the same is checked once, after their first steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tensorwire.bench.measuring import measuring
from tensorwire.bench.rows import Report, Verdict
from tensorwire_benchmarks.alone import MAX_BYTES
from tensorwire_benchmarks.bench import ALONE, OPTIMIZER, Bench, Settings
from tensorwire_benchmarks.contest import WireContest

Progress = Callable[[int, int, str], None]
"""A function of (contests done, contests in all, label), never called while a turn runs."""


def run(
    bench: Bench, settings: Settings, progress: Progress | None = None,
    then: Callable[[Report], object] = lambda report: None,
) -> Report:  # fmt: skip
    """Runs a bench, then calls `then` with its report. Ctrl-C ends it early with the rows so far.

    Raises:
        UnavailableError: torch is not installed, and a model needs it to compute its size.
    """
    others: list[Verdict] = []  # they do not follow from rows and comparisons
    with measuring(bench.name, _describe(bench, settings)) as report:
        contests = [
            (model, wire)
            for model in settings.models
            for wire in settings.wires
            if wire != ALONE or model.size_bytes <= MAX_BYTES
        ]
        tell = progress or (lambda done, total, label: None)
        for done, (model, wire) in enumerate(contests):
            label = bench.label(wire, model.name)
            tell(done, len(contests), label)
            if wire == ALONE and bench.alone is not None:
                rows, verdicts = bench.alone(bench, model, settings)
                report.rows += rows
                others += verdicts
            else:
                contest = WireContest(bench, settings, model, wire)
                contest.tell = partial(_tell, tell, done, len(contests), label)
                others += _measure(contest, report)
        then(report)
    verdicts = bench.judge(report, [model.name for model in settings.models])
    report.verdicts = [*verdicts, *others, *report.verdicts]
    return report


def _tell(tell: Progress, done: int, total: int, label: str, what: str) -> None:
    tell(done, total, f"{label} {what}")


def _measure(contest: WireContest, report: Report) -> list[Verdict]:
    """Runs a contest, adds its results to the report even if it fails; returns further verdicts."""
    try:
        contest.measure()
    finally:
        contest.close()
        report.rows += contest.rows()
        report.comparisons += contest.comparisons()
        report.settings["warnings"] += contest.warnings
    return contest.bench.judge_ends(contest.case("exchange"), contest.ends)


def _describe(bench: Bench, settings: Settings) -> dict[str, object]:
    return {
        bench.called: [model.describe() for model in settings.models],
        "wires": list(settings.wires),
        "systems": list(settings.systems),
        "optimizer": OPTIMIZER,
        "workers": settings.workers,
        "steps": settings.steps,
        "turns": settings.turns,
    }

"""`bench placement`: what does the exchange of a synchronous step cost, with placement and without?

Measured, on one host, per workload and wire, with two workers in lockstep, reduction and optimizer
included: the *isolated* exchange, whole and by itself: all gradients were produced and nothing has
left when its clock starts, the slowest worker may read the updated parameters when it ends; the
*exchange* of a step as it comes, from the last gradient that any worker produced, so without what a
system did during backward; the whole *step*; and how it divides into computation and communication
(`shares.py`). `plan` produces gradients where they are needed, `copy` is the same
transport without that analysis, `grpc` a parameter server on gRPC, `computation` the same workers
with no exchange. After all its turns `copy` must have the very bits of `plan`. On the wire `alone`:
what placement itself costs (`overhead.py`).

Not measured: real networks, accelerators, more workers than cores allow, accuracy. Images and
sequences are small, so computation is a smaller part of a step than in practice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tensorwire.bench import machine
from tensorwire.bench.rows import Report, Verdict
from tensorwire.parameters import most_threads
from tensorwire_benchmarks.placement import overhead
from tensorwire_benchmarks.placement.shares import rows_of
from tensorwire_benchmarks.placement.verdicts import (
    OVERHEAD_PAIRS,
    judge,
    judge_bits,
    judge_in_place,
)
from tensorwire_benchmarks.training.stage import Course, Stage
from tensorwire_benchmarks.training.systems import COMPUTATION, COPY, GRPC, LIMIT, PLAN
from tensorwire_benchmarks.workloads.catalog import WORKLOADS, Workload, workload

BENCH = "placement"
LINKS = {"1gbit": 1000}
"""Wires between two hosts, with Mbit/s."""
WIRES = ("shm", "tcp", overhead.ALONE, *LINKS)
SYSTEMS = (PLAN, COPY, COMPUTATION, GRPC)
NAMES = (PLAN.name, LIMIT, COPY.name, COMPUTATION.name, GRPC.name)
"""In the order of their turns: the limit beside what is held against it."""


@dataclass(slots=True)
class Settings:
    """What to run. Defaults are the full bench of some hours.

    Attributes:
        optimizer: of workloads that need none of their own.
        steps: per system, None for the workload's own number.
        turns: into how many turns they are cut; six give a first interval.
        server_threads: that tensorwire's server may use; the limit gets as many as it then uses.
    """

    workloads: Sequence[Workload] = WORKLOADS
    wires: Sequence[str] = WIRES[:3]
    systems: Sequence[str] = NAMES
    optimizer: str = "sgd"
    workers: int = 2
    steps: int | None = None
    turns: int = 10
    server_threads: int = field(default_factory=most_threads)

    @classmethod
    def quick(cls) -> Settings:
        """A look of a few minutes: two workloads, few steps, wide intervals."""
        return cls(workloads=(workload("fcn5"), workload("lstm")), steps=12, turns=6)


Progress = Callable[[int, int, str], None]
"""Called with the stages done, their number and a label, never while a turn runs."""


def case_of(wire: str, name: str, what: str) -> str:
    """The name of a case: "alexnet/shm" for the exchange, "alexnet/shm/step" for what is beside."""
    return f"{name}/{wire}" if what == "exchange" else f"{name}/{wire}/{what}"


def run(settings: Settings, progress: Progress | None = None) -> Report:
    """Runs the bench. Ctrl-C ends it early with the rows so far (`settings["interrupted"]`).

    Raises:
        UnavailableError: torch is not installed.
    """
    about = machine.describe()
    report = Report(BENCH, about, settings=_describe(settings, about))
    stages = [(model, wire) for model in settings.workloads for wire in settings.wires]
    total = len(stages)
    course = _course(settings)
    others: list[Verdict] = []  # that rows and comparisons do not tell
    try:
        for done, (model, wire) in enumerate(stages):
            if wire == overhead.ALONE:
                if progress is not None:
                    progress(done, total, f"{model.name}/{wire}")
                pairs = settings.steps or OVERHEAD_PAIRS
                wanted = model.optimizer or settings.optimizer
                rows, verdicts = overhead.run(BENCH, model, wanted, pairs)
                report.rows += rows
                others += verdicts
                continue
            stage = Stage(course, model, wire)
            if progress is not None:
                stage.tell = partial(_tell, progress, done, total, f"{model.name}/{wire}")
            try:
                stage.measure()
            finally:
                stage.close()
                report.rows += [*stage.rows(), *rows_of(stage, settings.systems)]
                report.comparisons += stage.comparisons()
                report.settings["warnings"] += stage.warnings
                case = case_of(wire, model.name, "exchange")
                others += [judge_bits(case, stage.ends), judge_in_place(case, stage.ends)]
    except KeyboardInterrupt:
        report.settings["interrupted"] = True
    report.settings["load_average_after"] = machine.load_average()
    report.verdicts = [*judge(report, [model.name for model in settings.workloads]), *others]
    if progress is not None:
        progress(total, total, "done")
    return report


def _course(settings: Settings) -> Course:
    return Course(
        bench=BENCH,
        systems=[system for system in SYSTEMS if system.name in settings.systems],
        order=[name for name in NAMES if name in settings.systems],
        own=PLAN.name,
        case=case_of,
        optimizer=settings.optimizer,
        workers=settings.workers,
        steps=settings.steps,
        turns=settings.turns,
        server_threads=settings.server_threads,
        links=LINKS,
    )


def _tell(progress: Progress, done: int, total: int, label: str, what: str) -> None:
    progress(done, total, f"{label} {what}")


def _describe(settings: Settings, about: dict[str, object]) -> dict[str, object]:
    return {
        "workloads": [model.describe() for model in settings.workloads],
        "wires": list(settings.wires),
        "systems": list(settings.systems),
        "optimizer": settings.optimizer,
        "workers": settings.workers,
        "steps": settings.steps,
        "turns": settings.turns,
        "interrupted": False,
        "warnings": machine.warnings_about(about),
    }

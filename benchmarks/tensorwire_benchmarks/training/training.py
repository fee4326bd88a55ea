"""`bench training`: what does a synchronous step cost, and how near is its exchange to the limit?

Measured, on one host, per model and wire, with two workers in lockstep: a *step*, the whole
iteration (forward, backward, exchange, zero_grad); its *exchange*, from the last gradient that any
worker produced until the slowest worker may read the updated parameters, reduction and optimizer
included; and, of systems that can, an *isolated* exchange, before which nothing has left although
all gradients were produced. How systems take turns is in `training.stage`. Besides, for small
models, what a script costs more that runs alone (`training.alone`).

Not measured: real networks, accelerators, more workers than cores allow, accuracy. That the systems
compute the same is checked once, after their first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tensorwire.bench import machine
from tensorwire.bench.rows import Report, Verdict
from tensorwire.parameters import most_threads
from tensorwire_benchmarks.training import alone
from tensorwire_benchmarks.training.models import MODELS, Network
from tensorwire_benchmarks.training.stage import Course, Stage
from tensorwire_benchmarks.training.systems import LIMIT, OWN, SYSTEMS
from tensorwire_benchmarks.training.verdicts import judge, judge_alone

BENCH = "training"
WIRES = ("shm", "tcp", alone.ALONE)
"""Alone there is no wire, and one process."""
OPTIMIZERS = ("sgd", "adamw")
NAMES = (OWN, LIMIT, *(system.name for system in SYSTEMS if system.name != OWN))
"""In the order of their turns: the limit beside what is held against it."""


@dataclass(slots=True)
class Settings:
    """What to run. Defaults are the full bench of about half an hour.

    Attributes:
        steps: per system and model, None for the model's own number.
        turns: into how many turns they are cut; six give a first interval.
        server_threads: that tensorwire's server may use; the limit gets as many as it then uses.
    """

    models: Sequence[Network] = MODELS
    wires: Sequence[str] = WIRES
    systems: Sequence[str] = NAMES
    optimizer: str = "sgd"
    workers: int = 2
    steps: int | None = None
    turns: int = 10
    server_threads: int = field(default_factory=most_threads)

    @classmethod
    def quick(cls) -> Settings:
        """A look of some minutes: the smaller models, few steps, wide intervals."""
        return cls(models=MODELS[:2], steps=12, turns=6)


Progress = Callable[[int, int, str], None]
"""Called with the stages done, their number and a label, never while a turn runs."""


def run(settings: Settings, progress: Progress | None = None) -> Report:
    """Runs the bench. Ctrl-C ends it early with the rows so far (`settings["interrupted"]`)."""
    about = machine.describe()
    report = Report(BENCH, about, settings=_describe(settings, about))
    stages = [(model, wire) for model in settings.models for wire in settings.wires]
    small = [model for model in settings.models if model.size_bytes <= alone.MAX_BYTES]
    stages = [(model, wire) for model, wire in stages if wire != alone.ALONE or model in small]
    total = len(stages)
    course = _course(settings)
    found: dict[str, Verdict] = {}
    try:
        for done, (model, wire) in enumerate(stages):
            if wire == alone.ALONE:
                if progress is not None:
                    progress(done, total, f"{alone.ALONE}.{model.name}")
                if OWN in settings.systems:
                    rows, found[model.name] = alone.run(
                        BENCH, model, settings.optimizer, settings.turns
                    )
                    report.rows += rows
                continue
            stage = Stage(course, model, wire)
            if progress is not None:
                stage.tell = partial(_tell, progress, done, total, f"{wire}.{model.name}")
            try:
                stage.measure()
            finally:
                stage.close()
                report.rows += stage.rows()
                report.comparisons += stage.comparisons()
                report.settings["warnings"] += stage.warnings
    except KeyboardInterrupt:
        report.settings["interrupted"] = True
    report.settings["load_average_after"] = machine.load_average()
    report.verdicts = judge(report, [model.name for model in settings.models])
    for model in small:
        missing = judge_alone(alone.case_of(model), None, "it did not run")
        report.verdicts.append(found.get(model.name, missing))
    if progress is not None:
        progress(total, total, "done")
    return report


def _course(settings: Settings) -> Course:
    return Course(
        bench=BENCH,
        systems=[system for system in SYSTEMS if system.name in settings.systems],
        order=[name for name in NAMES if name in settings.systems],
        own=OWN,
        case=lambda wire, model, what: f"{wire}.{model}.{what}",
        optimizer=settings.optimizer,
        workers=settings.workers,
        steps=settings.steps,
        turns=settings.turns,
        server_threads=settings.server_threads,
    )


def _tell(progress: Progress, done: int, total: int, label: str, what: str) -> None:
    progress(done, total, f"{label} {what}")


def _describe(settings: Settings, about: dict[str, object]) -> dict[str, object]:
    return {
        "models": [model.describe() for model in settings.models],
        "wires": list(settings.wires),
        "systems": list(settings.systems),
        "optimizer": settings.optimizer,
        "workers": settings.workers,
        "steps": settings.steps,
        "turns": settings.turns,
        "interrupted": False,
        "warnings": machine.warnings_about(about),
    }

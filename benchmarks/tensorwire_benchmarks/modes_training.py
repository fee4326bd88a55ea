"""Measures training in the modes of a job and in other systems: steps and seconds to a loss.

The loss is the final loss of `sync` with all workers, by seed, on a fixed part of the training data
in eval mode; worker 0 keeps copies while it trains, which are judged after the run. A number of
steps is the sum over all workers divided by the number of workers. Teams of one size live at the
same time; they train one after the other, seed by seed, in turns.

A run is recorded as data (`Curve`), from which everything else follows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire.bench.harness import median
from tensorwire.bench.processes import PairError
from tensorwire.bench.rows import Report, Row, Verdict
from tensorwire.bench.verdicts import Bar
from tensorwire_benchmarks import modes_worker
from tensorwire_benchmarks.modes_worker import Trained
from tensorwire_benchmarks.systems import ASYNC, BOUNDED, DDP, GRPC, SYNC
from tensorwire_benchmarks.team import Team

STEPS = {"digits": 160, "characters": 200, "text": 400}
"""Steps of `sync` with all workers, by task."""
TASKS = tuple(STEPS)
JUDGED = ("digits", "characters")
STEPS_BAR = 1.5
_SYSTEMS = (SYNC, ASYNC, BOUNDED, DDP, GRPC)
_APART = (ASYNC.name, BOUNDED.name)
_LONGER = 2  # times the steps of sync that async and bounded make
_MARKS = 20  # copies in a run of sync


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What to train.

    Attributes:
        tasks: some of `TASKS`.
        sizes: numbers of workers; the bar is on the first.
        seeds: the number of seeds.
        shorten: the divisor of the steps.
    """

    tasks: Sequence[str] = TASKS
    sizes: Sequence[int] = (4, 2, 1)
    seeds: int = 5
    shorten: int = 1


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: its steps and loss at some times.

    Attributes:
        seconds: since the beginning of the run.
        steps: steps of all workers, divided by the number of workers.
        loss: on a fixed part of the training data.
    """

    task: str
    workers: int
    system: str
    seed: int
    seconds: list[float]
    steps: list[float]
    loss: list[float]

    @classmethod
    def of(cls, task: str, system: str, seed: int, told: Sequence[Trained]) -> Curve:
        """Makes the curve of a run from the results of its workers."""
        marks = told[0].marks
        moments = [told[0].ends[step - 1] if step else 0.0 for step, _ in marks]
        made = [sum(bisect_right(each.ends, moment) for each in told) for moment in moments]
        return cls(
            task, len(told), system, seed, moments, [count / len(told) for count in made],
            [loss for _, loss in marks],
        )  # fmt: skip

    def reaches(self, loss: float) -> tuple[float, float] | None:
        """Returns seconds and steps to this loss; None if it was not reached."""
        for index, found in enumerate(self.loss):
            if found <= loss:
                return self.seconds[index], self.steps[index]
        return None


def middles(curves: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one curve for each task, number of workers and system: medians over seeds."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in curves:
        runs.setdefault((each["task"], each["workers"], each["system"]), []).append(each)
    return [
        dict(zip(("task", "workers", "system"), key, strict=True)) | {
            what: [median(moment) for moment in zip(*(each[what] for each in same), strict=True)]
            for what in ("seconds", "steps", "loss")
        }
        for key, same in runs.items()
    ]  # fmt: skip


def measure(
    report: Report, settings: TrainingSettings, tell: Callable[[int, int, str], None]
) -> list[Curve]:
    """Trains everything; adds rows, comparisons and curves to the report, also if it fails."""
    curves: list[Curve] = []
    failed: dict[tuple[int, str], str] = {}
    sizes: dict[str, int] = {}
    total = len(settings.sizes) * len(settings.tasks) * settings.seeds if settings.tasks else 0
    done = 0
    try:
        for workers in settings.sizes if settings.tasks else ():
            with contextlib.ExitStack() as stack:
                tell(done, total, f"starts {workers} workers of each system")
                teams = _start(stack, workers, failed)
                for task in settings.tasks:
                    for seed in range(settings.seeds):
                        order = list(teams.items())
                        for name, team in order if seed % 2 == 0 else reversed(order):
                            tell(done, total, f"{task}, {workers} workers, seed {seed}, {name}")
                            if (workers, name) in failed:
                                continue
                            try:
                                told = _train(team, settings, task, seed, workers, name)
                            except PairError as error:
                                failed[workers, name] = str(error)
                                team.close()
                                continue
                            sizes[task] = told[0].size_bytes
                            curves.append(Curve.of(task, name, seed, told))
                        done += 1
    finally:
        for task in settings.tasks:
            for workers in settings.sizes:
                _report(report, curves, failed, task, workers, settings, sizes.get(task, 0))
        report.settings["curves"] = middles([dataclasses.asdict(curve) for curve in curves])
    return curves


def _start(
    stack: contextlib.ExitStack, workers: int, failed: dict[tuple[int, str], str]
) -> dict[str, Team]:
    teams: dict[str, Team] = {}
    for system in _SYSTEMS:
        if workers == 1 and system.name in _APART:  # the same as sync
            continue
        if reason := system.missing():
            failed[workers, system.name] = reason
            continue
        try:
            team = Team(system, "shm", None, workers, "adamw", program=modes_worker.__name__)
        except PairError as error:
            failed[workers, system.name] = str(error)
            continue
        stack.callback(team.close)
        teams[system.name] = team
    return teams


def _train(
    team: Team, settings: TrainingSettings, task: str, seed: int, workers: int, name: str
) -> list[Trained]:
    """Trains one seed: all sizes use the same number of samples, async and bounded more."""
    count = STEPS[task] // settings.shorten * settings.sizes[0] // workers
    every = max(1, count // _MARKS)
    steps = count * (_LONGER if name in _APART else 1)
    return team.call("train", task, seed, steps, every, timeout_s=600.0)


def _report(
    report: Report, curves: Sequence[Curve], failed: dict[tuple[int, str], str], task: str,
    workers: int, settings: TrainingSettings, size_bytes: int,
) -> None:  # fmt: skip
    """Adds rows of each system's time to the loss, and comparisons of times and steps with sync."""
    case = f"{task}.{workers}"
    most = settings.sizes[0]
    runs = {(each.workers, each.system, each.seed): each for each in curves if each.task == task}
    ends = {
        seed: run.loss[-1]
        for (size, name, seed), run in runs.items()
        if (size, name) == (most, SYNC.name)
    }
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for system in _SYSTEMS:
        name = system.name
        if workers == 1 and name in _APART:
            continue
        row = Row(report.bench, case, name, size_bytes, note=failed.get((workers, name), ""))
        missed = 0
        for seed, loss in ends.items():
            if run := runs.get((workers, name, seed)):
                reached = run.reaches(loss)
                missed += reached is None
                # A run that did not reach the loss counts with its end, a lower bound.
                found.setdefault(name, {})[seed] = reached or (run.seconds[-1], run.steps[-1])
        if times := [seconds for seconds, _ in found.get(name, {}).values()]:
            steps = median([steps for _, steps in found[name].values()])
            note = f"{steps:.0f} steps to the loss of sync with {most} workers"
            if missed:
                note += f"; {missed} of {len(times)} runs did not reach it: their whole time"
            if row.note:
                note += f"; then it failed: {row.note}"
            row = row.timed(times, note=note)
        elif not row.note:
            row = dataclasses.replace(row, note="it took no turn")
        report.rows.append(row)
    sync = found.pop(SYNC.name, {})
    for name, mine in found.items():
        both = [seed for seed in mine if seed in sync]
        for what, part in ((case, 0), (f"{case}.steps", 1)):
            rivals, own = ([each[seed][part] for seed in both] for each in (sync, mine))
            report.compare(what, size_bytes, name, SYNC.name, rivals, own)


def judge(report: Report, workers: int) -> list[Verdict]:
    """Judges the ratio of steps of `async` and `bounded` to `sync`, of each task with a bar."""
    return [
        Bar(f"{task}: steps to the loss of sync, {name}", "<=", STEPS_BAR, "x",
            f"{task}.{workers}.steps", name, rival=SYNC.name).judge(report)
        for task in JUDGED
        for name in _APART
    ]  # fmt: skip

"""Measures what the modes of a job gain where workers are not equally fast, and their cost.

Steps sleep, so that cores are no limit: `slow` has one worker that is four times slower than the
others, `stalls` has workers that sometimes pause. The figure is steps per second of all workers
together; the limit is a simulation of the same sleeps with an exchange that takes no time.
`modes_training.py` measures the steps and seconds of training.

Not measured: several hosts, servers that are the bottleneck, the modes' memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tensorwire.bench.harness import paired_ratio
from tensorwire.bench.measuring import measuring
from tensorwire.bench.processes import PairError
from tensorwire.bench.rows import Report, Row, Verdict
from tensorwire.bench.verdicts import Bar
from tensorwire.command import Told
from tensorwire_benchmarks import modes_training, modes_worker
from tensorwire_benchmarks.modes_training import TrainingSettings
from tensorwire_benchmarks.systems import ASYNC, BOUNDED, SYNC, System
from tensorwire_benchmarks.systems.own import STALENESS
from tensorwire_benchmarks.team import Team

SLOW, STALLS, INDEPENDENT = "slow", "stalls", "stalls.independent"
SLEEPING = (SLOW, STALLS)
CASES = (*SLEEPING, *modes_training.TASKS)
_FACTOR = 4  # how many times slower the slow worker is
_BLOCK = 4  # steps of a worker with one stall
_CHANCE = 0.2  # of an independent stall
_BOUNDS = {SYNC.name: 0, BOUNDED.name: STALENESS, ASYNC.name: None}

Sleeps = list[list[float]]
"""Seconds that each step sleeps, by worker."""


@dataclass(frozen=True, slots=True)
class ModesSettings:
    """What to run.

    Attributes:
        cases: some of `CASES`.
        turns: of each system.
        step_s: seconds that a normal step sleeps.
        steps: steps of the slow worker in a turn of `slow`; each makes twice as many in `stalls`.
        training: settings of training; its tasks follow from `cases`.
    """

    cases: Sequence[str] = CASES
    workers: int = 4
    turns: int = 8
    step_s: float = 0.1
    steps: int = 10
    training: TrainingSettings = field(default_factory=TrainingSettings)


def run(settings: ModesSettings, tell: Told) -> Report:
    """Measures everything in turns; Ctrl-C ends it with the rows of the cases so far."""
    described = {**dataclasses.asdict(settings), "staleness": STALENESS}
    sleeping = [case for case in SLEEPING if case in settings.cases]
    tasks = tuple(case for case in modes_training.TASKS if case in settings.cases)
    with measuring("modes", described) as report:
        for number, case in enumerate(sleeping):
            _measure_sleeps(report, settings, case, partial(tell, number, len(sleeping)))
        training = dataclasses.replace(settings.training, tasks=tasks)
        modes_training.measure(report, training, tell)
    report.verdicts = judge(report)
    return report


# --- workers that sleep -------------------------------------------------------------------------


def draw(case: str, system: str, settings: ModesSettings, turn: int) -> Sleeps:
    """Returns the seconds that the steps of a turn sleep; in `stalls` the same for all systems.

    In `slow` the fast workers of `async` make as many steps as fit into the slow worker's time.
    """
    step_s, count = settings.step_s, settings.steps
    if case == SLOW:
        fast = count * (_FACTOR if system == ASYNC.name else 1)
        return [[_FACTOR * step_s] * count, *([[step_s] * fast] * (settings.workers - 1))]
    drawn = random.Random(turn)

    def steps() -> list[float]:
        if case == INDEPENDENT:
            stalled = [drawn.random() < _CHANCE for _ in range(2 * count)]
        else:
            stalled = [
                step == at
                for at in (drawn.randrange(_BLOCK) for _ in range(2 * count // _BLOCK))
                for step in range(_BLOCK)
            ]
        return [step_s * (1 + drawn.uniform(2, 3) * stall) for stall in stalled]

    return [steps() for _ in range(settings.workers)]


def rate(sleeps: Sleeps, seconds: Sequence[float]) -> float:
    """Returns steps per second of all workers together, from the seconds that each took."""
    return sum(len(steps) / took for steps, took in zip(sleeps, seconds, strict=True))


def ideal(sleeps: Sleeps, bound: int | None) -> list[float]:
    """Simulates workers whose exchange takes no time; returns the seconds that each takes.

    With a bound, a worker waits for the slowest as docs/modes.md says; None: it never waits.
    """
    now = [0.0] * len(sleeps)
    made: list[list[float]] = [[0.0] for _ in sleeps]  # the time after each number of steps
    for step in range(max(map(len, sleeps))):
        for rank, steps in enumerate(sleeps):
            if step < len(steps):
                now[rank] += steps[step]
                made[rank].append(now[rank])
        if bound is not None and step + 1 > bound:
            slowest = max(each[min(step + 1 - bound, len(each) - 1)] for each in made)
            for rank, steps in enumerate(sleeps):
                if step < len(steps):
                    now[rank] = max(now[rank], slowest)
    return now


def _measure_sleeps(
    report: Report, settings: ModesSettings, case: str, tell: Callable[[str], None]
) -> None:
    """Adds a row for each system and their comparison; if it fails, rows with the reason."""
    systems = (SYNC, ASYNC) if case == SLOW else (SYNC, BOUNDED)
    cases = (case,) if case == SLOW else (STALLS, INDEPENDENT)
    seconds: dict[tuple[str, str], list[float]] = {}
    limits: dict[tuple[str, str], list[float]] = {}
    size_bytes, note = 0, ""
    try:
        with contextlib.ExitStack() as stack:
            teams = {}
            for system in systems:
                tell(f"{case}: starts {system.name}")
                teams[system.name] = team = _start(stack, system, settings.workers)
                size_bytes = team.call("idle", timeout_s=60.0)[0]
            for turn in range(settings.turns):
                tell(f"{case}: turn {turn + 1} of {settings.turns}")
                order = list(teams.items())
                for name, team in order if turn % 2 == 0 else reversed(order):
                    for each in cases:
                        sleeps = draw(each, name, settings, turn)
                        took = team.call("sleep", sleeps, timeout_s=60 + 9 * sum(sleeps[0]))
                        seconds.setdefault((each, name), []).append(1 / rate(sleeps, took))
                        limit = ideal(sleeps, _BOUNDS[name])
                        limits.setdefault((each, name), []).append(1 / rate(sleeps, limit))
    except PairError as error:
        seconds, note = {}, str(error)
    for each in cases:
        for system in systems:
            row = Row(report.bench, each, system.name, size_bytes, note=note)
            if found := seconds.get((each, system.name)):
                row = row.timed(found).beside(paired_ratio(limits[each, system.name], found))
            report.rows.append(row)
        sync, own = (seconds.get((each, system.name), []) for system in systems)
        report.compare(each, size_bytes, systems[1].name, SYNC.name, sync, own)


def _start(stack: contextlib.ExitStack, system: System, workers: int) -> Team:
    team = Team(system, "shm", None, workers, "sgd", program=modes_worker.__name__)
    stack.callback(team.close)
    return team


# --- bars ---------------------------------------------------------------------------------------

BARS = tuple(
    Bar(f"{case}: steps per second, {system} beside sync", ">=", bar, "x", case, system,
        rival=SYNC.name)
    for case, system, bar in ((SLOW, ASYNC.name, 3.0), (STALLS, BOUNDED.name, 1.5))
)  # fmt: skip
"""Bars on the ratio of steps per second to those of `sync`."""


def judge(report: Report) -> list[Verdict]:
    """Returns the verdicts on a report."""
    trained = modes_training.judge(report, TrainingSettings().sizes[0])
    return [*(bar.judge(report) for bar in BARS), *trained]

"""Training jobs whose processes are killed: are the results the same, and how long is a repair?

Each scenario is a small job (`faults_job.py`) that runs undisturbed first, then as often as it
takes with servers, workers and the standby killed at random moments by SIGKILL; the next kill comes
when worker 0 has made two steps after the last one, so that one of them needed the repair. Now and
then two processes are killed at the same moment, or the one that takes the place of the first as
well; and some jobs lose a process before their first step, while stores are opened.
`faults_judge.py`, a program of its own, compares the files that they leave. Recovery lasts from the
kill until the step of worker 0 that ends its longest pause after it. It is warm where a standby
waited that had imported everything, else cold. A worker is started again and its script runs from
the beginning, which lasts as long as its imports; that is told apart. Only kills of one process
between two steps are timed. Beside them stands how long the script needs until its first epoch in a
process alone: a worker that takes another one's place needs that too. The scenario `launcher` loses
`tensorwire run`, which coordinates: that ends the job, no process may be left, and the same command
goes on from the last checkpoint, with the same bits.

How long workers wait when shares move, workers come and go, or die in other modes is in
`faults_changes.py`.

Not measured here: what durability costs while nobody dies (`durable_cost.py`); machines that die.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tensorwire.bench import machine
from tensorwire.bench.harness import median, percentile
from tensorwire.bench.report import add_groups, machine_line, new_table
from tensorwire.bench.rows import Report, Row, Verdict, format_seconds
from tensorwire_benchmarks.durable_cost import CostSettings, print_costs
from tensorwire_benchmarks.durable_cost import judge as judge_cost
from tensorwire_benchmarks.durable_cost import measure as measure_cost
from tensorwire_benchmarks.faults_changes import ChangeSettings, print_changes
from tensorwire_benchmarks.faults_changes import fails as changes_fail
from tensorwire_benchmarks.faults_changes import judge as judge_changes
from tensorwire_benchmarks.faults_changes import measure as measure_changes
from tensorwire_benchmarks.faults_kills import (
    LAUNCHER,
    SCENARIOS,
    STEPS_AFTER,
    WORKERS,
    WORKERS_STAY,
    DisturbedJob,
    JobFailed,
    Kill,
)

_SAMPLES = {"batchnorm": 2560, "large": 640, LAUNCHER: 2560}
"""Of each scenario, where it is not 1280."""
_HERE = Path(__file__).parent
_EARLY = 1 / 4
RECOVERY_BAR_S = 2.0
REJOIN_BAR_S = 2.0


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """What to run.

    Attributes:
        scenarios: of `SCENARIOS`; none: nothing is killed.
        kills: over all scenarios.
        seed: of victims and moments.
        epochs: of each job.
        cost: what to measure of the cost of durability; None: nothing.
        changes: what to measure of changes and of other modes; None: nothing.
        pace_s, disturbed_pace_s: that a worker sleeps per batch; disturbed jobs have to last.
    """

    scenarios: Sequence[str] = SCENARIOS
    kills: int = 50
    seed: int = 0
    epochs: int = 3
    cost: CostSettings | None = None
    changes: ChangeSettings | None = None
    pace_s: float = 0.005
    disturbed_pace_s: float = 0.08


@dataclass(frozen=True, slots=True)
class FaultRow(Row):
    """A row of one scenario.

    Attributes:
        scenario: its name, as `case`.
        kills, standby_kills, worker_kills: of all processes, and of these standbys and workers.
        launcher_kills: of `tensorwire run`, which was started again.
        opening_kills: before the first step.
        double_kills: at the same moment as another one, or of the process in its place.
        parameters_equal: the final values of all workers, and all losses, to the bit.
        samples_once: each sample was used once in an epoch.
        steps_once: each slice of each step was made once.
        recovery_s_median, recovery_s_p99: of killed servers; warm_… and cold_…: see the module.
        rejoin_s_median, rejoin_s_p99: of killed workers.
        script_s: how long a process alone needs to run the script until its first epoch.
        failures: what went wrong, in sentences.
    """

    scenario: str = ""
    kills: int = 0
    standby_kills: int = 0
    worker_kills: int = 0
    launcher_kills: int = 0
    opening_kills: int = 0
    double_kills: int = 0
    parameters_equal: bool = False
    samples_once: bool = False
    steps_once: bool = False
    recovery_s_median: float | None = None
    recovery_s_p99: float | None = None
    warm_kills: int = 0
    warm_s_median: float | None = None
    warm_s_p99: float | None = None
    cold_kills: int = 0
    cold_s_median: float | None = None
    cold_s_p99: float | None = None
    rejoin_s_median: float | None = None
    rejoin_s_p99: float | None = None
    script_s: float | None = None
    failures: tuple[str, ...] = ()


@dataclass(slots=True)
class _Found:
    """What is known of one scenario so far; `wrong` is what the judge said, by its kinds."""

    kills: list[Kill] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    rejoin: list[float] = field(default_factory=list)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    judged: int = 0
    bytes: int = 0
    script_s: float | None = None


def recovery_s(kill: float, times: Sequence[float]) -> float | None:
    """From a kill to the end of the longest pause of the steps after it; None without a step."""
    after = [at for at in times if at > kill]
    pauses = [(at - before, at) for before, at in zip([kill, *after], after, strict=False)]
    return max(pauses)[1] - kill if pauses else None


def run(settings: FaultSettings, tell: Callable[[float, float, str], None]) -> Report:
    """Runs all scenarios. Ctrl-C ends it early, with the rows of the scenarios so far."""
    about = machine.describe()
    report = Report(
        "faults", about, settings={**dataclasses.asdict(settings), "interrupted": False}
    )
    report.settings["warnings"] = machine.warnings_about(about)
    chance, done = random.Random(settings.seed), 0
    try:
        for place, name in enumerate(settings.scenarios):
            left = len(settings.scenarios) - place
            kills = -(-(settings.kills - done) // left)
            found = _Found()
            with tempfile.TemporaryDirectory(prefix="tensorwire-faults-") as folder:
                try:
                    _run_scenario(
                        name,
                        Path(folder),
                        kills,
                        settings,
                        chance,
                        found,
                        partial(_tell_more, tell, done, settings.kills, name),
                    )
                except JobFailed as error:
                    found.failures.append(str(error))
            done += len(found.kills)
            report.rows.append(_row(name, found))
        if settings.changes is not None:
            measure_changes(report, settings.changes, partial(tell, done, settings.kills))
        if settings.cost is not None:
            measure_cost(report, settings.cost, partial(tell, done, settings.kills))
    except KeyboardInterrupt:
        report.settings["interrupted"] = True
    report.verdicts += judge(report) if settings.scenarios else []
    report.verdicts += judge_changes(report) if settings.changes is not None else []
    report.verdicts += judge_cost(report, settings.cost) if settings.cost is not None else []
    return report


def _tell_more(
    tell: Callable[[float, float, str], None], done: int, total: int, label: str, more: int
) -> None:
    tell(done + more, total, label)


def judge(report: Report) -> list[Verdict]:
    """All equal, and a warm repair is quick."""
    rows = _rows(report)
    equal = [row.parameters_equal and row.samples_once and row.steps_once for row in rows]
    share = 100.0 * sum(equal) / len(equal) if equal else None
    killed = sum(row.kills for row in rows)
    warm = [row.warm_s_median for row in rows if row.warm_s_median is not None]
    worst = max(warm, default=None)
    count = sum(row.warm_kills for row in rows)
    rejoined = [
        row.rejoin_s_median - row.script_s
        for row in rows
        if row.rejoin_s_median is not None and row.script_s is not None
    ]
    return [
        Verdict.of("jobs like undisturbed ones", ">=", 100.0, "%", share,
                   detail=f"{killed} kills" if equal else "no job has ended"),
        Verdict.of("median recovery with a warm standby, of the worst scenario", "<=",
                   RECOVERY_BAR_S, "s", worst,
                   detail=f"{count} kills" if warm else "no standby was ready at a kill"),
        Verdict.of("median rejoining of a worker beyond its script, of the worst scenario", "<=",
                   REJOIN_BAR_S, "s", max(rejoined, default=None),
                   detail=f"{len(rejoined)} scenarios" if rejoined else "no worker was timed"),
    ]  # fmt: skip


def fails(report: Report) -> bool:
    """Whether anything is unequal, or a job has failed or hung."""
    return changes_fail(report) or any(
        row.failures or not (row.parameters_equal and row.samples_once and row.steps_once)
        for row in _rows(report)
    )


def _rows(report: Report) -> list[FaultRow]:
    return [row for row in report.rows if isinstance(row, FaultRow)]


def print_faults(report: Report, console: Console) -> None:
    """A table of kills and one of costs, what went wrong, verdicts."""
    console.print(machine_line(report), soft_wrap=True)
    if rows := _rows(report):
        _print_kills(rows, console)
    print_changes(report, console)
    print_costs(report, console)
    for verdict in report.verdicts:
        style = {True: "green", False: "bold red", None: "yellow"}[verdict.met]
        console.print(Text(verdict.line(), style=style), soft_wrap=True)


def _print_kills(rows: Sequence[FaultRow], console: Console) -> None:
    table = new_table(
        "jobs whose processes are killed: how often, before the first step, two at once; equal?",
        "scenario", ">kills", "parameters", "samples", "steps", ">recovery", ">warm (kills)",
        ">cold (kills)", ">worker (kills)", ">its script",
    )  # fmt: skip
    cells: list[list[str | Text]] = []
    for row in rows:
        checks = (row.parameters_equal, row.samples_once, row.steps_once)
        words = (("equal", "UNEQUAL"), ("once", "NOT ONCE"), ("once", "NOT ONCE"))
        told = [
            Text(word[not good], style="green" if good else "bold red")
            for word, good in zip(words, checks, strict=True)
        ]
        cells.append([
            row.scenario, f"{row.kills}, {row.opening_kills}, {row.double_kills}", *told,
            format_seconds(row.recovery_s_median),
            f"{format_seconds(row.warm_s_median)} ({row.warm_kills})",
            f"{format_seconds(row.cold_s_median)} ({row.cold_kills})",
            f"{format_seconds(row.rejoin_s_median)} ({row.worker_kills})",
            format_seconds(row.script_s),
        ])  # fmt: skip
    add_groups(table, cells)
    console.print(table)
    for row in rows:
        if row.scenario in WORKERS_STAY:
            console.print(Text(f"{row.scenario}: {row.note}", style="dim"), soft_wrap=True)
        for failure in row.failures:
            console.print(Text(f"{row.scenario}: {failure}", style="bold red"), soft_wrap=True)


def _row(name: str, found: _Found) -> FaultRow:
    both, ended = found.warm + found.cold, found.judged > 0 and not found.failures

    def figures(stem: str, seconds: list[float]) -> dict[str, Any]:
        if not seconds:
            return {}
        return {f"{stem}_median": median(seconds), f"{stem}_p99": percentile(seconds, 0.99)}

    return FaultRow(
        "faults", name, "tensorwire", found.bytes, operations=len(both),
        note=WORKERS_STAY.get(name, "") or ("" if both else "no kill of a server was timed"),
        scenario=name, kills=len(found.kills),
        standby_kills=sum(kill.who == "standby" for kill in found.kills),
        worker_kills=sum(kill.who == "worker" for kill in found.kills),
        launcher_kills=sum(kill.who == "launcher" for kill in found.kills),
        opening_kills=sum(kill.opening for kill in found.kills),
        double_kills=sum(kill.double for kill in found.kills),
        parameters_equal=ended and not found.wrong.get("parameters"),
        samples_once=ended and not found.wrong.get("samples"),
        steps_once=ended and not found.wrong.get("steps"),
        warm_kills=len(found.warm), cold_kills=len(found.cold),
        script_s=found.script_s,
        failures=(*found.failures, *(text for each in found.wrong.values() for text in each)),
        **figures("seconds", both), **figures("recovery_s", both),
        **figures("warm_s", found.warm), **figures("cold_s", found.cold),
        **figures("rejoin_s", found.rejoin),
    )  # fmt: skip


def _run_scenario(
    name: str, folder: Path, kills: int, settings: FaultSettings, chance: random.Random,
    found: _Found, tell: Callable[[int], None],
) -> None:  # fmt: skip
    tell(0)
    whole = folder / "undisturbed"
    with DisturbedJob(name, whole, settings.pace_s, settings.epochs) as job:
        job.finish()
    head = json.loads((whole / "final-0").read_bytes().partition(b"\n")[0])
    models = ("/model", "/body", "/head")
    found.bytes = sum(size for path, _, _, size in head if path.startswith(models))
    if name not in WORKERS_STAY:
        found.script_s = median([_script_s(name, folder) for _ in range(3)])
    while len(found.kills) < kills:
        disturbed = folder / f"disturbed-{found.judged}"
        before = len(found.kills)
        disturb = _kill_launchers if name == LAUNCHER else _kill_members
        disturb(name, disturbed, kills, settings, chance, found, tell)
        _note_recoveries(disturbed, found.kills[before:], found)
        samples = str(_SAMPLES.get(name, 1280))
        command = [sys.executable, str(_HERE / "faults_judge.py"), str(whole), str(disturbed)]
        judged = subprocess.run(
            [*command, str(WORKERS.get(name, 2)), samples],
            stdout=subprocess.PIPE,
            check=False,
        )
        for kind, texts in json.loads(judged.stdout).items():
            found.wrong.setdefault(kind, []).extend(texts)
        found.judged += 1
        if len(found.kills) == before:
            raise JobFailed("the job ended before anything could be killed")


def _kill_members(
    name: str, folder: Path, kills: int, settings: FaultSettings, chance: random.Random,
    found: _Found, tell: Callable[[int], None],
) -> None:  # fmt: skip
    """One job whose servers, workers and standbys are killed until it ends."""
    with DisturbedJob(name, folder, settings.disturbed_pace_s, settings.epochs) as job:
        early = [job.kill_early(chance)] if chance.random() < _EARLY else []
        found.kills += (kill for kill in early if kill is not None)
        while len(found.kills) < kills and (together := job.kill(chance)):
            found.kills += together
            tell(len(found.kills))
            if not job.await_steps(STEPS_AFTER):
                break
        job.finish()


def _kill_launchers(
    name: str, folder: Path, kills: int, settings: FaultSettings, chance: random.Random,
    found: _Found, tell: Callable[[int], None],
) -> None:  # fmt: skip
    """One job whose launcher is killed, and which is started again until it ends."""
    killed = True
    while killed:
        with DisturbedJob(name, folder, settings.disturbed_pace_s, settings.epochs) as job:
            killed = len(found.kills) < kills and job.kill_launcher(chance)
            if killed:
                found.kills.append(Kill(time.monotonic(), "launcher", timed=False))
                tell(len(found.kills))
            else:
                job.finish()


def _script_s(name: str, folder: Path) -> float:
    """How long a process that is alone needs until its first epoch: it has none, and ends there."""
    alone = Path(tempfile.mkdtemp(dir=folder))
    script = [str(_HERE / "faults_job.py"), name, str(alone), "0", "0"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    if done.returncode:
        output = done.stdout[-4000:].decode(errors="replace")
        raise JobFailed(f"the script alone has exit code {done.returncode}:\n{output}")
    return time.monotonic() - began


def _note_recoveries(folder: Path, kills: list[Kill], found: _Found) -> None:
    events = [json.loads(line) for line in (folder / "events-0").read_text().splitlines()]
    ends = [kill.at for kill in kills[1:]] + [float("inf")]
    for kill, end in zip(kills, ends, strict=True):
        after = [event for event in events if kill.at < event["at"] < end]
        if not kill.timed or not after:
            continue
        # Later pauses have other causes: one of these steps needed the repair.
        near = [event["at"] for event in after if event["step"] < after[0]["step"] + STEPS_AFTER]
        taken = recovery_s(kill.at, near)
        if kill.who != "standby" and taken is not None:
            servers = found.warm if kill.warm else found.cold
            (servers if kill.who == "server" else found.rejoin).append(taken)

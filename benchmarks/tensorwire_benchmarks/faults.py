"""Kills processes of training jobs: are the results the same, and how long does a repair take?

Each scenario is a small job (`faults_job.py`). It runs undisturbed first, then as often as needed
while servers, workers and the standby are killed by SIGKILL at random moments. The next kill comes
when worker 0 has made two steps after the last one, so that one of them needed the repair.
Sometimes two processes are killed at the same moment, or the one that replaces the first is killed
as well; and some jobs lose a process before their first step, while stores are opened.

`faults_judge.py`, which imports nothing of tensorwire, compares the files that the jobs write.

Recovery lasts from the kill until the step of worker 0 that ends its longest pause after it. It is
warm if a standby waited that had imported everything, else cold. A killed worker is started again
and runs its script from the beginning; its recovery is a figure of its own, next to the time that a
process alone needs from the script's start to the first epoch. Only kills of one process between
two steps are timed. In the scenario `launcher`, `tensorwire run` is killed: the job ends, no
process may be left, and the same command continues from the last checkpoint, with the same bits.

`faults_changes.py` measures how long workers wait when shares move, when workers come and go, and
when processes die in other modes.

Not measured here: what durability costs while nobody dies (`durable_cost.py`); machines that die.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tensorwire.bench.harness import median
from tensorwire.bench.measuring import measuring
from tensorwire.bench.processes import PairError
from tensorwire.bench.report import machine_line, print_columns, print_verdicts
from tensorwire.bench.rows import Report, Row, Verdict, format_seconds
from tensorwire.command import Told
from tensorwire_benchmarks import durable_cost, faults_changes, faults_judge
from tensorwire_benchmarks.durable_cost import CostSettings
from tensorwire_benchmarks.faults_changes import ChangeSettings
from tensorwire_benchmarks.faults_kills import (
    LAUNCHER,
    SCENARIOS,
    STEPS_AFTER,
    WORKERS,
    WORKERS_STAY,
    DisturbedJob,
    Kill,
)
from tensorwire_benchmarks.jobs import environment, last_line, script

_SAMPLES = {"batchnorm": 2560, "large": 640, LAUNCHER: 2560}
"""Samples of each scenario that has not 1280."""
_EARLY = 1 / 4
RECOVERY_BAR_S = 2.0
REJOIN_BAR_S = 2.0


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """What to run.

    Attributes:
        scenarios: some of `SCENARIOS`; without one, no process is killed.
        kills: in all scenarios together.
        seed: for the choice of victims and moments.
        epochs: of each job.
        cost: settings for the cost of durability; None: not measured.
        changes: settings for changes and other modes; None: not measured.
        pace_s, disturbed_pace_s: seconds that a worker sleeps per batch; longer in disturbed jobs,
            which must last until they are killed.
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
    """A row of one scenario; `seconds_…` are from the kill of a server until work goes on.

    Attributes:
        kills, standby_kills, worker_kills: of all processes, of standbys, of workers.
        opening_kills: kills before the first step.
        double_kills: kills at the same moment as another one, or of the replacing process.
        parameters_equal: whether the final values of all workers, and all losses, equal to the bit.
        samples_once: whether each sample was used once in an epoch.
        steps_once: whether each slice of each step was made once.
        warm_kills, cold_kills: timed kills of servers, with a warm standby and without.
        warm_s_median, cold_s_median: median recovery of these kills.
        rejoin_s_median: median recovery of killed workers.
        script_s: seconds that a process alone needs from the script's start to its first epoch.
        failures: one sentence for each thing that went wrong.
    """

    kills: int = 0
    standby_kills: int = 0
    worker_kills: int = 0
    opening_kills: int = 0
    double_kills: int = 0
    parameters_equal: bool = False
    samples_once: bool = False
    steps_once: bool = False
    warm_kills: int = 0
    warm_s_median: float | None = None
    cold_kills: int = 0
    cold_s_median: float | None = None
    rejoin_s_median: float | None = None
    script_s: float | None = None
    failures: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if the disturbed jobs did the same as the undisturbed one."""
        return self.parameters_equal and self.samples_once and self.steps_once


def recovery_s(kill: float, times: Sequence[float]) -> float | None:
    """Returns seconds from a kill to the end of the longest pause after it; None without a step."""
    after = [at for at in times if at > kill]
    pauses = [(at - before, at) for before, at in zip([kill, *after], after, strict=False)]
    return max(pauses)[1] - kill if pauses else None


def run(settings: FaultSettings, tell: Told) -> Report:
    """Runs all scenarios. Ctrl-C ends it early, with the rows of the scenarios so far."""
    chance, done = random.Random(settings.seed), 0
    with measuring("faults", dataclasses.asdict(settings)) as report:
        for place, name in enumerate(settings.scenarios):
            kills = -(-(settings.kills - done) // (len(settings.scenarios) - place))
            scenario = _Scenario(name, kills, settings, chance)
            scenario.run(partial(_tell, tell, done, settings.kills, name))
            done += len(scenario.kills)
            report.rows.append(scenario.row())
        if settings.changes is not None:
            faults_changes.measure(report, settings.changes, lambda what: tell(done, done, what))
        if settings.cost is not None:
            durable_cost.measure(report, settings.cost, lambda what: tell(done, done, what))
    report.verdicts += judge(report) if settings.scenarios else []
    report.verdicts += faults_changes.judge(report) if settings.changes is not None else []
    if settings.cost is not None:
        report.verdicts += durable_cost.judge(report, settings.cost)
    return report


def _tell(tell: Told, done: int, kills: int, name: str, more: int) -> None:
    tell(done + more, kills, name)


def judge(report: Report) -> list[Verdict]:
    """Judges the equality of the jobs, and the medians of warm recovery and of rejoining."""
    rows = _rows(report)
    share = 100.0 * sum(row.equal for row in rows) / len(rows) if rows else None
    warm = [row.warm_s_median for row in rows if row.warm_s_median is not None]
    rejoined = [
        row.rejoin_s_median - row.script_s
        for row in rows
        if row.rejoin_s_median is not None and row.script_s is not None
    ]
    return [
        Verdict.of("jobs like undisturbed ones", ">=", 100.0, "%", share,
                   detail=f"{sum(row.kills for row in rows)} kills"),
        Verdict.of("median recovery with a warm standby, of the worst scenario", "<=",
                   RECOVERY_BAR_S, "s", max(warm, default=None),
                   detail="" if warm else "no standby was ready at a kill"),
        Verdict.of("median rejoining of a worker beyond its script, of the worst scenario", "<=",
                   REJOIN_BAR_S, "s", max(rejoined, default=None),
                   detail=f"{len(rejoined)} scenarios" if rejoined else "no worker was timed"),
    ]  # fmt: skip


def fails(report: Report) -> bool:
    """Returns whether a job's results differ, or a job has failed or hung."""
    return any(
        row.failures if isinstance(row, faults_changes.ChangeRow) else not row.equal or row.failures
        for row in report.rows
        if isinstance(row, faults_changes.ChangeRow | FaultRow)
    )


def _rows(report: Report) -> list[FaultRow]:
    return [row for row in report.rows if isinstance(row, FaultRow)]


def print_faults(report: Report, console: Console) -> None:
    """Prints the tables of kills, changes and costs, all failures, and the verdicts."""
    console.print(machine_line(report), soft_wrap=True)
    _print_kills(_rows(report), console)
    faults_changes.print_changes(report, console)
    durable_cost.print_costs(report, console)
    print_verdicts(report, console)


def _print_kills(rows: Sequence[FaultRow], console: Console) -> None:
    words = {True: ("equal", "green"), False: ("WRONG", "bold red")}

    def taken(seconds: str, kills: str) -> Callable[[FaultRow], str]:
        return lambda row: f"{format_seconds(getattr(row, seconds))} ({getattr(row, kills)})"

    title = "jobs whose processes are killed: how often, before the first step, two at once; equal?"
    print_columns(console, title, rows, {
        "scenario": lambda row: row.case,
        ">kills": lambda row: f"{row.kills}, {row.opening_kills}, {row.double_kills}",
        "parameters": lambda row: Text(*words[row.parameters_equal]),
        "samples": lambda row: Text(*words[row.samples_once]),
        "steps": lambda row: Text(*words[row.steps_once]),
        ">warm (kills)": taken("warm_s_median", "warm_kills"),
        ">cold (kills)": taken("cold_s_median", "cold_kills"),
        ">worker (kills)": taken("rejoin_s_median", "worker_kills"),
        ">its script": lambda row: format_seconds(row.script_s),
    })  # fmt: skip
    for row in rows:
        if row.case in WORKERS_STAY:
            console.print(Text(f"{row.case}: {row.note}", style="dim"), soft_wrap=True)
        for failure in row.failures:
            console.print(Text(f"{row.case}: {failure}", style="bold red"), soft_wrap=True)


class _Scenario:
    """One scenario: an undisturbed job, then disturbed ones until there were enough kills.

    Attributes:
        kills: the kills so far.
    """

    def __init__(
        self, name: str, kills: int, settings: FaultSettings, chance: random.Random
    ) -> None:
        self._name, self._wanted, self._settings, self._chance = name, kills, settings, chance
        self.kills: list[Kill] = []
        self._seconds: dict[str, list[float]] = {"warm": [], "cold": [], "worker": []}
        self._wrong: dict[str, list[str]] = {}  # the judge's sentences, by kind
        self._failures: list[str] = []
        self._judged = self._bytes = 0
        self._script_s: float | None = None

    def row(self) -> FaultRow:
        """Returns the row of this scenario, from what is known so far."""
        kills, wrong = self.kills, self._wrong
        ended = self._judged > 0 and not self._failures
        middles = {who: median(each) if each else None for who, each in self._seconds.items()}
        warm, cold = self._seconds["warm"], self._seconds["cold"]
        row = FaultRow(
            "faults", self._name, "tensorwire", self._bytes,
            note=WORKERS_STAY.get(self._name, ""),
            kills=len(kills),
            standby_kills=sum(kill.who == "standby" for kill in kills),
            worker_kills=sum(kill.who == "worker" for kill in kills),
            opening_kills=sum(kill.opening for kill in kills),
            double_kills=sum(kill.double for kill in kills),
            parameters_equal=ended and not wrong.get("parameters"),
            samples_once=ended and not wrong.get("samples"),
            steps_once=ended and not wrong.get("steps"),
            warm_kills=len(warm), cold_kills=len(cold),
            warm_s_median=middles["warm"], cold_s_median=middles["cold"],
            rejoin_s_median=middles["worker"], script_s=self._script_s,
            failures=(*self._failures, *(text for each in wrong.values() for text in each)),
        )  # fmt: skip
        return row.timed(warm + cold) if warm or cold else row

    def run(self, tell: Callable[[int], None]) -> None:
        """Runs the scenario to its end, or until a job fails; the row then has the failure."""
        self._tell = tell
        tell(0)
        with tempfile.TemporaryDirectory(prefix="tensorwire-faults-") as made:
            folder = Path(made)
            whole = folder / "undisturbed"
            try:
                with self._job(whole, self._settings.pace_s) as job:
                    job.finish()
                head = json.loads((whole / "final-0").read_bytes().partition(b"\n")[0])
                models = ("/model", "/body", "/head")
                self._bytes = sum(size for path, _, _, size in head if path.startswith(models))
                if self._name not in WORKERS_STAY:
                    self._script_s = median([_script_s(self._name, folder) for _ in range(3)])
                while len(self.kills) < self._wanted:
                    self._disturb(whole, folder / f"disturbed-{self._judged}")
            except PairError as error:
                self._failures.append(str(error))

    def _job(self, folder: Path, pace_s: float) -> DisturbedJob:
        return DisturbedJob(self._name, folder, pace_s, self._settings.epochs)

    def _disturb(self, whole: Path, folder: Path) -> None:
        before = len(self.kills)
        self._kill_launchers(folder) if self._name == LAUNCHER else self._kill_members(folder)
        if len(self.kills) == before:
            raise PairError("the job ended before anything could be killed")
        self._note_recoveries(folder, self.kills[before:])
        workers, samples = WORKERS.get(self._name, 2), _SAMPLES.get(self._name, 1280)
        for kind, texts in faults_judge.judge(whole, folder, workers, samples).items():
            self._wrong.setdefault(kind, []).extend(texts)
        self._judged += 1

    def _kill_members(self, folder: Path) -> None:
        """Runs one job and kills its servers, workers and standbys until it ends."""
        kills, chance = self.kills, self._chance
        with self._job(folder, self._settings.disturbed_pace_s) as job:
            kills += job.kill_early(chance) if chance.random() < _EARLY else []
            while len(kills) < self._wanted and (together := job.kill(chance)):
                kills += together
                self._tell(len(kills))
                if not job.await_steps(STEPS_AFTER):
                    break
            job.finish()

    def _kill_launchers(self, folder: Path) -> None:
        """Runs one job, kills its launcher and starts the job again, until it ends."""
        kills, killed = self.kills, True
        while killed:
            with self._job(folder, self._settings.disturbed_pace_s) as job:
                killed = len(kills) < self._wanted and job.kill_launcher(self._chance)
                if killed:
                    kills.append(Kill(time.monotonic(), "launcher", timed=False))
                    self._tell(len(kills))
                else:
                    job.finish()

    def _note_recoveries(self, folder: Path, kills: list[Kill]) -> None:
        lines = (folder / "events-0").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        ends = [kill.at for kill in kills[1:]] + [float("inf")]
        for kill, end in zip(kills, ends, strict=True):
            after = [event for event in events if kill.at < event["at"] < end]
            if not kill.timed or not after:
                continue
            # Later pauses have other causes: one of these steps needed the repair.
            last = after[0]["step"] + STEPS_AFTER
            near = [event["at"] for event in after if event["step"] < last]
            taken = recovery_s(kill.at, near)
            if kill.who != "standby" and taken is not None:
                servers = "warm" if kill.warm else "cold"
                self._seconds[servers if kill.who == "server" else "worker"].append(taken)


def _script_s(name: str, folder: Path) -> float:
    """Returns the seconds of the script alone until its first epoch, by a run with no epochs.

    Raises:
        PairError: the script failed.
    """
    alone = Path(tempfile.mkdtemp(dir=folder))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *script("faults_job.py", name, alone, 0, 0)], env=environment(),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise PairError(f"the script alone: {last_line(done.stderr)}")
    return time.monotonic() - began

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
between two steps are timed.

Not measured here: what durability costs while nobody dies (`durable_cost.py`); machines that die.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
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

SERVERS = {"batchnorm": 1, "tables": 2, "two optimizers": 1, "whole": 2, "pipeline": 1}
"""Of each scenario."""
SCENARIOS = tuple(SERVERS)
WORKERS = {"pipeline": 4}
"""Of each scenario, where it is not 2; a pipeline has two replicas of two processes."""
WORKERS_STAY = {"pipeline": "workers are not killed: those of a split model cannot be replaced"}
"""Scenarios that lose only servers and standbys, and why."""
SAMPLES = {"batchnorm": 2560}
_SAMPLES, _WORKERS = 1280, 2
_HERE = Path(__file__).parent
_HANG_S = 60.0
_WARM_WAIT_S = 12.0
_STEPS_AFTER = 2
_EARLY, _TWO, _AGAIN = 1 / 4, 1 / 8, 1 / 8
_SUCCESSOR_WAIT_S = 5.0
RECOVERY_BAR_S = 2.0
_REPLACED = re.compile(r"(?:server|worker) \d+ \(pid (\d+)\) takes its place")


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """What to run.

    Attributes:
        scenarios: of `SCENARIOS`; none: nothing is killed.
        kills: over all scenarios.
        seed: of victims and moments.
        epochs: of each job.
        cost: what to measure of the cost of durability; None: nothing.
        pace_s, disturbed_pace_s: that a worker sleeps per batch; disturbed jobs have to last.
    """

    scenarios: Sequence[str] = SCENARIOS
    kills: int = 50
    seed: int = 0
    epochs: int = 3
    cost: CostSettings | None = None
    pace_s: float = 0.005
    disturbed_pace_s: float = 0.08


@dataclass(frozen=True, slots=True)
class FaultRow(Row):
    """A row of one scenario.

    Attributes:
        scenario: its name, as `case`.
        kills, standby_kills, worker_kills: of all processes, and of these standbys and workers.
        opening_kills: before the first step.
        double_kills: at the same moment as another one, or of the process in its place.
        parameters_equal: the final values of all workers, and all losses, to the bit.
        samples_once: each sample was used once in an epoch.
        steps_once: each slice of each step was made once.
        recovery_s_median, recovery_s_p99: of killed servers; warm_… and cold_…: see the module.
        rejoin_s_median, rejoin_s_p99: of killed workers.
        failures: what went wrong, in sentences.
    """

    scenario: str = ""
    kills: int = 0
    standby_kills: int = 0
    worker_kills: int = 0
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
    failures: tuple[str, ...] = ()


@dataclass(slots=True)
class Kill:
    """One kill.

    Attributes:
        at: when, of the monotonic clock.
        who: "server", "worker" or "standby".
        warm: whether a standby was ready.
        opening: no step had been made.
        double: it was not the first at that moment, or the process in the place of the first.
        timed: what follows until the next one is its repair alone.
    """

    at: float
    who: str
    warm: bool = False
    opening: bool = False
    double: bool = False
    timed: bool = True


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


class _JobFailed(Exception):
    """A job has failed or hangs; the text has its output."""


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
                except _JobFailed as error:
                    found.failures.append(str(error))
            done += len(found.kills)
            report.rows.append(_row(name, found))
        if settings.cost is not None:
            measure_cost(report, settings.cost, partial(tell, done, settings.kills))
    except KeyboardInterrupt:
        report.settings["interrupted"] = True
    report.verdicts += judge(report) if settings.scenarios else []
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
    return [
        Verdict.of("jobs like undisturbed ones", ">=", 100.0, "%", share,
                   detail=f"{killed} kills" if equal else "no job has ended"),
        Verdict.of("median recovery with a warm standby, of the worst scenario", "<=",
                   RECOVERY_BAR_S, "s", worst,
                   detail=f"{count} kills" if warm else "no standby was ready at a kill"),
    ]  # fmt: skip


def fails(report: Report) -> bool:
    """Whether anything is unequal, or a job has failed or hung."""
    return any(
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
    print_costs(report, console)
    for verdict in report.verdicts:
        style = {True: "green", False: "bold red", None: "yellow"}[verdict.met]
        console.print(Text(verdict.line(), style=style), soft_wrap=True)


def _print_kills(rows: Sequence[FaultRow], console: Console) -> None:
    table = new_table(
        "jobs whose processes are killed: how often, before the first step, two at once; equal?",
        "scenario", ">kills", "parameters", "samples", "steps", ">recovery", ">warm (kills)",
        ">cold (kills)", ">worker (kills)",
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
        opening_kills=sum(kill.opening for kill in found.kills),
        double_kills=sum(kill.double for kill in found.kills),
        parameters_equal=ended and not found.wrong.get("parameters"),
        samples_once=ended and not found.wrong.get("samples"),
        steps_once=ended and not found.wrong.get("steps"),
        warm_kills=len(found.warm), cold_kills=len(found.cold),
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
    with _Job(name, whole, settings.pace_s, settings.epochs) as job:
        job.finish()
    head = json.loads((whole / "final-0").read_bytes().partition(b"\n")[0])
    models = ("/model", "/body", "/head")
    found.bytes = sum(size for path, _, _, size in head if path.startswith(models))
    while len(found.kills) < kills:
        disturbed = folder / f"disturbed-{found.judged}"
        before = len(found.kills)
        with _Job(name, disturbed, settings.disturbed_pace_s, settings.epochs) as job:
            early = [job.kill_early(chance)] if chance.random() < _EARLY else []
            found.kills += (kill for kill in early if kill is not None)
            while len(found.kills) < kills and (together := job.kill(chance)):
                found.kills += together
                tell(len(found.kills))
                if not job.await_steps(_STEPS_AFTER):
                    break
            job.finish()
        _note_recoveries(disturbed, found.kills[before:], found)
        samples = str(SAMPLES.get(name, _SAMPLES))
        command = [sys.executable, str(_HERE / "faults_judge.py"), str(whole), str(disturbed)]
        judged = subprocess.run(
            [*command, str(WORKERS.get(name, _WORKERS)), samples],
            stdout=subprocess.PIPE,
            check=False,
        )
        for kind, texts in json.loads(judged.stdout).items():
            found.wrong.setdefault(kind, []).extend(texts)
        found.judged += 1
        if len(found.kills) == before:
            raise _JobFailed("the job ended before anything could be killed")


def _note_recoveries(folder: Path, kills: list[Kill], found: _Found) -> None:
    events = [json.loads(line) for line in (folder / "events-0").read_text().splitlines()]
    ends = [kill.at for kill in kills[1:]] + [float("inf")]
    for kill, end in zip(kills, ends, strict=True):
        after = [event for event in events if kill.at < event["at"] < end]
        if not kill.timed or not after:
            continue
        # Later pauses have other causes: one of these steps needed the repair.
        near = [event["at"] for event in after if event["step"] < after[0]["step"] + _STEPS_AFTER]
        taken = recovery_s(kill.at, near)
        if kill.who != "standby" and taken is not None:
            servers = found.warm if kill.warm else found.cold
            (servers if kill.who == "server" else found.rejoin).append(taken)


class _Job:
    """One job as a context; leaving it ends the job, should it still run."""

    def __init__(self, name: str, folder: Path, pace_s: float, epochs: int) -> None:
        folder.mkdir()
        self._name, self._folder = name, folder
        self._output = folder / "output"
        script = [str(_HERE / "faults_job.py"), name, str(folder), str(pace_s), str(epochs)]
        command = [sys.executable, "-m", "tensorwire", "run", "--durable"]
        self._workers = WORKERS.get(name, _WORKERS)
        command += ["--workers", str(self._workers), "--servers", str(SERVERS[name]), *script]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._moved = time.monotonic()
        self._last = 0

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
            self._process.kill()
            self._process.wait()

    def steps(self) -> int:
        """That worker 0 has made. Raises _JobFailed if there was none for a long time."""
        with contextlib.suppress(OSError, ValueError):
            now = int((self._folder / "progress").read_text())
            if now > self._last:
                self._last, self._moved = now, time.monotonic()
        if time.monotonic() - self._moved > _HANG_S:
            raise _JobFailed(f"no step for {_HANG_S:g} s, after step {self._last}:\n{self._tail()}")
        return self._last

    def await_steps(self, count: int) -> bool:
        """Waits until worker 0 has made so many more steps; False if the job ends before."""
        mark = self.steps()
        while self.steps() < mark + count:
            if self._process.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def kill_early(self, chance: random.Random) -> Kill | None:
        """Kills a process when all workers have joined, before the first step if it can."""
        joined = [self._folder / f"joined-{rank}" for rank in range(self._workers)]
        while not all(path.exists() for path in joined):
            self.steps()
            if self._process.poll() is not None:
                return None
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        who = "server" if self._name in WORKERS_STAY or chance.random() < 1 / 2 else "worker"
        victim = chance.choice(self._processes()[who])
        opening = self.steps() == 0
        kill = self._end(victim, Kill(time.monotonic(), who, opening=opening, timed=False))
        self.await_steps(_STEPS_AFTER)
        return kill

    def kill(self, chance: random.Random) -> list[Kill]:
        """Kills a process at some moment; every other time it waits for a standby before.

        Sometimes another one at the same moment, or the one that takes its place.
        """
        if not self.await_steps(1):
            return []
        wait_warm, delay_s = chance.random() < 0.5, chance.random() * 0.5
        until = time.monotonic() + _WARM_WAIT_S
        while (
            wait_warm and time.monotonic() < until and not self._ready(self._processes()["standby"])
        ):
            self.steps()
            if self._process.poll() is not None:
                return []
        time.sleep(delay_s)
        found, draw = self._processes(), chance.random()
        # A standby one time in six: its death is no repair that somebody waits for.
        who = "standby" if found["standby"] and draw < 1 / 6 else "server"
        if draw > 1 / 2 and self._name not in WORKERS_STAY:
            who = "worker"
        if not found[who] or self._process.poll() is not None:
            return []
        victim, more = chance.choice(found[who]), chance.random()
        others = [
            (pid, kind)
            for kind, pids in found.items()
            for pid in pids
            if pid != victim and not (kind == "worker" and self._name in WORKERS_STAY)
        ]
        warm = self._ready(found["standby"])
        self.steps()
        # Only workers that still train can show what a repair takes.
        if self._ended() or self._process.poll() is not None:
            return []
        two, again = more < _TWO and bool(others), _TWO <= more < _TWO + _AGAIN
        replaced = len(self._replaced())
        first = Kill(time.monotonic(), who, warm, timed=not (two or again))
        kills = [self._end(victim, first)]
        if two:
            second, kind = chance.choice(others)
            kills.append(self._end(second, Kill(first.at, kind, double=True, timed=False)))
        elif again and who != "standby" and (after := self._successor(replaced, chance)):
            then = Kill(time.monotonic(), who, double=True, timed=False)
            kills.append(self._end(after, then))
        return [kill for kill in kills if kill is not None]

    def _end(self, pid: int, kill: Kill) -> Kill | None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return kill

    def _successor(self, before: int, chance: random.Random) -> int | None:
        """Waits for the next process that takes another one's place, after so many; its number."""
        until = time.monotonic() + _SUCCESSOR_WAIT_S
        while len(found := self._replaced()) == before:
            if time.monotonic() > until or self._process.poll() is not None:
                return None
            time.sleep(0.005)
        time.sleep(chance.random() * 0.5)
        return None if self._ended() else found[-1]

    def _replaced(self) -> list[int]:
        """The processes that have got another one's place."""
        return [int(pid) for pid in _REPLACED.findall(self._output.read_text(errors="replace"))]

    def finish(self) -> None:
        """Waits for the end. Raises _JobFailed if it is not a good one."""
        while self._process.poll() is None:
            self.steps()
            time.sleep(0.02)
        if self._process.returncode:
            raise _JobFailed(f"exit code {self._process.returncode}:\n{self._tail()}")

    def _ended(self) -> bool:
        return any((self._folder / f"final-{rank}").exists() for rank in range(self._workers))

    def _processes(self) -> dict[str, list[int]]:
        """The servers, the workers, and standbys that nobody has told to take a place."""
        replaced = self._replaced()
        found: dict[str, list[int]] = {"server": [], "worker": [], "standby": []}
        pid = self._process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return found
        for child in map(int, children):
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"tensorwire.torch.server" in words:
                waits = b"--standby" in words and child not in replaced
                found["standby" if waits else "server"].append(child)
            elif any(word.endswith(b"faults_job.py") for word in words):
                found["worker"].append(child)
        return found

    def _ready(self, standbys: list[int]) -> bool:
        """Whether a standby has imported everything: it sleeps and takes no processor time."""
        before = [_used(pid) for pid in standbys]
        time.sleep(0.3)
        return any(
            used is not None and used == _used(pid) and used > 50
            for pid, used in zip(standbys, before, strict=True)
        )

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-4000:]


def _used(pid: int) -> int | None:
    """Ticks of processor time of a process that sleeps; None of others."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12]) if fields[0] == "S" else None

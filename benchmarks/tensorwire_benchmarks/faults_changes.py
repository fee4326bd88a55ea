"""Measures how long workers wait when a share moves or a worker comes, goes or dies.

The jobs run `faults_changes_job.py`, whose parameters count the samples: if a sample was not used
once in each epoch, the row says so. A pause is the longest interval between two steps around the
event, less the median interval of the job.

    move              `tensorwire scale --servers`, one to two and back; all of worker 0's steps
    joins, leaves     `tensorwire scale --workers`, two to three and back; worker 0's steps
    taken over        a worker is killed and nobody starts it again; worker 0's steps
    MODE, server      a server is killed in the mode async or bounded; worker 0's steps
    MODE, worker      worker 1 is killed; its steps, and those of the process that replaces it
    MODE, others      worker 1 is killed; worker 0's steps meanwhile

Next to each stands a limit that no design can avoid, measured in the same run without
tensorwire. Where a process takes over memory: the time from SIGKILL of a process that has mapped
and touched as many bytes until another one has noticed it, and has mapped and touched them. Where a
script has to run again: that time, and the import of torch. Where workers come and go: three round
trips of a message between two processes, as the workers have to agree on a step.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from tensorwire.bench.harness import median
from tensorwire.bench.processes import PairError
from tensorwire.bench.report import print_columns
from tensorwire.bench.rows import Report, Row, Verdict, format_seconds
from tensorwire_benchmarks.jobs import LaunchedJob, read, run_command, script
from tensorwire_benchmarks.systems import LIMIT, OWN

_SCRIPT = "faults_changes_job.py"
_BYTES = 16 << 20  # of the job's parameters
_PATIENCE_S = 60.0
_SETTLED = 4  # steps of worker 0 before the next thing happens
_LIMIT_TURNS = 5


@dataclass(frozen=True, slots=True)
class ChangeSettings:
    """What to run.

    Attributes:
        rounds: how often each event happens.
        modes: modes without lockstep in which processes are killed.
        pace_s: seconds that a worker sleeps per batch.
    """

    rounds: int = 6
    modes: Sequence[str] = ("async", "bounded")
    pace_s: float = 0.02


@dataclass(frozen=True, slots=True)
class ChangeRow(Row):
    """A row with `failures`, one sentence each."""

    failures: tuple[str, ...] = ()


def measure(report: Report, settings: ChangeSettings, tell: Callable[[str], None]) -> None:
    """Adds the rows and limits of all cases; a job that fails gets its reason in `failures`."""
    limits = _limits()
    jobs: list[tuple[list[str], Callable[[_Job, int], None], Sequence[str]]] = [
        (["move"], _move, ["--workers", "2", "--servers", "1:2"]),
        (
            ["joins", "leaves", "taken over"], _come_and_go,
            ["--workers", "2:3"],
        ),
    ]  # fmt: skip
    for mode in settings.modes:
        cases = [f"{mode}, server", f"{mode}, worker", f"{mode}, others"]
        jobs.append((cases, _kill, ["--workers", "2", "--on-death=restart"]))
    for cases, act, options in jobs:
        tell(f"changes: {cases[0]}")
        mode = cases[0].partition(",")[0] if act is _kill else "sync"
        pauses: dict[str, list[float]] = {}
        failures: tuple[str, ...] = ()
        with tempfile.TemporaryDirectory(prefix="tensorwire-changes-") as folder:
            try:
                with _Job(Path(folder), mode, options, settings.pace_s) as job:
                    act(job, settings.rounds)
                    job.finish()
                    pauses = job.pauses()
            except PairError as error:
                failures = (str(error),)
        for case in cases:
            row = ChangeRow(report.bench, f"changes.{case}", OWN, _BYTES, failures=failures)
            what = case.rpartition(", ")[2]
            limit_s, note = limits.get(_LIMIT_OF.get(what, ""), (None, "others need not wait"))
            if found := pauses.get(what):
                seconds = [max(each, 1e-6) for each in found]
                ratio = limit_s / median(seconds) if limit_s else None
                report.rows.append(row.timed(seconds, ratio_to_limit=ratio))
            else:
                report.rows.append(row)
            beside = Row(report.bench, row.case, LIMIT, _BYTES, limit_s, note=note)
            report.rows.append(beside)


def judge(report: Report) -> list[Verdict]:
    """Judges whether every sample was used once in each epoch of each job."""
    rows = [row for row in report.rows if isinstance(row, ChangeRow)]
    good = [row.measured and not row.failures for row in rows]
    share = 100.0 * sum(good) / len(good) if good else None
    told = f"{sum(row.operations for row in rows)} pauses"
    name = "jobs that change, with each sample once in each epoch"
    return [Verdict.of(name, ">=", 100.0, "%", share, detail=told)]


def print_changes(report: Report, console: Console) -> None:
    """Prints the table of changes, if there are any."""
    rows = [row for row in report.rows if isinstance(row, ChangeRow)]
    limits = {row.case: row.seconds_median for row in report.rows if row.system == LIMIT}
    title = "how long workers wait when something changes, beyond a step"
    print_columns(console, title, rows, {
        "what": lambda row: row.case.removeprefix("changes."),
        ">times": lambda row: str(row.operations),
        ">pause": lambda row: format_seconds(row.seconds_median),
        ">p99": lambda row: format_seconds(row.seconds_p99),
        ">limit": lambda row: format_seconds(limits[row.case]),
        "each sample once": lambda row: (
            row.failures[0] if row.failures else "yes" if row.measured else "–"
        ),
    })  # fmt: skip


# --- what happens ---------------------------------------------------------------------------------


def _move(job: _Job, rounds: int) -> None:
    for number in range(rounds):
        job.happens("move", partial(job.scale, "--servers", 2 - number % 2))


def _come_and_go(job: _Job, rounds: int) -> None:
    for _ in range(rounds):
        job.happens("joins", partial(job.scale, "--workers", 3))
        job.happens("leaves", partial(job.scale, "--workers", 2))
    for _ in range(rounds):
        job.happens("taken over", partial(job.kill_worker, 1, "(takeover"))
        job.scale("--workers", 2)


def _kill(job: _Job, rounds: int) -> None:
    for _ in range(rounds):
        job.happens("server", job.kill_server)
        job.happens("worker", partial(job.kill_worker, 1, "(restart"), rank=1)


class _Job(LaunchedJob):
    """A job whose workers write the time of each step to a file."""

    def __init__(self, folder: Path, mode: str, options: Sequence[str], pace_s: float) -> None:
        (folder / "runtime").mkdir(mode=0o700)
        words = script(_SCRIPT, folder, mode, pace_s)
        runtime = {"XDG_RUNTIME_DIR": str(folder / "runtime")}
        super().__init__([*run_command(*options), *words], folder, **runtime)
        self._events: list[tuple[str, int, float, float]] = []  # what, whose steps, from, to

    def happens(self, what: str, act: Callable[[], object], rank: int = 0) -> None:
        """Calls `act` between steps, and waits until worker `rank` has made some steps after it."""
        self._await_steps(0)
        began = time.monotonic()
        act()
        self._await_steps(rank)
        self._events.append((what, rank, began, time.monotonic()))
        if rank:
            self._events.append(("others", 0, began, time.monotonic()))

    def scale(self, option: str, count: int) -> None:
        """Runs `tensorwire scale` with this option, as a user does.

        Raises:
            PairError: the command failed.
        """
        done = subprocess.run(
            [sys.executable, "-m", "tensorwire", "scale", option, str(count)],
            env=self.environment, capture_output=True, text=True, timeout=2 * _PATIENCE_S,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise self.failed(f"scale {option} {count}: {done.stderr}")

    def kill_server(self) -> None:
        """Kills a server once a standby waits; returns when another process replaces it."""
        self.until(self.has_warm_standby, "no standby is ready", _PATIENCE_S)
        self._end(self.servers, "takes its place")

    def kill_worker(self, rank: int, told: str) -> None:
        """Kills a worker by SIGKILL; returns when the launcher prints `told`."""
        named = f"TENSORWIRE_RANK={rank}\0".encode()
        self._end(
            lambda: [p for p in self.children(_SCRIPT) if named in read(f"/proc/{p}/environ")], told
        )

    def finish(self, wait_s: float = _PATIENCE_S) -> None:
        """Lets the job end, and checks its counts.

        Raises:
            PairError: it failed, counted nothing, or did not use each sample once per epoch.
        """
        (self.folder / "stop").touch()
        super().finish(wait_s)
        counted = [json.loads(each) for each in re.findall(r"counted (\{.*\})", self.said)]
        if not counted:
            raise self.failed("nothing was counted")
        for each in counted:
            if each["used"] != [float(each["epochs"])]:
                raise PairError(
                    f"in {each['epochs']} epochs samples were used {each['used']} times"
                )

    def pauses(self) -> dict[str, list[float]]:
        """Returns, by event, the seconds by which the longest interval exceeds the median."""
        found: dict[str, list[float]] = {}
        for what, rank, began, ended in self._events:
            gaps = [(b - a, a, b) for a, b in pairwise(self._steps(rank))]
            around = [gap for gap, a, b in gaps if b > began and a < ended]
            found.setdefault(what, []).append(max(around) - median([gap for gap, _, _ in gaps]))
        return found

    def _steps(self, rank: int) -> list[float]:
        return [float(line) for line in read(str(self.folder / f"steps-{rank}")).splitlines()]

    def _await_steps(self, rank: int) -> None:
        mark = len(self._steps(rank)) + _SETTLED
        self.until(
            lambda: len(self._steps(rank)) >= mark, f"worker {rank} makes no steps", _PATIENCE_S
        )

    def _end(self, find: Callable[[], list[int]], told: str) -> None:
        known = self.said.count(told)
        self.until(lambda: bool(find()), "there is nobody to be killed", _PATIENCE_S)
        os.kill(find()[0], signal.SIGKILL)
        self.until(lambda: self.said.count(told) > known, f"nobody said {told!r}", _PATIENCE_S)


# --- what cannot be avoided -----------------------------------------------------------------------

_LIMIT_OF = {
    "move": "memory", "server": "memory", "taken over": "memory", "worker": "script",
    "joins": "messages", "leaves": "messages",
}  # fmt: skip


def _limits() -> dict[str, tuple[float | None, str]]:
    """Returns, by kind of limit, its seconds and a description."""
    memory_s = median([_handed_over_s() for _ in range(_LIMIT_TURNS)])
    imports_s = median([_imports_s() for _ in range(3)])
    messages_s = median([_messages_s() for _ in range(_LIMIT_TURNS)])
    memory = f"SIGKILL of a process with {_BYTES >> 20} MiB, mapped and touched by another one"
    return {
        "memory": (memory_s, memory),
        "script": (memory_s + imports_s, f"{memory}; a process that imports torch"),
        "messages": (messages_s, "three messages to another process and back"),
    }


@contextlib.contextmanager
def _child(
    program: str, *descriptors: int, words: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, descriptors), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors,
    ) as child:  # fmt: skip
        try:
            yield child
        finally:
            child.kill()


_HOLDS = """
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))
memory[:] = b"1" * len(memory)
print(flush=True)
sys.stdin.read()
"""


def _handed_over_s() -> float:
    memory = os.memfd_create("tensorwire-bench")
    try:
        os.ftruncate(memory, _BYTES)
        with _child(_HOLDS, memory, words=[str(_BYTES)]) as child:
            assert child.stdout is not None
            child.stdout.readline()
            known = os.pidfd_open(child.pid)
            try:
                began = time.perf_counter()
                child.send_signal(signal.SIGKILL)
                select.select([known], [], [])
                with mmap.mmap(memory, _BYTES) as here:
                    for page in range(0, _BYTES, mmap.PAGESIZE):
                        here[page]
                return time.perf_counter() - began
            finally:
                os.close(known)
    finally:
        os.close(memory)


def _imports_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


_ANSWERS = """
import os
while data := os.read(0, 1):
    os.write(1, data)
"""


def _messages_s() -> float:
    with _child(_ANSWERS) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        here, there = child.stdin.fileno(), child.stdout.fileno()
        for _ in range(2):  # the first time it starts
            began = time.perf_counter()
            for _ in range(3):
                os.write(here, b"1")
                os.read(there, 1)
            seconds = time.perf_counter() - began
        return seconds

"""What durability costs while nobody dies: two jobs that do the same, one durable, in turns.

A job is two workers and one server on shared memory, `--on-death` with `restart` or `end`;
both live at the same time, and a worker waits between turns (`durable_worker.py`). In the cases
"exchange" workers do nothing but push gradients that are there already, and step; what is compared
is the server's CPU time of a step. In the case "computation" they also sleep, ten times as long as
such an exchange lasts without durability, and the time of a step is compared.

The CPU time is that of the server that works; a standby uses none while it waits. Not measured: the
notes of a worker on its position, which need a loader.

Beside another checkout, of a commit before durability, jobs of both take turns that are not
durable: what it costs who does not want it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tensorwire.bench.harness import median, paired_ratio
from tensorwire.bench.machine import process_cpu_seconds
from tensorwire.bench.processes import PairError
from tensorwire.bench.report import add_groups, new_table
from tensorwire.bench.rows import (
    Comparison,
    Report,
    Row,
    Verdict,
    format_seconds,
    format_size,
)

ON, OFF = "durable", "not durable"
NOW, BEFORE = "now", "before"
EQUAL_BAR = 0.97
"""No 95 % interval of the speed by that of the other checkout lies wholly below."""
OPTIMIZERS = {"momentum": 1.45, "adam": 1.85}
"""With the bar on the server's CPU time, with durability by without."""
STEP_BAR = 1.08
COMPUTATION = 10.0
"""How many times as long as the exchange a step computes."""
_SCRIPT = Path(__file__).with_name("durable_worker.py")
_WORKERS = 2
_PATIENCE_S = 120.0
_CALIBRATIONS = 4  # at most
_NEAR = 0.05


@dataclass(frozen=True, slots=True)
class CostSettings:
    """What to measure.

    Attributes:
        optimizers: some of `OPTIMIZERS`.
        tensors: of 1 MiB each.
        turns: of each job and case.
        steps: of a turn without computation.
        computing_steps: of one with.
        beside: the path of another checkout, with tensorwire and torch installed in its .venv; then
            nothing else is measured. "": none.
    """

    optimizers: Sequence[str] = tuple(OPTIMIZERS)
    tensors: int = 24
    turns: int = 24
    steps: int = 20
    computing_steps: int = 4
    beside: str = ""


@dataclass(frozen=True, slots=True)
class CostRow(Row):
    """A row of one case and job; `seconds_…` are of a step, `cpu_seconds_remote` is the server's.

    Attributes:
        rss_bytes, pss_bytes: memory of the server at the end; the second counts what is shared in
            parts.
        notes_bytes: of these for copies and notes, as the job's report says.
        cpu_ratio, cpu_ratio_interval: the server's CPU time by that without durability, of
            neighbouring turns, with the 95 % interval of the median.
        step_ratio, step_ratio_interval: the time of a step likewise.
        computation_by_exchange: how often the exchange without durability fits in the computation.
    """

    rss_bytes: int | None = None
    pss_bytes: int | None = None
    notes_bytes: int | None = None
    cpu_ratio: float | None = None
    cpu_ratio_interval: tuple[float, float] | None = None
    step_ratio: float | None = None
    step_ratio_interval: tuple[float, float] | None = None
    computation_by_exchange: float | None = None


def measure(report: Report, settings: CostSettings, tell: Callable[[str], None]) -> None:
    """Adds the rows of all cases; where one cannot be measured they have the reason."""
    measured = _measure_beside if settings.beside else _measure
    for optimizer in settings.optimizers:
        tell(f"cost, {optimizer}")
        size = settings.tensors << 20
        try:
            measured(report, optimizer, size, settings)
        except PairError as error:
            case = "before" if settings.beside else "exchange"
            row = CostRow(report.bench, f"cost.{case}.{optimizer}", ON, size, note=str(error))
            report.rows.append(row)


def judge(report: Report, settings: CostSettings) -> list[Verdict]:
    """The server's CPU time, and the time of a step that computes ten times as long.

    Or the speed beside the other checkout.
    """
    if settings.beside:
        return [_judge_equal(report, f"cost.before.{name}") for name in settings.optimizers]
    found = []
    rows: list[Any] = [row for row in report.rows if row.system == ON]
    for name in settings.optimizers:
        exchange = next((row for row in rows if row.case == f"cost.exchange.{name}"), None)
        whole = next((row for row in rows if row.case == f"cost.computation.{name}"), None)
        why = "it was not measured" if exchange is None else exchange.note
        cpu, interval = None, None
        if exchange is not None:
            cpu, interval = exchange.cpu_ratio, exchange.cpu_ratio_interval
        told = f"server's CPU time of a durable job, {name}"
        found.append(
            Verdict.of(told, "<=", OPTIMIZERS[name], "x", cpu, interval, "" if cpu else why)
        )
        step, interval = None, None
        if whole is not None:
            step, interval = whole.step_ratio, whole.step_ratio_interval
            why = f"{whole.computation_by_exchange:.3g}:1"
        told = f"step of a durable job, computation to exchange 10:1, {name}"
        found.append(Verdict.of(told, "<=", STEP_BAR, "x", step, interval, why))
    return found


def _judge_equal(report: Report, case: str) -> Verdict:
    told = f"{case}, upper end of the 95 % interval of the speed", ">=", EQUAL_BAR, "x as fast"
    found = next((each for each in report.comparisons if each.case == case), None)
    if found is None or found.interval is None:
        notes = [row.note for row in report.rows if row.case == case and row.note]
        return Verdict.of(*told, None, None, "; ".join(notes) or "there are too few turns")
    return Verdict.of(*told, found.interval[1], found.interval, f"median {found.ratio:.3g}")


def print_costs(report: Report, console: Console) -> None:
    """One table, if there are rows of it."""
    rows = [row for row in report.rows if isinstance(row, CostRow)]
    if not rows:
        return
    table = new_table(
        f"what durability costs, {format_size(rows[0].bytes)}: a step; of the server, CPU, memory",
        "case", "job", ">step", ">CPU", ">RSS", ">PSS", ">notes", ">CPU ratio", ">step ratio",
    )  # fmt: skip
    cells = []
    for row in rows:
        sizes = [
            "–" if size is None else f"{size / (1 << 20):.0f} MiB"
            for size in (row.rss_bytes, row.pss_bytes, row.notes_bytes)
        ]
        ratios = [
            "–" if ratio is None else f"{ratio:.3g}" + _told(interval)
            for ratio, interval in (
                (row.cpu_ratio, row.cpu_ratio_interval), (row.step_ratio, row.step_ratio_interval),
            )
        ]  # fmt: skip
        times = format_seconds(row.seconds_median), format_seconds(row.cpu_seconds_remote)
        case = row.case.removeprefix("cost.")
        cells.append([case, row.system, *times, *sizes, *ratios])
    add_groups(table, cells)
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.case}, {row.system}: {row.note}", style="dim", soft_wrap=True)


def _told(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" ({interval[0]:.3g}–{interval[1]:.3g})"


def _measure(report: Report, optimizer: str, size: int, settings: CostSettings) -> None:
    commands = {ON: _command("--on-death=restart"), OFF: _command("--on-death=end")}
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(_Twin(name, command, optimizer, settings.tensors))
            for name, command in commands.items()
        }
        exchange = _take_turns(sides, settings.turns, settings.steps, 0.0)
        compute_s = _calibrate(sides[OFF], settings, median(exchange[OFF].seconds))
        whole = _take_turns(sides, settings.turns, settings.computing_steps, compute_s)
        ratio = compute_s / (median(whole[OFF].seconds) - compute_s)
        memory = {name: side.memory() for name, side in sides.items()}
        for side in sides.values():
            side.end()
    for case, turns in (("exchange", exchange), ("computation", whole)):
        for name in (ON, OFF):
            report.rows.append(
                _row(report.bench, f"cost.{case}.{optimizer}", name, size, turns, memory[name],
                     ratio if case == "computation" else None)
            )  # fmt: skip


def _measure_beside(report: Report, optimizer: str, size: int, settings: CostSettings) -> None:
    python = Path(settings.beside, ".venv/bin/python")
    # Of a checkout before durability; it knows no option.
    commands = {NOW: _command("--on-death=end"), BEFORE: _command(python=str(python.absolute()))}
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(_Twin(name, command, optimizer, settings.tensors))
            for name, command in commands.items()
        }
        turns = _take_turns(sides, settings.turns, settings.steps, 0.0)
        memory = {name: side.memory() for name, side in sides.items()}
        for side in sides.values():
            side.end()
    case = f"cost.before.{optimizer}"
    report.rows += [
        _row(report.bench, case, name, size, turns, memory[name], None) for name in sides
    ]
    if found := paired_ratio(turns[BEFORE].seconds, turns[NOW].seconds):
        figures = found.median, found.interval, found.pairs
        report.comparisons.append(Comparison(case, size, NOW, BEFORE, *figures))


def _command(*options: str, python: str = sys.executable) -> list[str]:
    command = [python, "-m", "tensorwire", "run", "--workers", str(_WORKERS), "--servers", "1"]
    return [*command, *options]


@dataclass(slots=True)
class _Turns:
    """Of one job, per turn: seconds and the server's CPU seconds of a step; bytes of notes."""

    seconds: list[float]
    cpu_s: list[float]
    notes_bytes: int = 0


def _row(
    bench: str, case: str, name: str, size: int, turns: dict[str, _Turns],
    memory: tuple[int, int], ratio: float | None,
) -> Row:  # fmt: skip
    mine, rss, pss = turns[name], *memory
    row = CostRow(
        bench, case, name, size, rss_bytes=rss, pss_bytes=pss, notes_bytes=mine.notes_bytes,
        computation_by_exchange=ratio,
    ).timed(mine.seconds, cpu_seconds_remote=median(mine.cpu_s))  # fmt: skip
    if name != ON:
        return row
    found: dict[str, Any] = {}
    for what, above, below in (
        ("cpu_ratio", mine.cpu_s, turns[OFF].cpu_s),
        ("step_ratio", mine.seconds, turns[OFF].seconds),
    ):
        paired = paired_ratio(above, below)
        if paired is not None:
            found |= {what: paired.median, f"{what}_interval": paired.interval}
    return row.timed(mine.seconds, cpu_seconds_remote=median(mine.cpu_s), **found)


def _take_turns(
    sides: dict[str, _Twin], turns: int, steps: int, compute_s: float
) -> dict[str, _Turns]:
    found = {name: _Turns([], []) for name in sides}
    for turn in range(turns + 1):
        for name in sides if turn % 2 else reversed(sides):
            seconds, cpu_s, notes = sides[name].run(steps, compute_s)
            if turn:  # memory is touched in the first
                found[name].seconds.append(seconds)
                found[name].cpu_s.append(cpu_s)
            found[name].notes_bytes = notes
    return found


def _calibrate(side: _Twin, settings: CostSettings, exchange_s: float) -> float:
    """How long to compute so that it is ten times as long as the rest of a step."""
    compute_s = COMPUTATION * exchange_s
    for _ in range(_CALIBRATIONS):
        seconds = [side.run(settings.computing_steps, compute_s)[0] for _ in range(3)]
        rest_s = median(seconds) - compute_s
        if abs(compute_s / rest_s / COMPUTATION - 1) < _NEAR:
            break
        compute_s = COMPUTATION * rest_s
    return compute_s


class _Twin:
    """The processes of one job, from their start until the block ends.

    Raises:
        PairError: from all methods, with what the job has said last.
    """

    def __init__(self, name: str, command: list[str], optimizer: str, tensors: int) -> None:
        self._name, self._command = name, command
        self._order = str(_SCRIPT), optimizer, str(tensors)

    def __enter__(self) -> _Twin:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorwire-bench-"))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(os.path.join(folder, "bench"))
            listener.listen(_WORKERS)
            listener.settimeout(1.0)
            self._said = Path(folder, "said")
            script, *order = self._order
            command = [*self._command, script, listener.getsockname(), *order]
            with self._said.open("wb") as said:
                self._process = subprocess.Popen(
                    command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                    start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            stack.callback(self._kill)
            links = [stack.enter_context(self._accept(listener)) for _ in range(_WORKERS)]
            for link in links:
                link.settimeout(_PATIENCE_S)
            self._files = [stack.enter_context(link.makefile("rw")) for link in links]
            for file in self._files:
                self._read(file)
            (self._server,) = self._servers()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, steps: int, compute_s: float) -> tuple[float, float, int]:
        """A turn: seconds and the server's CPU seconds of a step, and its bytes of notes."""
        before = process_cpu_seconds(self._server)
        for file in self._files:
            self._write(file, {"steps": steps, "compute_s": compute_s})
        answers = [self._read(file) for file in self._files]
        cpu_s = process_cpu_seconds(self._server) - before
        seconds = max(answer["seconds"] for answer in answers)
        return seconds / steps, cpu_s / steps, answers[0]["notes"]

    def memory(self) -> tuple[int, int]:
        """Bytes of the server that are resident, and its part of them where they are shared."""
        found = {}
        for line in Path(f"/proc/{self._server}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith("kB"):
                found[name] = int(rest.split()[0]) << 10
        return found["Rss"], found["Pss"]

    def end(self) -> None:
        """Lets the job end, and waits for it."""
        for file in self._files:
            self._write(file, {"steps": 0})
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise PairError(f"{self._name} did not end in {_PATIENCE_S:g} s") from error
        if code:
            raise self._failed(f"exit code {code}")

    def _servers(self) -> Iterator[int]:
        """Processes that serve; a standby does not."""
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"tensorwire.torch.server" in words and b"--standby" not in words:
                yield int(child)

    def _accept(self, listener: socket.socket) -> socket.socket:
        for _ in range(int(_PATIENCE_S)):
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
            if self._process.poll() is not None:
                raise self._failed(f"exit code {self._process.returncode}")
        raise self._failed("it did not start in time")

    def _write(self, file: Any, turn: dict[str, float]) -> None:
        try:
            file.write(json.dumps(turn) + "\n")
            file.flush()
        except OSError as error:
            raise self._failed(str(error)) from error

    def _read(self, file: Any) -> dict[str, Any]:
        try:
            line = file.readline()
        except OSError as error:
            raise self._failed(str(error)) from error
        if not line:
            raise self._failed("a worker has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def _failed(self, why: str) -> PairError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)  # so that it has said why
        lines = self._said.read_text(errors="replace").strip().splitlines()
        return PairError(f"{self._name}: {why}" + "".join(f"; it said: {x}" for x in lines[-1:]))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

"""Measures the cost of durability while no process dies: two equal jobs in turns, one durable.

A job has two workers and one server on shared memory, `tensorwire run --on-death=restart` or
`--on-death=end`. Both live at the same time, and a worker waits between turns (`job_worker.py`). In
the case "exchange" workers only push gradients that exist already, and step; the server's CPU time
of a step is compared. In the case "computation" they also sleep ten times as long as an exchange
takes without durability, and the time of a step is compared.

The CPU time is of the working server; a standby uses none while it waits. Not measured: the
notes of a worker on its position, which need a loader.

With another checkout, of a commit before durability, jobs of both checkouts that are not durable
take turns: the cost for users who do not want durability.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tensorwire.bench.harness import median, paired_ratio
from tensorwire.bench.machine import process_cpu_seconds
from tensorwire.bench.measuring import take_turns
from tensorwire.bench.processes import PairError
from tensorwire.bench.report import print_columns, shown
from tensorwire.bench.rows import Report, Row, Verdict, format_seconds, format_size
from tensorwire.bench.verdicts import EQUAL, MIB, Bar, Figure
from tensorwire_benchmarks.jobs import LinkedJob, linked, run_command, script

ON, OFF = "durable", "not durable"
NOW, BEFORE = "now", "before"
OPTIMIZERS = {"momentum": 1.45, "adam": 1.85}
"""Optimizers, with the bar on the ratio of the server's CPU time, durable to not durable."""
STEP_BAR = 1.08
COMPUTATION = 10.0
"""The ratio of computation to exchange in the case "computation"."""
_WORKERS = 2
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
        computing_steps: of a turn with computation.
        beside: the path of another checkout, with tensorwire and torch installed in its .venv; then
            only the comparison with it is measured. "": none.
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
        notes_bytes: the part of this memory for copies and notes, from the job's report.
        cpu_ratio, cpu_ratio_interval: the server's CPU time with durability divided by its time
            without, of neighbouring turns, with the 95 % interval of the median.
        step_ratio, step_ratio_interval: the same ratio of the time of a step.
        computation_by_exchange: computation divided by the exchange without durability.
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
    """Adds the rows of all cases; an optimizer that fails gets one row with the reason."""
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
    """Judges the server's CPU time and the time of a step with computation.

    With another checkout, judges the speed compared with it instead.
    """
    if settings.beside:
        return [
            Bar(f"cost.before.{name}, upper end of the 95 % interval of the speed", ">=", EQUAL,
                "x as fast", f"cost.before.{name}", NOW, rival=BEFORE, upper_end=True).judge(report)
            for name in settings.optimizers
        ]  # fmt: skip
    bars = [
        bar
        for name in settings.optimizers
        for bar in (
            Bar(f"server's CPU time of a durable job, {name}", "<=", OPTIMIZERS[name], "x",
                f"cost.exchange.{name}", ON, _cpu_ratio),
            Bar(f"step of a durable job, computation to exchange 10:1, {name}", "<=", STEP_BAR,
                "x", f"cost.computation.{name}", ON, _step_ratio),
        )
    ]  # fmt: skip
    return [bar.judge(report) for bar in bars]


def _cpu_ratio(row: Any) -> Figure | None:
    return None if row.cpu_ratio is None else (row.cpu_ratio, row.cpu_ratio_interval)


def _step_ratio(row: Any) -> Figure | None:
    return None if row.step_ratio is None else (row.step_ratio, row.step_ratio_interval)


def print_costs(report: Report, console: Console) -> None:
    """Prints the table of the costs, if there are any."""
    rows = [row for row in report.rows if isinstance(row, CostRow)]

    def mebibytes(name: str) -> Callable[[CostRow], str]:
        def cell(row: CostRow) -> str:
            size = getattr(row, name)
            return "–" if size is None else f"{size / MIB:.0f} MiB"

        return cell

    def ratio(name: str) -> Callable[[CostRow], str]:
        def cell(row: CostRow) -> str:
            value, interval = getattr(row, name), getattr(row, f"{name}_interval")
            around = f" ({interval[0]:.3g}–{interval[1]:.3g})" if interval else ""
            return shown(value, ".3g") + around

        return cell

    size = format_size(rows[0].bytes) if rows else ""
    title = f"what durability costs, {size}: a step; of the server, CPU, memory"
    print_columns(console, title, rows, {
        "case": lambda row: row.case.removeprefix("cost."),
        "job": lambda row: row.system,
        ">step": lambda row: format_seconds(row.seconds_median),
        ">CPU": lambda row: format_seconds(row.cpu_seconds_remote),
        ">RSS": mebibytes("rss_bytes"),
        ">PSS": mebibytes("pss_bytes"),
        ">notes": mebibytes("notes_bytes"),
        ">CPU ratio": ratio("cpu_ratio"),
        ">step ratio": ratio("step_ratio"),
    })  # fmt: skip
    for row in rows:
        if row.note:
            console.print(f"{row.case}, {row.system}: {row.note}", style="dim", soft_wrap=True)


def _measure(report: Report, optimizer: str, size: int, settings: CostSettings) -> None:
    commands = {ON: _command("--on-death=restart"), OFF: _command("--on-death=end")}
    with _twins(commands, optimizer, settings) as sides:
        exchange = _take_turns(sides, settings.turns, settings.steps, 0.0)
        compute_s = _calibrate(sides[OFF], settings, median(exchange[OFF].seconds))
        whole = _take_turns(sides, settings.turns, settings.computing_steps, compute_s)
        ratio = compute_s / (median(whole[OFF].seconds) - compute_s)
        memory = {name: side.memory() for name, side in sides.items()}
    for case, turns in (("exchange", exchange), ("computation", whole)):
        for name in (ON, OFF):
            report.rows.append(
                _row(report.bench, f"cost.{case}.{optimizer}", name, size, turns, memory[name],
                     ratio if case == "computation" else None)
            )  # fmt: skip


def _measure_beside(report: Report, optimizer: str, size: int, settings: CostSettings) -> None:
    python = Path(settings.beside, ".venv/bin/python")
    # A checkout before durability does not know the option.
    commands = {NOW: _command("--on-death=end"), BEFORE: _command(python=str(python.absolute()))}
    with _twins(commands, optimizer, settings) as sides:
        turns = _take_turns(sides, settings.turns, settings.steps, 0.0)
        memory = {name: side.memory() for name, side in sides.items()}
    case = f"cost.before.{optimizer}"
    report.rows += [
        _row(report.bench, case, name, size, turns, memory[name], None) for name in sides
    ]
    report.compare(case, size, NOW, BEFORE, turns[BEFORE].seconds, turns[NOW].seconds)


def _command(*options: str, python: str = sys.executable) -> list[str]:
    return run_command(f"--workers={_WORKERS}", "--servers=1", *options, python=python)


@dataclass(slots=True)
class _Turns:
    """The turns of a job: seconds and server's CPU seconds per step; last bytes of notes."""

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
    sides: Mapping[str, _Twin], turns: int, steps: int, compute_s: float
) -> dict[str, _Turns]:
    ways = {name: partial(side.run, steps, compute_s) for name, side in sides.items()}
    return {
        name: _Turns([each[0] for each in taken], [each[1] for each in taken], taken[-1][2])
        for name, taken in take_turns(ways, turns).items()
    }


def _calibrate(side: _Twin, settings: CostSettings, exchange_s: float) -> float:
    """Returns the seconds of computation that last ten times as long as the rest of a step."""
    compute_s = COMPUTATION * exchange_s
    for _ in range(_CALIBRATIONS):
        seconds = [side.run(settings.computing_steps, compute_s)[0] for _ in range(3)]
        rest_s = median(seconds) - compute_s
        if abs(compute_s / rest_s / COMPUTATION - 1) < _NEAR:
            break
        compute_s = COMPUTATION * rest_s
    return compute_s


class _Twin(LinkedJob):
    """One of the two jobs."""

    def __init__(self, command: list[str], optimizer: str, tensors: int, folder: Path) -> None:
        words = script("job_worker.py", self.ADDRESS, optimizer, tensors, 1 << 20)
        super().__init__([*command, *words], folder, _WORKERS)

    def run(self, steps: int, compute_s: float) -> tuple[float, float, int]:
        """Runs a turn; returns seconds and server's CPU seconds per step, and bytes of notes."""
        (server,) = self.servers()
        before = process_cpu_seconds(server)
        answers = self.turn(steps=steps, compute_s=compute_s, backward=False)
        cpu_s = process_cpu_seconds(server) - before
        seconds = max(answer["seconds"] for answer in answers)
        return seconds / steps, cpu_s / steps, answers[0]["notes"]

    def memory(self) -> tuple[int, int]:
        """Returns the server's resident bytes (RSS), and with shared pages in parts (PSS)."""
        (server,) = self.servers()
        found = {}
        for line in Path(f"/proc/{server}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith("kB"):
                found[name] = int(rest.split()[0]) << 10
        return found["Rss"], found["Pss"]


def _twins(
    commands: Mapping[str, list[str]], optimizer: str, settings: CostSettings
) -> contextlib.AbstractContextManager[dict[str, _Twin]]:
    return linked(
        {
            name: partial(_Twin, command, optimizer, settings.tensors)
            for name, command in commands.items()
        }
    )

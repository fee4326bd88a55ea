"""Prints rows of the benches of training steps as tables, and draws the figure of optimizers.

Like `tensorwire.bench.report`, whose tables it uses, it judges nothing and omits nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tensorwire.bench import report as common
from tensorwire.bench.report import add_groups, figure, new_table, show_seconds
from tensorwire.bench.rows import Report, format_seconds
from tensorwire.bench.verdicts import MIB
from tensorwire_benchmarks.parts import PARTS
from tensorwire_benchmarks.systems import COMPUTATION, OWN
from tensorwire_benchmarks.workloads.catalog import Workload, summary

Parts = dict[tuple[str, str], dict[str, float]]
"""Seconds of each part by (workload/wire, system)."""

_COLORS = {OWN: "#0072B2", "torch": "#bbbbbb"}


def print_training(report: Report, console: Console) -> None:
    """Prints tables, notes, verdicts, and speeds compared with each rival."""
    common.print_report(report, console)
    title = "tensorwire, times as fast as its rivals (95 %)"
    common.print_comparisons(report, title, console)


def print_placement(report: Report, console: Console) -> None:
    """Prints tables, notes, verdicts, parts of steps, and speeds compared with the others."""
    rows = [row for row in report.rows if row.case.rpartition("/")[2] not in PARTS]
    common.print_report(dataclasses.replace(report, rows=rows), console)
    parts = parts_of(report)
    if parts:
        console.print(_table(parts))
    common.print_comparisons(report, "plan, times as fast as the others (95 %)", console)


def print_workloads(models: Sequence[Workload], console: Console) -> None:
    """Prints a line per model: its tensors, MiB, and how many are small, medium and large."""
    for model in models:
        found = summary(model.tensors())
        sizes = f"{found.bytes / MIB:7.2f} MiB, {found.small} + {found.medium} + {found.large}"
        line = f"{model.name:13} {found.tensors:3} tensors, {sizes}: {model.about}"
        console.print(f"{line}; batch {model.batch}", highlight=False, soft_wrap=True)
    console.print("Of the tensors, the first number is below 1 KiB, the last 1 MiB or more.")


def parts_of(report: Report) -> Parts:
    """Returns the parts of the steps whose parts were all measured."""
    seconds = {
        (row.case, row.system): row.seconds_median
        for row in report.rows
        if row.seconds_median is not None
    }
    found: Parts = {}
    for case, system in seconds:
        stem, _, part = case.rpartition("/")
        if part != "exposed":
            continue
        owners = {"forward": COMPUTATION.name, "backward": COMPUTATION.name}
        values = [seconds.get((f"{stem}/{p}", owners.get(p, system))) for p in PARTS]
        known = [value for value in values if value is not None]
        if len(known) == len(PARTS):
            found[stem, system] = dict(zip(PARTS, known, strict=True))
    return found


def _table(parts: Parts) -> Table:
    table = new_table(
        "what a step is made of",
        *("case", "system", *(f">{part}" for part in PARTS), ">exposed share"),
        caption="hidden: beneath backward; exposed: what the step takes longer for it",
        caption_justify="left",
    )
    rows = []
    for (case, system), seconds in parts.items():
        exposed = max(0.0, seconds["exposed"])
        whole = seconds["forward"] + seconds["backward"] + exposed
        cells = (_signed(seconds[part]) for part in PARTS)
        rows.append((case, system, *cells, f"{100 * exposed / whole:.0f} %"))
    add_groups(table, rows)
    return table


def _signed(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 0 else f"-{format_seconds(-seconds)}"


def draw_parameters(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws the seconds per MiB of each optimizer, a server's work next to torch's own step.

    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: the report has no measured optimizer.
    """
    rows = [row for row in report.rows if row.measured and "." not in row.case]
    cases = list(dict.fromkeys(row.case for row in rows))
    if not cases:
        raise ValueError("the report has no measured optimizer to draw")
    with figure(report, path, 1, 1, (9, 3.2), ", one thread; medians per MiB", 2) as grid:
        axes = grid[0][0]
        for place, (system, color) in enumerate(_COLORS.items()):
            times = [
                (row.seconds_median or 0.0) / row.bytes * (1 << 20)
                for row in rows
                if row.system == system
            ]
            places = [at + 0.4 * place - 0.2 for at in range(len(times))]
            axes.bar(places, times, 0.4, color=color, label=system)
        axes.set_yscale("log")
        axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
        show_seconds(axes)

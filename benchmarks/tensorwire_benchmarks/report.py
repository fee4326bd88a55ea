"""Prints rows of the benches of training steps as tables, and draws the figure of optimizers.

Like `tensorwire.bench.report`, whose tables it uses, it judges nothing and omits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console

from tensorwire.bench import report as common
from tensorwire.bench.report import figure, show_seconds
from tensorwire.bench.rows import Report
from tensorwire.bench.verdicts import MIB
from tensorwire_benchmarks.systems import OWN
from tensorwire_benchmarks.workloads.catalog import Workload, summary

_COLORS = {OWN: "#0072B2", "torch": "#bbbbbb"}


def print_steps(report: Report, console: Console) -> None:
    """Prints tables, notes, verdicts, and speeds compared with the other systems."""
    common.print_report(report, console)
    common.print_comparisons(report, "times as fast as the others (95 %)", console)


def print_workloads(models: Sequence[Workload], console: Console) -> None:
    """Prints a line per model: its tensors, MiB, and how many are small, medium and large."""
    for model in models:
        found = summary(model.tensors())
        sizes = f"{found.bytes / MIB:7.2f} MiB, {found.small} + {found.medium} + {found.large}"
        line = f"{model.name:13} {found.tensors:3} tensors, {sizes}: {model.about}"
        console.print(f"{line}; batch {model.batch}", highlight=False, soft_wrap=True)
    console.print("Of the tensors, the first number is below 1 KiB, the last 1 MiB or more.")


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

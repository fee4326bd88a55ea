"""Prints rows of `bench modes` as tables, and draws loss over time."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

from tensorwire.bench.report import figure, print_comparisons, print_report
from tensorwire.bench.rows import Report

_LOOKS = {  # Okabe–Ito, and lines that differ
    "sync": ("#0072B2", "-"),
    "async": ("#D55E00", "--"),
    "bounded": ("#009E73", "-."),
    "ddp-gloo": ("#CC79A7", ":"),
    "grpc": ("#E69F00", (0, (5, 1, 1, 1, 1, 1))),
}


def print_modes(report: Report, console: Console) -> None:
    """Prints tables, verdicts, steps to the loss, and speeds compared with `sync`."""
    print_report(report, console)
    for row in report.rows:
        if row.measured and row.note:
            console.print(f"{row.case:24} {row.system:10} {row.note}", highlight=False)
    print_comparisons(report, "times as fast as sync, in seconds or in steps (95 %)", console)


def draw_modes(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws loss over seconds, a row of panels per task and a column per number of workers.

    A line joins the medians of all seeds.

    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: the report has no training.
    """
    curves: list[dict[str, Any]] = report.settings.get("curves", [])
    if not curves:
        raise ValueError("the report has no training to draw")
    tasks, sizes = (
        list(dict.fromkeys(each[key] for each in curves)) for key in ("task", "workers")
    )
    size = (max(7.5, 3.4 * len(sizes) + 0.4), 2.6 * len(tasks) + 0.9)
    with figure(report, path, len(tasks), len(sizes), size, "; medians", 5) as grid:
        for line, task in zip(grid, tasks, strict=True):
            for axes, workers in zip(line, sizes, strict=True):
                axes.set_title(f"{task}, {workers} workers", loc="left")
                axes.set_xlabel("seconds")
                axes.set_ylabel("training loss")
                axes.set_yscale("log")
                axes.spines[["top", "right"]].set_visible(False)
                for system, (color, dashes) in _LOOKS.items():
                    wanted = (task, workers, system)
                    for each in curves:
                        if (each["task"], each["workers"], each["system"]) == wanted:
                            axes.plot(
                                each["seconds"], each["loss"], color=color, linestyle=dashes,
                                label=system,
                            )  # fmt: skip

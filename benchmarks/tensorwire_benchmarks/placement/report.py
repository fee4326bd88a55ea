"""Rows of `bench placement` for people: tables, what a step is made of, and a figure of that.

It decides nothing and hides nothing, like `tensorwire.bench.report`, whose tables it uses.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorwire.bench import report as common
from tensorwire.bench.rows import Report, format_seconds
from tensorwire.errors import UnavailableError
from tensorwire_benchmarks.placement.shares import PARTS
from tensorwire_benchmarks.training.systems import COMPUTATION, COPY, GRPC, LIMIT, PLAN

_DRAWN = (PLAN.name, COPY.name, GRPC.name)
_COLUMNS = 4
_FORWARD, _BACKWARD, _EXPOSED = "#7f7f7f", "#cccccc", "#0072B2"


def print_report(report: Report, console: Console) -> None:
    """Tables, notes, what is missing, verdicts; what steps are made of; how many times as fast."""
    rows = [row for row in report.rows if row.case.rpartition("/")[2] not in PARTS]
    common.print_report(dataclasses.replace(report, rows=rows), console)
    parts = parts_of(report)
    if parts:
        console.print(_table(parts))
    if report.comparisons:
        console.print(Text("plan, times as fast as the others (95 %)", style="bold"))
    for item in report.comparisons:
        around = f" ({item.interval[0]:.2f}–{item.interval[1]:.2f})" if item.interval else ""
        console.print(f"{item.case:24} {item.rival:10} {item.ratio:.2f}{around}", highlight=False)


def parts_of(report: Report) -> dict[tuple[str, str], dict[str, float]]:
    """Seconds of each part by (workload/wire, system), where all parts were measured."""
    seconds = {
        (row.case, row.system): row.seconds_median
        for row in report.rows
        if row.seconds_median is not None
    }
    found: dict[tuple[str, str], dict[str, float]] = {}
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


def _table(parts: dict[tuple[str, str], dict[str, float]]) -> Table:
    table = Table(
        title="what a step is made of",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="hidden: beneath backward; exposed: what the step takes longer for it",
        caption_justify="left",
    )
    table.add_column("case", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for heading in (*PARTS, "exposed share"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for (case, system), seconds in parts.items():
        if previous and case != previous:
            table.add_section()
        exposed = max(0.0, seconds["exposed"])
        whole = seconds["forward"] + seconds["backward"] + exposed
        table.add_row(
            case if case != previous else "",
            system,
            *(_signed(seconds[part]) for part in PARTS),
            f"{100 * exposed / whole:.0f} %",
        )
        previous = case
    return table


def _signed(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 0 else f"-{format_seconds(-seconds)}"


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws what steps are made of: a panel per workload, a stacked bar per wire and system.

    What is hidden is hatched over the end of backward. The limit of the exchange is a dotted line
    above computation. The file's ending (.svg, .pdf, .png) says the format.

    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: no step's parts were measured.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "a figure needs matplotlib: pip install 'tensorwire[bench]'"
        ) from error

    parts = parts_of(report)
    if not parts:
        raise ValueError("the report has no step whose parts were measured")
    names = list(dict.fromkeys(case.partition("/")[0] for case, _ in parts))
    columns = min(_COLUMNS, len(names))
    lines = math.ceil(len(names) / columns)
    style = {
        "font.size": 9, "axes.titlesize": 10, "hatch.linewidth": 0.7, "svg.hashsalt": "tensorwire",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(
            figsize=(max(3.1 * columns, 5.0) + 0.4, 2.7 * lines + 1.1), layout="constrained"
        )
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, name in zip(grid.flat, names, strict=False):
            _panel(axes, report, name, parts)
        for axes in grid.flat[len(names) :]:
            axes.set_visible(False)
        handles: dict[str, Any] = {}
        for axes in grid.flat[: len(names)]:
            found, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=5 if columns > 2 else 2,
            frameon=False,
        )
        about, settings = report.machine, report.settings
        figure.suptitle(
            f"{about.get('cpu')}, {len(about.get('affinity') or [])} cores, one host, "
            f"{settings.get('workers')} workers, {settings.get('optimizer')}; medians of a step",
            fontsize=9,
        )
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _panel(
    axes: Any, report: Report, name: str, parts: dict[tuple[str, str], dict[str, float]]
) -> None:
    from matplotlib.ticker import FuncFormatter

    limits = {row.case: row.seconds_median for row in report.rows if row.system == LIMIT}
    mine = [(case, system) for case, system in parts if case.partition("/")[0] == name]
    mine.sort(key=lambda key: (key[0], _DRAWN.index(key[1])))
    ticks, labels, at = [], [], 0.0
    for place, (case, system) in enumerate(mine):
        if place:
            at += 1.0 if case == mine[place - 1][0] else 1.6
        seconds = parts[case, system]
        computed = seconds["forward"] + seconds["backward"]
        hidden = min(max(0.0, seconds["hidden"]), seconds["backward"])
        axes.bar(at, seconds["forward"], 0.8, color=_FORWARD, label="forward")
        axes.bar(
            at, seconds["backward"], 0.8, bottom=seconds["forward"], color=_BACKWARD,
            label="backward",
        )  # fmt: skip
        axes.bar(
            at, hidden, 0.8, bottom=computed - hidden, color="none", edgecolor=_EXPOSED,
            hatch="////", linewidth=0, label="communication, hidden",
        )  # fmt: skip
        axes.bar(
            at, max(0.0, seconds["exposed"]), 0.8, bottom=computed, color=_EXPOSED,
            label="communication, exposed",
        )  # fmt: skip
        limit = limits.get(case)
        if limit is not None:
            axes.plot(
                [at - 0.45, at + 0.45], [computed + limit] * 2, color="black", linewidth=1.2,
                linestyle=":", label="limit of an exchange",
            )  # fmt: skip
        ticks.append(at)
        labels.append(f"{system}\n{case.partition('/')[2]}")
    axes.set_xticks(ticks, labels, fontsize=8)
    axes.set_title(name, loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.spines[["top", "right"]].set_visible(False)

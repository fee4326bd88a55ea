"""Prints rows of the benches of training steps as tables, and draws figures.

Like `tensorwire.bench.report`, whose tables it uses, it judges nothing and omits nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from rich.console import Console
from rich.table import Table

from tensorwire.bench import report as common
from tensorwire.bench.report import add_groups, figure, new_table, show_seconds
from tensorwire.bench.rows import Report, Row, format_seconds
from tensorwire_benchmarks.bench import ALONE
from tensorwire_benchmarks.parts import PARTS
from tensorwire_benchmarks.systems import COMPUTATION, LIMIT, OWN

Parts = dict[tuple[str, str], dict[str, float]]
"""Seconds of each part by (workload/wire, system)."""

_COLUMNS = 4
_COLORS = {OWN: "#0072B2", "ddp-gloo": "#CC79A7", "grpc": "#E69F00"}  # Okabe–Ito
_COMPUTATION = "#bbbbbb"
_FORWARD, _BACKWARD, _EXPOSED = "#7f7f7f", "#cccccc", "#0072B2"


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


# --- figures ------------------------------------------------------------------------------------


def _about(report: Report) -> str:
    settings = report.settings
    return f", {settings.get('workers')} workers, {settings.get('optimizer')}; medians"


def draw_training(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws whole steps as stacked bars, exchange below the rest, per model, wire and system.

    The limit of the exchange is a line across the panel. Scripts that run alone are not drawn.


    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: the report has no measured step.
    """
    cases = [
        row.case.split(".")
        for row in report.rows
        if row.measured and row.case.endswith(".step") and not row.case.startswith(f"{ALONE}.")
    ]
    if not cases:
        raise ValueError("the report has no measured step to draw")
    wires, models = (list(dict.fromkeys(case[part] for case in cases)) for part in (0, 1))
    size = (3.4 * len(models) + 0.4, 2.8 * len(wires) + 0.8)
    with figure(report, path, len(wires), len(models), size, _about(report), 5) as grid:
        for line, wire in zip(grid, wires, strict=True):
            for axes, model in zip(line, models, strict=True):
                _draw_steps(axes, report, f"{wire}.{model}")


def _draw_steps(axes: Any, report: Report, prefix: str) -> None:
    rows: dict[tuple[str, str], Row] = {
        (row.case.rpartition(".")[2], row.system): row
        for row in report.rows
        if row.measured and row.case.startswith(f"{prefix}.")
    }
    systems = [system for what, system in rows if what == "step"]
    limit = rows.get(("exchange", LIMIT))
    for place, system in enumerate(systems):
        whole = rows["step", system].seconds_median or 0.0
        exchange = min(whole, rows["exchange", system].seconds_median or 0.0)
        axes.bar(place, exchange, 0.6, color=_COLORS.get(system, "#009E73"), label=system)
        axes.bar(
            place, whole - exchange, 0.6, bottom=exchange, color=_COMPUTATION,
            label="forward and backward",
        )  # fmt: skip
        axes.annotate(
            format_seconds(exchange), (place, exchange), ha="center", va="bottom", fontsize=7
        )
    if limit is not None and limit.seconds_median is not None:
        axes.axhline(
            limit.seconds_median, color="black", linewidth=1.2, linestyle=":",
            label="limit of an exchange",
        )  # fmt: skip
    axes.set_xticks(range(len(systems)), systems)
    axes.set_title(prefix.replace(".", " "), loc="left")
    show_seconds(axes)


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
        for place, (system, color) in enumerate(((OWN, _COLORS[OWN]), ("torch", _COMPUTATION))):
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


def draw_placement(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws the parts of steps: a panel per workload, a stacked bar per wire and system.

    Hidden communication is hatched over the end of backward. The limit of the exchange is a dotted
    line above computation.


    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: no step's parts were measured.
    """
    parts = parts_of(report)
    if not parts:
        raise ValueError("the report has no step whose parts were measured")
    names = list(dict.fromkeys(case.partition("/")[0] for case, _ in parts))
    columns = min(_COLUMNS, len(names))
    lines = math.ceil(len(names) / columns)
    size = (max(3.1 * columns, 5.0) + 0.4, 2.7 * lines + 1.1)
    about = f"{_about(report)} of a step"
    with figure(report, path, lines, columns, size, about, 5 if columns > 2 else 2) as grid:
        for axes, name in zip(grid.flat, names, strict=False):
            _draw_parts(axes, report, name, parts)
        for axes in grid.flat[len(names) :]:
            axes.set_visible(False)


def _draw_parts(axes: Any, report: Report, name: str, parts: Parts) -> None:
    limits = {row.case: row.seconds_median for row in report.rows if row.system == LIMIT}
    mine = [(case, system) for case, system in parts if case.partition("/")[0] == name]
    mine.sort(key=lambda key: key[0])  # stable: systems of a case stay in the order of the rows
    ticks, labels, at = [], [], 0.0
    for place, (case, system) in enumerate(mine):
        if place:
            at += 1.0 if case == mine[place - 1][0] else 1.6
        seconds = parts[case, system]
        forward, backward = seconds["forward"], seconds["backward"]
        computed = forward + backward
        hidden = min(max(0.0, seconds["hidden"]), backward)
        hatched = {"color": "none", "edgecolor": _EXPOSED, "hatch": "////", "linewidth": 0}
        for label, height, bottom, look in (
            ("forward", forward, 0.0, {"color": _FORWARD}),
            ("backward", backward, forward, {"color": _BACKWARD}),
            ("communication, hidden", hidden, computed - hidden, hatched),
            ("communication, exposed", max(0.0, seconds["exposed"]), computed,
             {"color": _EXPOSED}),
        ):  # fmt: skip
            axes.bar(at, height, 0.8, bottom=bottom, label=label, **look)
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
    show_seconds(axes)

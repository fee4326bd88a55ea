"""Rows of `bench training` for people: the tables of every bench, the speed-ups, and a figure.

It decides nothing and hides nothing, like `tensorwire.bench.report`, whose tables it uses.
"""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.text import Text

from tensorwire.bench import report as common
from tensorwire.bench.rows import Report, Row, format_seconds
from tensorwire.errors import UnavailableError
from tensorwire_benchmarks.training.alone import ALONE
from tensorwire_benchmarks.training.systems import LIMIT, OWN

_COLORS = {OWN: "#0072B2", "ddp-gloo": "#CC79A7", "grpc": "#E69F00"}  # Okabe–Ito
_COMPUTATION = "#bbbbbb"


def print_report(report: Report, console: Console) -> None:
    """Tables, notes, what is missing, verdicts; then how many times as fast as each rival."""
    common.print_report(report, console)
    if report.comparisons:
        console.print(Text("tensorwire, times as fast as its rivals (95 %)", style="bold"))
    for item in report.comparisons:
        around = f" ({item.interval[0]:.2f}–{item.interval[1]:.2f})" if item.interval else ""
        console.print(f"{item.case:24} {item.rival:10} {item.ratio:.2f}{around}", highlight=False)


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws whole steps as stacked bars, exchange below the rest, per model, wire and system.

    The limit of the exchange is a line across the panel's exchange. Scripts that run alone are not
    drawn. The file's ending (.svg, .pdf,
    .png) says the format.

    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: the report has no measured step.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "a figure needs matplotlib: pip install 'tensorwire[bench]'"
        ) from error

    steps = [
        row
        for row in report.rows
        if row.measured and row.case.endswith(".step") and not row.case.startswith(f"{ALONE}.")
    ]
    if not steps:
        raise ValueError("the report has no measured step to draw")
    wires = list(dict.fromkeys(row.case.split(".")[0] for row in steps))
    models = list(dict.fromkeys(row.case.split(".")[1] for row in steps))
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 9, "svg.hashsalt": "tensorwire"}):
        figure = Figure(
            figsize=(3.4 * len(models) + 0.4, 2.8 * len(wires) + 0.8), layout="constrained"
        )
        grid = figure.subplots(len(wires), len(models), squeeze=False)
        for line, wire in zip(grid, wires, strict=True):
            for axes, model in zip(line, models, strict=True):
                _panel(axes, report, f"{wire}.{model}")
        handles: dict[str, Any] = {}
        for axes in grid.flat:
            found, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
        )
        about, settings = report.machine, report.settings
        figure.suptitle(
            f"{about.get('cpu')}, {len(about.get('affinity') or [])} cores, one host, "
            f"{settings.get('workers')} workers, {settings.get('optimizer')}; medians",
            fontsize=9,
        )
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _panel(axes: Any, report: Report, prefix: str) -> None:
    from matplotlib.ticker import FuncFormatter

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
            place,
            whole - exchange,
            0.6,
            bottom=exchange,
            color=_COMPUTATION,
            label="forward and backward",
        )
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
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.spines[["top", "right"]].set_visible(False)

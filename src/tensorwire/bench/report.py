"""Prints rows as tables for the terminal and draws them as a figure.

It decides nothing and hides nothing: a missed bar and a missing system are printed like the rest.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorwire.bench.operations import CPP, LIMITS, PYTHON
from tensorwire.bench.rows import Report, Row, format_seconds, format_size, write_text
from tensorwire.bench.svg import compact
from tensorwire.errors import UnavailableError

R = TypeVar("R")

# --- tables -------------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    """Prints the machine, one table per case, the missing systems and the verdicts."""
    console.print(machine_line(report), soft_wrap=True)
    for case in dict.fromkeys(row.case for row in report.rows):
        rows = [row for row in report.rows if row.case == case and row.measured]
        if rows:
            console.print(case_table(case, rows))
    for line in missing_lines(report.rows):
        console.print(line, soft_wrap=True)
    for warning in report.settings.get("warnings", []):
        console.print(Text(f"note: {warning}", style="yellow"), soft_wrap=True)
    if report.settings.get("interrupted"):
        console.print(Text("interrupted: the rows so far", style="yellow"))
    console.print(Text("against the bars", style="bold"))
    print_verdicts(report, console)


def print_verdicts(report: Report, console: Console) -> None:
    """Prints a line for each bar, met or missed."""
    styles = {True: "green", False: "bold red", None: "yellow"}
    for verdict in report.verdicts:
        console.print(Text(verdict.line(), style=styles[verdict.met]), soft_wrap=True)


def machine_line(report: Report) -> Text:
    """Returns one line about the machine and software of the measurement."""
    about = report.machine
    memory = about.get("memory_bytes") or 0
    parts = [
        f"{about.get('cpu')}, {len(about.get('affinity') or [])} cores",
        f"{memory / (1 << 30):.0f} GiB",
        f"Linux {about.get('kernel')}",
        f"Python {about.get('python')}",
    ]
    packages = about.get("packages") or {}
    parts += [f"{name} {found}" for name, found in packages.items() if found]
    return Text(" · ".join(parts), style="dim")


def new_table(title: str | None, *columns: str, wraps: bool = False, **more: Any) -> Table:
    """Returns an empty table as all reports have them; the ">" before a heading aligns right."""
    look = {"title_justify": "left", "title_style": "bold", "padding": (0, 1, 0, 0)}
    table = Table(title=title, box=box.SIMPLE_HEAD, **(look | more))
    for heading in columns:
        right = heading.startswith(">")
        table.add_column(
            heading.lstrip(">"),
            justify="right" if right else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    return table


def add_groups(table: Table, rows: Iterable[Sequence[str | Text]]) -> None:
    """Adds rows; those with one first cell are a group, which shows it once."""
    previous: str | Text | None = None
    for first, *others in rows:
        if previous not in (None, first):
            table.add_section()
        table.add_row(first if first != previous else "", *others)
        previous = first


def print_columns(
    console: Console, title: str, rows: Sequence[R], columns: Mapping[str, Callable[[R], Any]],
    **more: Any,
) -> None:  # fmt: skip
    """Prints a table with a cell of each row under each heading, if there are rows."""
    if rows:
        table = new_table(title, *columns, **more)
        add_groups(table, ([cell(row) for cell in columns.values()] for row in rows))
        console.print(table)


def shown(figure: float | None, form: str) -> str:
    """Returns a figure in this format, or a dash for one that is not known."""
    return "–" if figure is None else format(figure, form)


def case_table(case: str, rows: Iterable[Row]) -> Table:
    """Returns the rows of one case, sizes apart."""
    table = new_table(
        case,
        ">size",
        "system",
        ">median",
        ">p99",
        ">GB/s",
        ">of limit (95 %)",
        ">CPU here",
        ">there",
    )  # fmt: skip
    cells = (
        (
            format_size(row.bytes),
            row.system,
            format_seconds(row.seconds_median),
            format_seconds(row.seconds_p99),
            "<0.01" if (row.gb_per_s or 1.0) < 0.01 else shown(row.gb_per_s, ".3g"),
            _ratio(row),
            format_seconds(row.cpu_seconds_local),
            format_seconds(row.cpu_seconds_remote),
        )
        for row in sorted(rows, key=lambda row: row.bytes)
    )
    add_groups(table, cells)
    return table


def _ratio(row: Row) -> Text:
    ratio, interval = row.ratio_to_limit, row.ratio_interval
    if ratio is None:
        return Text("–")
    style = "green" if ratio >= 0.9 else "yellow" if ratio >= 0.5 else "red"
    text = Text(f"{ratio:.2f}", style=style)
    if interval is not None:
        text.append(f" ({interval[0]:.2f}–{interval[1]:.2f})", style="dim")
    return text


def missing_lines(rows: Iterable[Row]) -> list[Text]:
    """Returns one line per system and reason, with the number of cases that it concerns."""
    counts: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if not row.measured:
            counts.setdefault((row.system, row.note), []).append(row.case)
    return [
        Text(f"missing: {system} in {', '.join(dict.fromkeys(cases))}: {note}", style="yellow")
        for (system, note), cases in counts.items()
    ]


def print_comparisons(report: Report, title: str, console: Console) -> None:
    """Prints the speed relative to each rival, if there are any."""
    if report.comparisons:
        console.print(Text(title, style="bold"))
    for item in report.comparisons:
        around = f" ({item.interval[0]:.2f}–{item.interval[1]:.2f})" if item.interval else ""
        pair = f"{item.system} / {item.rival}"
        console.print(f"{item.case:24} {pair:28} {item.ratio:.2f}{around}", highlight=False)


# --- figure -------------------------------------------------------------------------------------


def _style(color: str, marker: str, line: str, width: float = 1.4) -> dict[str, Any]:
    """Returns a style whose colour, marker and line all differ, to be read without colour too."""
    return {
        "color": color, "marker": marker, "linestyle": line, "linewidth": width, "markersize": 4,
    }  # fmt: skip


_STYLES = {
    "tensorwire": _style("#0072B2", "o", "-", 2.2),
    "tensorwire-c++": _style("#56B4E9", "s", "-", 1.8),
    "memcpy": _style("#000000", "", ":", 1.6),
    "raw-socket": _style("#000000", "", ":", 1.6),
    "nixl": _style("#D55E00", "^", "--"),
    "nixl-huge": _style("#D55E00", "<", ":"),
    "torch-rpc": _style("#009E73", "D", "-."),
    "gloo": _style("#CC79A7", "v", "--"),
    "grpc": _style("#E69F00", "P", "-."),
}
_OWN = (PYTHON, CPP)  # drawn with their intervals; the rest would hide them
_OTHER = _style("#666666", "x", "-")
_PANELS = ("median until complete, µs", "bandwidth, GB/s", "speed / speed of the limit")


@contextlib.contextmanager
def figure(
    report: Report, path: str | os.PathLike[str], lines: int, columns: int,
    size: tuple[float, float], about: str, legend_columns: int,
) -> Iterator[Any]:  # fmt: skip
    """Yields a grid of panels to draw in; then adds legend and machine, and writes the file.

    The file's ending (.svg, .pdf, .png) says the format.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "a figure needs matplotlib: pip install 'tensorwire[bench]'"
        ) from error
    style = {
        "font.size": 9, "axes.titlesize": 9, "hatch.linewidth": 0.7, "svg.hashsalt": "tensorwire",
        "svg.fonttype": "none",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=size, layout="constrained")
        grid = drawn.subplots(lines, columns, squeeze=False)
        yield grid
        handles: dict[str, Any] = {}
        for axes in grid.flat:
            found, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        drawn.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=legend_columns,
            frameon=False,
        )  # fmt: skip
        machine = report.machine
        cores, when = len(machine.get("affinity") or []), str(machine.get("time"))[:10]
        drawn.suptitle(f"{machine.get('cpu')}, {cores} cores, one host{about}; {when}", fontsize=9)
        if not str(path).endswith(".svg"):
            drawn.savefig(path)
            return
        text = io.StringIO()
        drawn.savefig(text, format="svg", metadata={"Date": None})
        write_text(path, compact(text.getvalue()))


def show_seconds(axes: Any) -> None:
    """Labels the upright axis with times, and draws no frame on top and at the right."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.spines[["top", "right"]].set_visible(False)


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws time, bandwidth and ratio to the limit over size, for write and read on each wire.

    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: the report has no row of a write or read.
    """
    by_case = {
        case: [row for row in report.rows if row.case == case and row.measured]
        for case in ("shm.write", "shm.read", "tcp.write", "tcp.read")
    }
    by_case = {case: rows for case, rows in by_case.items() if rows}
    if not by_case:
        raise ValueError("the report has no measured write or read to draw")
    size = (11, 2.7 * len(by_case) + 0.9)
    with figure(report, path, len(by_case), 3, size, "; medians", 8) as grid:
        for axes, (case, rows) in zip(grid, by_case.items(), strict=True):
            _draw_case(axes, case, rows)


def _draw_case(axes: Any, case: str, rows: list[Row]) -> None:
    from matplotlib.ticker import FuncFormatter

    sizes = sorted({row.bytes for row in rows})
    for panel, unit in zip(axes, _PANELS, strict=True):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45, ha="right")
        panel.minorticks_off()
        panel.set_title(case.replace(".", " "), loc="left")
        panel.set_xlabel("size of one operation, bytes")
        panel.set_ylabel(unit)
        panel.grid(True, color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 1e6:,.9g}"))
    axes[2].axhline(1.0, color="black", linewidth=0.8)
    highest = max((row.ratio_to_limit or 0.0 for row in rows), default=1.0)
    axes[2].set_ylim(0, min(2.5, max(1.25, 1.1 * highest)))
    for system in dict.fromkeys(row.system for row in rows):
        look = _STYLES.get(system, _OTHER)
        mine = sorted((row for row in rows if row.system == system), key=lambda row: row.bytes)
        figures = (
            [(row.bytes, row.seconds_median) for row in mine],
            [(row.bytes, row.gb_per_s) for row in mine],
            [(row.bytes, row.ratio_to_limit) for row in mine],
        )
        label = f"{system} (limit)" if system in LIMITS.values() else system
        for panel, points in zip(axes, figures, strict=True):
            known = [(x, y) for x, y in points if y is not None]
            if known:
                panel.plot(*zip(*known, strict=True), label=label, **look)
        bands = [(row.bytes, *row.ratio_interval) for row in mine if row.ratio_interval is not None]
        if bands and system in _OWN:
            band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            axes[2].fill_between(*zip(*bands, strict=True), **band)

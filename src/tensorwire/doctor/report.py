"""An examination for people: tables for the terminal. It decides nothing and hides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorwire.bench.report import new_table
from tensorwire.bench.rows import Row, format_seconds, format_size
from tensorwire.doctor.advice import NOTE, OK, WARNING, Finding, Link, Route
from tensorwire.doctor.examine import Examination
from tensorwire.doctor.facts import Facts
from tensorwire.doctor.measure import LARGE_BYTES, OWN, RAW

_STYLES = {OK: "green", NOTE: "yellow", WARNING: "bold red"}


def print_examination(found: Examination, console: Console) -> None:
    """Machines, paths, figures, findings and a last line that says it all."""
    console.print(_machine_line("here", found.here), soft_wrap=True)
    if found.there is not None and found.address:
        console.print(_machine_line("there", found.there), soft_wrap=True)
    if found.link is not None:
        console.print(routes_table(found.link))
    if any(row.measured for row in found.rows):
        console.print(figures_table(found.rows, found.link))
    if found.findings:
        console.print(findings_table(found.findings))
    if found.interrupted:
        console.print(Text("interrupted: what is known so far", style="yellow"))
    console.print(summary(found), soft_wrap=True)


def _machine_line(side: str, facts: Facts) -> Text:
    parts = [facts.host, f"{facts.cpu.model or 'unknown processor'}, {facts.cpu.usable} cores",
             f"Linux {facts.kernel}", f"Python {facts.python}",
             f"tensorwire {facts.tensorwire}"]  # fmt: skip
    return Text(f"{side:6}" + " · ".join(parts), style="dim")


def routes_table(link: Link) -> Table:
    """Which paths there are, which one is taken, and why."""
    table = new_table("paths")
    table.add_column("path", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("because", overflow="fold")
    for route in link.routes:
        state, reason = _route(route, link)
        table.add_row(route.name, state, Text(reason))
    return table


def _route(route: Route, link: Link) -> tuple[Text, str]:
    if route.name == link.chosen:
        return Text("chosen", style="green"), link.reason
    if route.reached:
        return Text("possible"), ""
    return Text("no", style="yellow"), route.reason


def figures_table(rows: Sequence[Row], link: Link | None) -> Table:
    """One line per case, the limit beside it."""
    table = new_table("measured")
    table.add_column("path", no_wrap=True)
    table.add_column("case", no_wrap=True)
    headings = ["size", "median", "p99", "GB/s", "limit", "of limit"]
    paths = {row.case.partition(".")[0] for row in rows}
    promised = {path: link.promised_gb_per_s(path) if link else None for path in paths}
    if any(promised.values()):
        headings.append("of promise")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if row.system != OWN or not row.measured:
            continue
        path, _, action = row.case.partition(".")
        if previous not in (None, path):
            table.add_section()
        beside = next(
            (r for r in rows if (r.case, r.bytes) == (row.case, row.bytes) and r.system != OWN),
            None,
        )
        large = row.bytes >= LARGE_BYTES
        cells = [
            path if path != previous else "",
            {"signal": "round trip"}.get(action, action),
            format_size(row.bytes),
            format_seconds(row.seconds_median),
            format_seconds(row.seconds_p99),
            _bandwidth(row) if large else "–",
            _limit(beside, large),
            f"{row.ratio_to_limit:.2f}" if row.ratio_to_limit is not None else "–",
            _of_promise(row, promised[path] if large else None),
        ]
        table.add_row(*cells[: len(headings) + 2])
        previous = path
    return table


def _bandwidth(row: Row) -> str:
    return "–" if row.gb_per_s is None else f"{row.gb_per_s:.3g}"


def _limit(row: Row | None, large: bool) -> str:
    if row is None:
        return "–"
    name = {RAW: "socket"}.get(row.system, row.system)
    return f"{name} {_bandwidth(row) if large else format_seconds(row.seconds_median)}"


def _of_promise(row: Row, promised: float | None) -> str:
    if promised is None or row.gb_per_s is None:
        return "–"
    return f"{row.gb_per_s / promised:.0%}"


def findings_table(findings: Iterable[Finding]) -> Table:
    """The level is a word too, so it reads without colour. A remedy has a line of its own."""
    table = new_table("findings")
    table.show_header = False
    table.add_column("level", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        # Text, because a remedy may have brackets, which are not markup.
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="cyan")
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, Text(finding.subject, style="bold"), text)
    return table


def summary(found: Examination) -> Text:
    """The result in one line."""
    counts = {level: sum(f.level == level for f in found.findings) for level in (WARNING, NOTE)}
    said = [
        f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts.items() if count
    ]
    if found.failure:
        where = found.address or "this machine"
        return Text(f"{where} was not examined: {found.failure}", style="bold red")
    if counts[WARNING]:
        return Text(", ".join(said), style="bold red")
    return Text(", ".join(["nothing is wrong", *said]), style="green")

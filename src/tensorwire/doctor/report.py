"""Prints an examination as tables for the terminal; it decides nothing and hides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorwire.bench.operations import PYTHON, RAW
from tensorwire.bench.report import add_groups, new_table, shown
from tensorwire.bench.rows import Row, format_seconds, format_size
from tensorwire.doctor.advice import NOTE, OK, WARNING, Finding, LinkFacts
from tensorwire.doctor.examine import Examination
from tensorwire.doctor.facts import Facts
from tensorwire.doctor.measure import LARGE_BYTES

_STYLES = {OK: "green", NOTE: "yellow", WARNING: "bold red"}


def print_examination(found: Examination, console: Console) -> None:
    """Prints machines, paths, figures, findings and a last line with the summary."""
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
    parts = (
        facts.host, f"{facts.cpu.model or 'unknown processor'}, {facts.cpu.usable} cores",
        f"Linux {facts.kernel}", f"Python {facts.python}", f"tensorwire {facts.tensorwire}",
    )  # fmt: skip
    return Text(f"{side:6}" + " · ".join(parts), style="dim")


def routes_table(link: LinkFacts) -> Table:
    """Returns a table of the paths: which can be had, which is taken, and why."""
    table = new_table("paths", "path", "state")
    table.add_column("because", overflow="fold")
    for route in link.routes:
        state, reason = Text("no", style="yellow"), route.reason
        if route.name == link.chosen:
            state, reason = Text("chosen", style="green"), link.reason
        elif route.reached:
            state, reason = Text("possible"), ""
        table.add_row(route.name, state, Text(reason))
    return table


def figures_table(rows: Sequence[Row], link: LinkFacts | None) -> Table:
    """Returns a table with one line per case, beside its limit."""
    headings = ["path", "case", ">size", ">median", ">p99", ">GB/s", ">limit", ">of limit"]
    paths = {row.case.partition(".")[0] for row in rows}
    promised = {path: link.promised_gb_per_s(path) if link else None for path in paths}
    if any(promised.values()):
        headings.append(">of promise")
    limits = {(row.case, row.bytes): row for row in rows if row.system != PYTHON}
    lines = []
    for row in rows:
        if row.system != PYTHON or not row.measured:
            continue
        path, _, action = row.case.partition(".")
        share = None
        if row.bytes >= LARGE_BYTES and row.gb_per_s is not None and promised[path]:
            share = row.gb_per_s / (promised[path] or 1.0)
        cells = [
            path,
            "round trip" if action == "signal" else action,
            format_size(row.bytes),
            format_seconds(row.seconds_median),
            format_seconds(row.seconds_p99),
            _bandwidth(row),
            _limit(limits.get((row.case, row.bytes))),
            shown(row.ratio_to_limit, ".2f"),
            shown(share, ".0%"),
        ]
        lines.append(cells[: len(headings)])
    table = new_table("measured", *headings)
    add_groups(table, lines)
    return table


def _bandwidth(row: Row) -> str:
    return shown(row.gb_per_s if row.bytes >= LARGE_BYTES else None, ".3g")


def _limit(row: Row | None) -> str:
    if row is None:
        return "–"
    figure = _bandwidth(row) if row.bytes >= LARGE_BYTES else format_seconds(row.seconds_median)
    return f"{'socket' if row.system == RAW else row.system} {figure}"


def findings_table(findings: Iterable[Finding]) -> Table:
    """Returns a table of findings.

    The level is a word too, so it reads without colour. A remedy has a line of its own.
    """
    table = new_table("findings", "level", "what", show_header=False)
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
    """Returns the result in one line."""
    if found.failure:
        where = found.address or "this machine"
        return Text(f"{where} was not examined: {found.failure}", style="bold red")
    levels = [finding.level for finding in found.findings]
    counts = [(levels.count(level), level) for level in (WARNING, NOTE) if level in levels]
    said = ", ".join(f"{count} {level}{'s' if count != 1 else ''}" for count, level in counts)
    if WARNING in levels:
        return Text(said, style="bold red")
    return Text(f"nothing is wrong, {said}" if said else "nothing is wrong", style="green")

"""`tensorwire info`: what this machine can do, what is missing, and the remedy."""

from __future__ import annotations

import json

import click
from rich import box
from rich.table import Table
from rich.text import Text

from tensorwire.bench import machine
from tensorwire.command import Command, terminal
from tensorwire.doctor.advice import MISSING, NOTE, OK, WARNING, Finding
from tensorwire.doctor.inventory import look

_PARTLY = ("partly", "yellow")
_STATES = {OK: ("yes", "green"), NOTE: _PARTLY, WARNING: _PARTLY, MISSING: ("no", "red")}
"""The name of each level here, and its colour."""


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(as_json: bool) -> None:
    """Show what this machine can do and what is missing.

    Looks at transports, packages, limits and load; changes nothing. Exits with 1 if neither shared
    memory nor TCP can be used.

    \b
    For a person:
        tensorwire info

    \b
    For a script:
        tensorwire info --json
    """  # noqa: D301 (\b is what click reads)
    found = look()
    if as_json:
        findings = [
            {"subject": each.subject, "state": _STATES[each.level][0], "detail": each.text,
             "remedy": each.remedy}
            for each in found
        ]  # fmt: skip
        click.echo(json.dumps({"findings": findings, "machine": machine.describe()}, indent=1))
    else:
        terminal().print(_table(found))
    usable = {finding.subject for finding in found if finding.level != MISSING}
    if not {"shm", "tcp"} & usable:
        raise SystemExit(1)


def _table(found: list[Finding]) -> Table:
    """Returns the findings as a table; the state is a word too, so it reads without colour."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("what", style="bold", no_wrap=True)
    shown.add_column("here", no_wrap=True)
    shown.add_column("found", overflow="fold")
    shown.add_column("remedy", overflow="fold")
    for finding in found:
        state, style = _STATES[finding.level]
        # Text, because a remedy such as tensorwire[torch] is not markup.
        remedy = Text(finding.remedy)
        shown.add_row(finding.subject, Text(state, style=style), Text(finding.text), remedy)
    return shown

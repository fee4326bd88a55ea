"""`tensorwire info`: what this machine can do, what is missing, and the remedy."""

from __future__ import annotations

import dataclasses
import json

import click
from rich import box
from rich.table import Table
from rich.text import Text

from tensorwire.bench import machine
from tensorwire.command import Command, terminal
from tensorwire.doctor.inventory import MISSING, OK, PART, Finding, look

_STYLES = {OK: "green", PART: "yellow", MISSING: "red"}


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(as_json: bool) -> None:
    """What can this machine do, and what is missing?

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
        data = {
            "findings": [dataclasses.asdict(finding) for finding in found],
            "machine": machine.describe(),
        }
        click.echo(json.dumps(data, indent=1))
    else:
        terminal().print(table(found))
    usable = {finding.subject for finding in found if finding.state != MISSING}
    if not {"shm", "tcp"} & usable:
        raise SystemExit(1)


def table(found: list[Finding]) -> Table:
    """The findings as a coloured table; the state is a word too, so it reads without colour."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("what", style="bold", no_wrap=True)
    shown.add_column("here", no_wrap=True)
    shown.add_column("found", overflow="fold")
    shown.add_column("remedy", overflow="fold")
    for finding in found:
        state = Text(finding.state, style=_STYLES[finding.state])
        # Text, because a remedy such as tensorwire[torch] is not markup.
        shown.add_row(finding.subject, state, Text(finding.detail), Text(finding.remedy))
    return shown

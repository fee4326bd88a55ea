"""`tensorwire doctor`: is this machine, or the way to that peer, as fast as it should be?"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import click
from rich import box
from rich.table import Table
from rich.text import Text

from tensorwire.aside import put_output_aside
from tensorwire.bench import machine
from tensorwire.bench.commands import json_option
from tensorwire.bench.rows import write_json
from tensorwire.command import Command, bare_address, check_file, terminal, with_bar
from tensorwire.doctor.advice import MISSING, NOTE, OK, WARNING, Finding
from tensorwire.errors import TensorwireError

DEFAULT_LISTEN = "127.0.0.1:0"
_PARTLY = ("partly", "yellow")
_STATES = {OK: ("yes", "green"), NOTE: _PARTLY, WARNING: _PARTLY, MISSING: ("no", "red")}
"""The name of each level in `--quick`, and its colour."""


@click.command(cls=Command)
@click.argument("address", required=False)
@click.option(
    "--quick",
    is_flag=True,
    help="Look at what this machine has and what is missing; measure nothing.",
)
@click.option(
    "--serve", is_flag=True, help="Be the other end: help others to measure, until Ctrl-C."
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help=f"Where --serve listens (default {DEFAULT_LISTEN}: this host only, a free port). Other "
    "hosts need an address that they reach, and a secret.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 600),
    help="Time for the figures (default 4 alone, 8 with a peer); more for a slow network.",
)
@json_option("Write rows, facts of both machines and findings to FILE.")
def doctor(
    address: str | None,
    quick: bool,
    serve: bool,
    listen: str | None,
    seconds: float | None,
    json_path: Path | None,
) -> None:
    """Is this machine as fast as it should be? Is the way to a peer?

    Alone it looks at what this machine has (cores, shared memory, interfaces, TCP, RDMA) and
    measures shared memory and TCP with a second process of its own. With the ADDRESS of a peer it
    measures every path that both ends have, beside a raw socket or memcpy, compares with what the
    devices promise, and says why a path is chosen and what to do.

    \b
    This machine:
        tensorwire doctor

    \b
    What it can do and what is missing, in a second; exits with 1 if it has neither shm nor tcp:
        tensorwire doctor --quick

    \b
    The way between two hosts, both with the same secret:
        host-a$ head -c 32 /dev/urandom | base64 > secret   # and copy it to host-b
        host-a$ TENSORWIRE_SECRET_FILE=secret tensorwire doctor --serve --listen 10.0.0.1:7000
        host-b$ TENSORWIRE_SECRET_FILE=secret tensorwire doctor 10.0.0.1:7000

    ADDRESS may be any running Node with the same secret, or a server of a job (of this user and
    host: its secret is found): then a little is measured, gently.
    Exits with 0 if nothing is wrong, 1 with a warning, 2 if the peer is not reached.
    """  # noqa: D301 (\b is what click reads)
    if quick and (serve or address is not None or seconds is not None):
        raise click.UsageError("--quick measures nothing: no ADDRESS, --serve or --seconds with it")
    if serve:
        if address is not None:
            raise click.UsageError("--serve waits for others; it takes no ADDRESS, but --listen")
        if json_path is not None or seconds is not None:
            raise click.UsageError("--json and --seconds belong to the measuring end")
        _serve(listen or DEFAULT_LISTEN)
        return
    if listen is not None:
        raise click.UsageError("--listen belongs to --serve")
    check_file(json_path)
    if quick:
        raise SystemExit(_look(json_path))
    raise SystemExit(_examine(address, seconds, json_path))


def _examine(address: str | None, seconds: float | None, json_path: Path | None) -> int:
    from tensorwire.doctor.examine import examine_machine, examine_peer
    from tensorwire.doctor.measure import Effort
    from tensorwire.doctor.report import print_examination

    effort = None if seconds is None else Effort(seconds=seconds)
    console = terminal(120)
    examine = examine_machine if address is None else partial(examine_peer, bare_address(address))
    try:
        found = with_bar(
            lambda told: examine(effort, lambda share, text: told(share, 1.0, text)), console
        )
    except (ValueError, MemoryError, TensorwireError) as error:
        click.echo(f"Error: {error}", err=True)
        return 2
    if json_path is not None:
        write_json(json_path, found.to_json())
    print_examination(found, console)
    if json_path is not None:
        click.echo(f"rows written to {json_path}")
    return found.exit_code


def _look(json_path: Path | None) -> int:
    from tensorwire.doctor.inventory import look

    found = look()
    terminal().print(_table(found))
    if json_path is not None:
        findings = [
            {
                "subject": each.subject,
                "state": _STATES[each.level][0],
                "detail": each.text,
                "remedy": each.remedy,
            }
            for each in found
        ]
        write_json(json_path, {"findings": findings, "machine": machine.describe()})
        click.echo(f"findings written to {json_path}")
    usable = {finding.subject for finding in found if finding.level != MISSING}
    return 0 if {"shm", "tcp"} & usable else 1


def _table(found: list[Finding]) -> Table:
    """Returns the findings as a coloured table; the state is a word too, for reading without."""
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


def _serve(listen: str) -> None:
    from tensorwire.doctor.serve import Doctor

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    put_output_aside()
    try:
        doctor = Doctor(listen, say=lambda line: click.echo(line))
    except (ValueError, TensorwireError) as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(2) from error
    try:
        click.echo(f"at the other end: tensorwire doctor {doctor.address}")
        if listen == DEFAULT_LISTEN:
            click.echo("from this host only; for others --listen HOST:PORT and a secret (--help)")
        click.echo("Ctrl-C ends this")
        doctor.run()
    except KeyboardInterrupt:
        click.echo("ended")
    finally:
        doctor.close()

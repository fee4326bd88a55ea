"""`tensorwire rpc trace`: shows the messages of a program's RPCs, and their possible gain."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from tensorwire.bench.commands import json_option
from tensorwire.bench.rows import write_json
from tensorwire.command import Command, check_file
from tensorwire.rpctrace.drawing import show_trace
from tensorwire.rpctrace.figures import read_trace
from tensorwire.rpctrace.runner import run_traced


@click.group(short_help="See what the RPCs of a gRPC program carry.")
def rpc() -> None:
    """Look at programs of gRPC; tensorwire.rpc itself is a library (docs/rpc.md)."""


@rpc.command(
    cls=Command,
    short_help="Run a program and show sizes, ways and times of its RPCs.",
    context_settings={"allow_interspersed_args": False},
)
@json_option("Also write the figures there.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def trace(command: tuple[str, ...], json_path: Path | None) -> None:
    """Run COMMAND and show, when it has ended, what its RPCs carried.

    The program need not know of tensorwire: all that uses grpcio is seen, synchronous or asyncio,
    as client and as server, in COMMAND and the Python processes that it starts. For each method:
    calls and their times, messages and their sizes, whether their payload travelled in them (grpc),
    beside them (shm, tcp), was sent again in them after it had been refused (again), or travelled
    in frames of tensorwire's own runtime (runtime).

    \b
    A client:
        tensorwire rpc trace -- python client.py --lr 0.1

    \b
    A server, which is ended with Ctrl-C, with the figures for a program:
        tensorwire rpc trace --json figures.json -- python server.py

    \b
    A test run, a server and its clients at once:
        tensorwire rpc trace -- pytest tests/e2e

    The tables go to stderr. Input, output, signals and the exit code are the command's; 128 + n if
    signal n killed it. A call costs some 10 µs more at each end. A process that is killed loses
    nothing but the calls that had not ended.

    Not seen: Python with -I, -E or another PYTHONPATH, and gRPC of other languages.
    """  # noqa: D301 (\b is what click reads)
    check_file(json_path)
    with tempfile.TemporaryDirectory(
        prefix="tensorwire-rpc-trace-", ignore_cleanup_errors=True
    ) as folder:
        try:
            code = run_traced(command, folder)
        except OSError as error:
            click.echo(f"cannot run {command[0]}: {error.strerror}", err=True)
            raise SystemExit(127 if isinstance(error, FileNotFoundError) else 126) from error
        found = read_trace(Path(folder))
    if json_path is not None:
        write_json(json_path, found.to_json())
    show_trace(found, Console(stderr=True, width=None if sys.stderr.isatty() else 140))
    if json_path is not None:
        click.echo(f"figures written to {json_path}", err=True)
    raise SystemExit(code)

"""Defines the base of all subcommands, which checks their options, and their terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from tensorwire.errors import UnavailableError

R = TypeVar("R")

Told = Callable[[float, float, str], None]
"""A function that is called with the amount done, the whole amount, and a label."""


class Command(click.Command):
    """A command whose options with one value may be given once: of two, one would be ignored.

    Attributes:
        shows_errors: an UnavailableError may come from a script, whose traceback is to be seen.
        renamed: options that there were until 0.1.0, each with the new one that its error names.
    """

    shows_errors = False
    renamed: ClassVar[dict[str, str]] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        try:
            self.check(ctx, args)
        except click.NoSuchOption as error:
            if (new := self.renamed.get(error.option_name)) is None:
                raise
            raise click.UsageError(f"{error.option_name} is now {new}", ctx) from None
        return super().parse_args(ctx, args)

    def check(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Checks the arguments before click converts them.

        Returns:
            The positional ones; where options end at the first of them, with all that follows it.

        Raises:
            click.UsageError: they make no sense.
        """
        values, _, order = self.make_parser(ctx).parse_args(list(args))
        for option in self.params:
            if isinstance(option, click.Option) and not (option.multiple or option.is_flag):
                if sum(each is option for each in order) > 1:
                    raise click.UsageError(f"{option.opts[0]} is given twice", ctx)
        found: list[str] = []
        for argument in self.params:
            value = values.get(argument.name) if isinstance(argument, click.Argument) else None
            if isinstance(value, str):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found.extend(map(str, value))
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command as click does; a missing dependency becomes an error with its remedy."""
        try:
            return super().invoke(ctx)
        except UnavailableError as error:
            if self.shows_errors:
                raise
            raise click.ClickException(str(error)) from error


def bare_address(address: str) -> str:
    """Returns HOST:PORT of an address, which may be written as tw://HOST:PORT/, as for files."""
    return address.removeprefix("tw://").rstrip("/")


def own_command() -> str:
    """Returns the command that started this process, for a message that says how to repeat it."""
    by_module = os.path.basename(sys.argv[0]) == "__main__.py"
    program = [sys.executable, "-m", "tensorwire"] if by_module else ["tensorwire"]
    return shlex.join([*program, *sys.argv[1:]])


def terminal(width: int = 110) -> Console:
    """Returns the console for tables; a file or pipe has no width of its own, so it gets one."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def with_bar(run: Callable[[Told], R], console: Console, *columns: ProgressColumn) -> R:
    """Calls `run` with a function that moves a progress bar, and returns its result.

    The bar has these columns beside its label. It is redrawn only when the function is called, so
    that it disturbs no measurement.
    """
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn())
    with Progress(*shown, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: float, total: float, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{label:34}", refresh=True)

        return run(show)


def check_file(path: Path | None) -> None:
    """Checks that a file can be written, before the work whose result it will hold.

    Raises:
        click.BadParameter: its folder does not exist, or it is a folder, a device or a pipe, which
            a file that takes its place in one step would remove.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise click.BadParameter(f"the folder of {path} does not exist")
    folder = path.parent.resolve()
    special = folder == Path("/dev") or folder.is_relative_to("/proc")  # as /dev/stdout, /dev/fd/1
    if special or (path.exists() and not path.is_file()):
        raise click.BadParameter(f"{path} is no file; name one in a folder, and read it from there")

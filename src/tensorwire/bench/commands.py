"""Defines the options that all bench commands share: lists, files of results, a bar.

A bench's command chooses settings and hands its `run` to `carry_out`; it is in `cli/bench.py`, or
in the repository's `benchmarks`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn

from tensorwire.bench.report import print_report
from tensorwire.bench.rows import Report, parse_size
from tensorwire.command import Told, check_file, terminal, with_bar
from tensorwire.errors import TensorwireError

_FILE = click.Path(dir_okay=False, path_type=Path)
_FIGURES = (".svg", ".pdf", ".png")

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
S = TypeVar("S")


def _list_option(flags: Sequence[str], read: Callable[[str], Any], help: str) -> Decorator:
    """Returns an option with comma-separated lists, which add up where it is given several times.

    Its value is None if it is not given. `read` makes a value of each word, or raises ValueError.
    """

    def join(
        ctx: click.Context, param: click.Parameter, lists: tuple[str, ...]
    ) -> tuple[Any, ...] | None:
        try:
            joined = tuple(read(word.strip()) for text in lists for word in text.split(","))
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
        if twice := [each for each in joined if joined.count(each) > 1]:
            raise click.BadParameter(f"{twice[0]} is named twice", ctx, param)
        return joined or None

    return click.option(*flags, multiple=True, callback=join, metavar="A,B", help=help)


def names(*flags: str, known: Sequence[str], help: str = "") -> Decorator:
    """Returns an option that takes some of the known words; the usual help lists them."""

    def read(word: str) -> str:
        if word not in known:
            raise ValueError(f"{word!r} is unknown; choose from {', '.join(known)}")
        return word

    return _list_option(flags, read, help or f"Only these: {', '.join(known)}.")


def sizes(*flags: str, help: str) -> Decorator:
    """Returns an option that takes sizes such as 64KiB, in bytes."""
    return _list_option(flags, parse_size, help)


def json_option(help: str = "Write all rows, the machine and the verdicts to FILE.") -> Decorator:
    """Returns the option that names a file of results; the parameter is `json_path`."""
    return click.option("--json", "json_path", type=_FILE, metavar="FILE", help=help)


def together(*options: Decorator) -> Decorator:
    """Returns several options as one."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_STRICT = click.option("--strict", is_flag=True, help="Exit with 1 if a measured bar is missed.")
plain_outputs = together(json_option(), _STRICT)
"""The options of a bench that has bars, by the parameters' names in `carry_out`."""
outputs = together(
    json_option(),
    click.option(
        "--figure", "figure_path", type=_FILE, metavar="FILE",
        help="Draw a figure; .svg, .pdf or .png.",
    ),
    _STRICT,
)  # fmt: skip
"""The options of a bench that draws a figure too."""


def quick_option(help: str) -> Decorator:
    """Returns the option for a look in place of a measurement."""
    return click.option("--quick", is_flag=True, help=help)


def need(module: str, extra: str) -> None:
    """Raises ClickException if a module is not installed; `extra` of tensorwire has it."""
    if importlib.util.find_spec(module) is None:
        raise click.ClickException(f"this bench needs {module}: pip install 'tensorwire[{extra}]'")


def chosen(settings: S, **options: Any) -> S:
    """Returns the settings with those options that were given, which are not None."""
    given = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(settings, **given)  # type: ignore[type-var]


def carry_out(
    run: Callable[[Told], Report],
    show: Callable[[Report, Console], None] = print_report,
    draw: Callable[[Report, Path], None] | None = None,
    *,
    json_path: Path | None = None,
    figure_path: Path | None = None,
    strict: bool = False,
) -> Report:
    """Runs a bench with a bar, shows its report, keeps it, and ends with its exit code.

    Mistakes that would fail after the run are reported before it.
    """
    check_file(json_path)
    _check_figure(figure_path, json_path)
    console = terminal()
    report = with_bar(run, console, MofNCompleteColumn())
    show(report, console)
    if json_path is not None:
        report.write(json_path)
        click.echo(f"rows written to {json_path}")
    if figure_path is not None and draw is not None:
        try:
            draw(report, figure_path)
        except (TensorwireError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"figure written to {figure_path}")
    if report.settings["interrupted"]:
        raise SystemExit(130)
    if strict and any(verdict.met is False for verdict in report.verdicts):
        raise SystemExit(1)
    return report


def _check_figure(figure_path: Path | None, json_path: Path | None) -> None:
    check_file(figure_path)
    if figure_path is None:
        return
    if figure_path.suffix.lower() not in _FIGURES:
        raise click.BadParameter(f"{figure_path} is no figure; it ends with {', '.join(_FIGURES)}")
    if figure_path == json_path:
        raise click.UsageError(f"--json and --figure both name {json_path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("a figure needs matplotlib: pip install 'tensorwire[bench]'")

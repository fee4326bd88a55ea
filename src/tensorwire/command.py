"""What every subcommand does with its options: none is ignored, and none is taken twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tensorwire.errors import UnavailableError


class Command(click.Command):
    """A command whose options with one value may be given once: of two, one would be ignored.

    Attributes:
        shows_errors: an UnavailableError may be a script's, whose traceback is to be seen.
    """

    shows_errors = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        self.check(ctx, args)
        return super().parse_args(ctx, args)

    def check(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Looks at the arguments before click converts them.

        Returns:
            The positional ones, with everything behind the first where options end there.

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
        """See click. What is missing here is an error with its remedy, and no traceback."""
        try:
            return super().invoke(ctx)
        except UnavailableError as error:
            if self.shows_errors:
                raise
            raise click.ClickException(str(error)) from error


def check_file(path: Path | None) -> None:
    """Whether a file can be written, before the work whose result it is to hold.

    Raises:
        click.BadParameter: its folder does not exist, or it is a folder.
    """
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"the folder of {path} does not exist")

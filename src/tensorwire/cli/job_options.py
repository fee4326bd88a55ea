"""Defines the options that `tensorwire run` and `tensorwire serve` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Decorated = Callable[..., None]


def _names(ctx: click.Context, option: click.Parameter, value: str | None) -> Any:
    return None if value is None else tuple(name.strip() for name in value.split(","))


def job_options(command: Decorated) -> Decorated:
    """Adds the options, whose values have the names of `JobSpec`'s fields."""
    for option in (
        click.option("--no-prefix", is_flag=True, help="Lines without the name of their process."),
        click.option(
            "--silence",
            "silence_s",
            type=float,
            default=10.0,
            metavar="SECONDS",
            help="How long a process may be stopped before it is killed (default 10; 0: for ever).",
        ),
        click.option(
            "--import",
            "imports",
            multiple=True,
            metavar="MODULE",
            help="Servers import MODULE, for optimizers whose classes are in it.",
        ),
        click.option(
            "--transports",
            callback=_names,
            metavar="A,B",
            help="Which may be used, of shm, rdma and tcp (default all).",
        ),
        click.option(
            "--slices",
            type=int,
            metavar="L",
            help="Slices of a step, a multiple of W; results depend on L, not on W (default W).",
        ),
    ):
        command = option(command)
    return command

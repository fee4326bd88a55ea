"""`tensorwire run`: starts the processes of a job on this host and supervises them."""

from __future__ import annotations

from typing import Any

import click

from tensorwire import launch
from tensorwire.command import Command, own_command
from tensorwire.errors import UnavailableError

from .job_options import job_options


class _Run(Command):
    """The `run` command, which explains that an option after the script belongs to the script."""

    renamed = {  # noqa: RUF012
        "--durable": "--on-death restart",
        "--no-durable": "--on-death end",
        "--restarts": "--on-death restart:N",
        "--restart-workers": "--on-death restart",
        "--no-restart-workers": "--on-death takeover",
        "--elastic": "--workers W:MAX",
        "--shares": "--servers S:MAX",
    }

    def check(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `Command`."""
        rest = super().check(ctx, args)
        own = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        before = args[: len(args) - len(rest)]
        if not any(
            arg.partition("=")[0] in ("-w", "--workers") or arg[:2] == "-w" for arg in before
        ):
            behind = next((arg for arg in rest if arg.partition("=")[0] in own - {"-m"}), None)
            if behind is not None:
                text = f"{behind} stands after the script, which gets it; put it before {rest[0]}"
                raise click.UsageError(text, ctx)
        return rest


def _count(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int | None]:
    """Returns a number of processes and the most that there can be, of "2" or "2:4"."""
    first, colon, most = value.partition(":")
    try:
        found = int(first), int(most) if colon else None
    except ValueError:
        text = f"{value!r} is not a number, or two numbers as in 2:4"
        raise click.BadParameter(text) from None
    if found[1] is not None and found[1] < found[0]:
        raise click.BadParameter(
            f"{value} starts {found[0]} processes, above its maximum, {found[1]}: write the "
            "smaller number first"
        )
    return found


def _death(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any]:
    """Returns the fields of `JobSpec` for the consequence of a death."""
    what, colon, count = (value or "").partition(":")
    known = {"": {}, "end": {"durable": False}, "restart": {"durable": True}}
    found: dict[str, Any] | None = {**known, "takeover": {"restart_workers": False}}.get(what)
    if found is None:
        raise click.BadParameter(f"{value!r} is unknown; choose restart, takeover or end")
    if colon and what in ("", "end"):
        raise click.BadParameter(f"{value!r}: only restart and takeover take a number of deaths")
    try:
        return {**found, "restarts": int(count)} if colon else found
    except ValueError:
        text = f"{count!r} is not a number of deaths, as in {what}:3"
        raise click.BadParameter(text) from None


# Options end at the script: what follows is the script's own.
@click.command(
    cls=_Run,
    short_help="Run a training script on workers and servers of this host.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--workers",
    "-w",
    callback=_count,
    required=True,
    metavar="W[:MAX]",
    help="Processes that run the script; with MAX, `tensorwire scale` can change their number.",
)
@click.option(
    "--servers",
    "-s",
    callback=_count,
    default="1",
    metavar="S[:MAX]",
    help="Processes that keep the parameters (default 1); with MAX, as for workers.",
)
@click.option("--rebalance", is_flag=True, help="Parameters move away from a slow server.")
@click.option(
    "--on-death",
    callback=_death,
    metavar="WHAT[:N]",
    help="A killed process is restarted (restart, the default where possible), others compute a "
    "killed worker's slices (takeover), or the job ends (end). It also ends after more than N "
    "deaths in a row without a step (3).",
)
@job_options
@click.option(
    "--file-workers",
    type=int,
    default=0,
    metavar="N",
    help="N more workers, whose gradients other programs write as files.",
)
@click.option(
    "--listen",
    default="127.0.0.1",
    metavar="HOST",
    help="Where the servers listen (default 127.0.0.1: this host only).",
)
@click.option("--full-tracebacks", is_flag=True, help="Each worker prints its whole traceback.")
@click.option("-m", "module", is_flag=True, help="The script is the name of a module.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: tuple[int, int | None],
    servers: tuple[int, int | None],
    on_death: dict[str, Any],
    no_prefix: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a training script on W workers and S parameter servers of this host.

    \b
        tensorwire run --workers 2 train.py
        tensorwire run -w 4 -s 2 train.py --lr 0.1     its own options follow it

    The first process that fails ends the job, which exits with its code. Ctrl-C ends it in order, a
    second one at once. docs/launch.md and docs/fault-tolerance.md have more.
    """  # noqa: D301 (\b is what click reads)
    (options["workers"], most), (options["servers"], options["shares"]) = workers, servers
    options |= on_death
    if most is not None:
        if options.get("durable"):
            raise click.UsageError(
                "--workers W:MAX means --on-death takeover: other workers compute the slices of "
                "one that is killed"
            )
        if options["slices"] not in (None, most):
            raise click.UsageError(f"--workers W:{most} means {most} slices: leave --slices out")
        options |= {"slices": most, "restart_workers": False}
    try:
        job = launch.JobSpec(
            ("-m", script, *arguments) if module else (script, *arguments), **options
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        code = launch.run(job, prefix=not no_prefix, command=own_command())
    except UnavailableError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)

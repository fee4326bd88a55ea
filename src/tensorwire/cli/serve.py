"""`tensorwire serve`: runs the servers of a job whose workers something else starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tensorwire.command import Command, own_command
from tensorwire.errors import UnavailableError
from tensorwire.launch import RETURN_S, ServeSupervisor, serve_spec

from .job_options import job_options


@click.command(cls=Command, short_help="Serve workers that torchrun or systemd restarts singly.")
@click.option(
    "--workers", "-w", type=int, required=True, metavar="W", help="Processes that will join."
)
@click.option(
    "--servers",
    "-s",
    type=int,
    default=1,
    metavar="S",
    help="Processes that keep the parameters and apply the gradients (default 1).",
)
@job_options
@click.option(
    "--restarts",
    type=int,
    default=3,
    metavar="N",
    help="Ends the job when a process dies once more after N deaths in a row without a step "
    "between them (default 3).",
)
@click.option(
    "--return-within",
    "return_s",
    type=float,
    default=RETURN_S,
    metavar="SECONDS",
    help="Ends the job when a worker that died is away for longer, or has not come so long after "
    f"the first one (default {RETURN_S:g}).",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Where workers join, the same at each start. Default: a new name in the user's runtime "
    "folder, which is printed.",
)
def serve(return_s: float, socket: Path | None, no_prefix: bool, **job: Any) -> None:
    """Run the parameter servers of a job on this host, for workers that something else starts.

    It runs no code of yours. It keeps the memory that outlives each process: a server that is
    killed is replaced, and a worker that is killed may come back when its own launcher starts it
    again. The others go on with the bits of the undisturbed run, as under `tensorwire run`.

    Workers find it by two variables, which count before RANK, WORLD_SIZE and those of any engine:
    TENSORWIRE_SUPERVISOR, the path that is printed or --socket, and TENSORWIRE_RANK, from 0. They
    may be started before it.

    \b
    Two workers, each with a torchrun of its own that restarts it alone:
        tensorwire serve --workers 2 --socket /run/user/1000/train &
        export TENSORWIRE_SUPERVISOR=/run/user/1000/train OMP_NUM_THREADS=2
        for rank in 0 1; do
            TENSORWIRE_RANK=$rank torchrun --standalone --max-restarts 3 train.py &
        done
        wait

    It exits with 0 when all workers have said goodbye. The job ends, with the reason, when a worker
    fails with an error, when one that died does not come back in time, when processes die again and
    again without a step between them, and when it is killed itself.
    docs/launchers.md has the details.
    """  # noqa: D301 (\b is what click reads)
    try:
        supervisor = ServeSupervisor(
            serve_spec(**job, options=sys.argv[2:]),  # of this process: `serve` is its first one
            socket=socket,
            return_s=return_s,
            prefix=not no_prefix,
            command=f"{own_command()}, and the workers again",
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        code = supervisor.run()
    except UnavailableError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)

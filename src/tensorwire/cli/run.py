"""`tensorwire run`: starts the processes of a job on this host and supervises them."""

from __future__ import annotations

import click

from tensorwire.command import Command, own_command
from tensorwire.errors import UnavailableError
from tensorwire.launch import JobSpec, supervisor_of


class _Run(Command):
    """The `run` command, which explains that an option after the script belongs to the script."""

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


# Options end at the script: what follows is the script's own.
@click.command(
    cls=_Run,
    short_help="Run a training script on workers and servers of this host.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--workers", "-w", type=int, required=True, metavar="W", help="Processes that run the script."
)
@click.option(
    "--servers",
    "-s",
    type=int,
    default=1,
    metavar="S",
    help="Processes that keep the parameters and apply the gradients (default 1).",
)
@click.option(
    "--slices",
    type=int,
    metavar="L",
    help="Slices of a training step, a multiple of W. The result depends on L and not on W: with "
    "the same L, 1, 2 or 4 workers compute the same bits.",
)
@click.option(
    "--transports",
    metavar="A,B",
    help="Which may be used, of shm, rdma and tcp. Default all; the fastest is taken.",
)
@click.option(
    "--listen",
    default="127.0.0.1",
    metavar="HOST",
    help="Where the servers listen (default 127.0.0.1: this host only).",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Lets the servers import MODULE and apply optimizers whose classes are in it. "
    "Without it they apply those of torch.optim, and worker 0 applies all others.",
)
@click.option(
    "--durable/--no-durable",
    default=None,
    help="Whether a server or worker that is killed, as by the kernel when memory runs out, is "
    "replaced by another process, which goes on with its memory; no step is lost. A worker's runs "
    "the script again, to where it was (docs/fault-tolerance.md). It needs shm among the "
    "transports and --listen on this host; there it is the default. With --no-durable any death "
    "ends the job, and servers need less time and memory.",
)
@click.option(
    "--restarts",
    type=int,
    default=3,
    metavar="N",
    help="Ends a durable job when a process dies once more after N deaths in a row without a step "
    "between them (default 3). What kills it each time would do so for ever.",
)
@click.option(
    "--silence",
    "silence_s",
    type=float,
    default=10.0,
    metavar="SECONDS",
    help="How long a process of a durable job may be stopped (SIGSTOP, a frozen cgroup) before it "
    "is killed and replaced (default 10; 0: it is waited for). One that computes is not silent.",
)
@click.option(
    "--restart-workers/--no-restart-workers",
    default=None,
    help="With --no-restart-workers a worker that is killed is not started again: those "
    "that live compute its slices too, from the same samples and random numbers, and the "
    "result has the same bits. Several may die, down to one. The script makes its steps from "
    "job.loader, with one optimizer per batch, and asks job.step_complete before what belongs to a "
    "step (docs/fault-tolerance.md). It needs what --durable needs.",
)
@click.option(
    "--elastic",
    is_flag=True,
    help="Lets `tensorwire scale` change the number of workers while the job runs, between 1 and "
    "L, which may then be any number from W up. Implies --no-restart-workers (docs/elastic.md).",
)
@click.option(
    "--file-workers",
    type=int,
    default=0,
    metavar="N",
    help="N more workers, with the last ranks, that run no script: programs of any language read "
    "the parameters and write gradients as files of the job (docs/files.md). Each has one slice.",
)
@click.option(
    "--shares",
    type=int,
    metavar="N",
    help="In how many shares the parameters are dealt, at least S. The number of servers can then "
    "be changed between 1 and N while the job runs: tensorwire scale --servers (docs/elastic.md). "
    "It needs what --durable needs. Default: each server keeps what it has.",
)
@click.option(
    "--rebalance",
    is_flag=True,
    help="Shares move by themselves from a server whose work takes longer than the others' for "
    "long. --shares is then 4 S by default.",
)
@click.option("--no-prefix", is_flag=True, help="Lines without the name of their process.")
@click.option(
    "--full-tracebacks",
    is_flag=True,
    help="Each worker prints its own traceback, whole. Default: that of the error that ended the "
    "job, shortened to your code, and a line for each other worker.",
)
@click.option("-m", "module", is_flag=True, help="The script is the name of a module.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int,
    servers: int,
    slices: int | None,
    transports: str | None,
    listen: str,
    imports: tuple[str, ...],
    durable: bool | None,
    restarts: int,
    silence_s: float,
    restart_workers: bool | None,
    elastic: bool,
    file_workers: int,
    shares: int | None,
    rebalance: bool,
    no_prefix: bool,
    full_tracebacks: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a training script on W workers and S parameter servers of this host.

    Every worker runs the same script; `tensorwire.torch` finds its rank and the servers in the
    environment. Lines are shown with the name of the process that printed them. On a terminal
    worker 0 prints directly, so progress bars work.

    \b
    Two workers and a server:
        tensorwire run --workers 2 train.py

    \b
    With the script's own options, which come after it:
        tensorwire run --workers 4 --servers 2 train.py --lr 0.1 --epochs 3

    \b
    A module instead of a file:
        tensorwire run --workers 2 -m mypackage.train --lr 0.1

    \b
    As if each process were on another machine:
        tensorwire run --workers 2 --transports tcp train.py

    The first process that fails ends the job, which exits with its code (128 + n if signal n
    killed it). Ctrl-C ends the job in order, a second one at once. Nothing is left running.
    """  # noqa: D301 (\b is what click reads)
    command = ("-m", script, *arguments) if module else (script, *arguments)
    if elastic and restart_workers:
        raise click.UsageError(
            "--elastic implies --no-restart-workers: leave --restart-workers out"
        )
    names = None
    if transports is not None:
        names = tuple(name.strip() for name in transports.split(","))
    try:
        job = JobSpec(
            command,
            workers,
            servers,
            slices,
            names,
            listen,
            full_tracebacks,
            imports,
            durable,
            restarts,
            silence_s,
            not elastic if restart_workers is None else restart_workers,
            file_workers,
            shares,
            rebalance,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        code = supervisor_of(job)(job, prefix=not no_prefix, command=own_command()).run()
    except UnavailableError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)

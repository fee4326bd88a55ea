"""`tensorwire bench`: the bench of memory, and the benches that only the repository has."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click

from tensorwire.bench import checkout
from tensorwire.bench.commands import carry_out, chosen, names, outputs, sizes
from tensorwire.bench.memory import CASES, SYSTEMS, WIRES, MemorySettings, run, wires_of
from tensorwire.bench.rows import Report
from tensorwire.command import Command
from tensorwire.errors import UnavailableError

_IN_REPOSITORY = {
    "training": "What does a synchronous training step cost?",
    "placement": "What does placing gradients gain, on real models?",
    "parameters": "What do optimizers, tables, links and other libraries' loops cost?",
    "faults": "Does a job whose processes are killed compute the same, and what does that cost?",
    "rpc": "What do large messages cost in gRPC, and what with tensorwire.rpc?",
    "modes": "What do the modes of a job gain, and what do they cost?",
    "files": "What does it cost to read a running job as files?",
    "gpu-training": "What does a step cost with the model on a GPU?",
}
"""The benches that only the repository has, with their questions, for help elsewhere."""


@click.group(short_help="Measure tensorwire beside the machine's limits and other libraries.")
def bench() -> None:
    """Measure tensorwire beside the machine's limits and beside other libraries."""
    # As Ctrl-C: processes that were started end too, and the rows so far are written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@bench.command(cls=Command)
@outputs
@click.option("--quick", is_flag=True, help="Few sizes and little time: a look, not a measurement.")
@names(
    "--systems",
    known=SYSTEMS,
    help=f"Only these: {', '.join(SYSTEMS)}. The limit of a system runs with it.",
)
@names("--cases", known=CASES, help=f"Only these: {', '.join(CASES)}.")
@sizes("--sizes", help="Sizes of write and read, for example 8,64KiB,16MiB.")
@names(
    "--wires",
    known=WIRES,
    help="shm and tcp if none is named; gpu: two processes that use one GPU, beside cuMemcpyAsync.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 600),
    help="Time for each case of tensorwire and its limit (default 2).",
)
@click.option(
    "--from",
    "from_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure nothing: show and draw the rows of FILE, which --json wrote.",
)
def memory(
    from_path: Path | None,
    quick: bool,
    systems: tuple[str, ...] | None,
    cases: tuple[str, ...] | None,
    sizes: tuple[int, ...] | None,
    wires: tuple[str, ...] | None,
    seconds: float | None,
    **outputs: Any,
) -> None:
    """Measure the cost of using another process as memory.

    Writes, reads, prepared batches, signals and fetch_add, over shared memory and TCP, each beside
    the limit (memcpy, a raw socket) in alternation and beside the rivals that are installed. The
    full run takes about ten minutes; other work on the machine spoils it.

    \b
    A first look, a minute or two:
        tensorwire bench memory --quick

    \b
    Everything, kept for comparison:
        tensorwire bench memory --json memory.json --figure memory.svg

    \b
    One question only:
        tensorwire bench memory --systems tensorwire,nixl --wires shm --sizes 8,1MiB,64MiB

    \b
    Memory of a GPU, where there is one:
        tensorwire bench memory --wires gpu

    \b
    The figure of an earlier run, drawn again:
        tensorwire bench memory --from memory.json --figure memory.svg

    \b
    The rivals, in a checkout of the repository:
        pip install 'tensorwire[bench,nixl]'
    """  # noqa: D301 (\b is what click reads)
    from tensorwire.bench.report import draw, print_report

    if from_path is not None:
        options = {
            "--quick": quick, "--systems": systems, "--cases": cases, "--sizes": sizes,
            "--wires": wires, "--seconds": seconds,
        }  # fmt: skip
        if name := next((name for name, value in options.items() if value), None):
            raise click.UsageError(f"{name} has no meaning for --from, which measures nothing")
        stored = _stored(from_path, "memory")
        carry_out(lambda show: stored, print_report, draw, **outputs)
        return
    if cases and not {"write", "read"} & set(cases):
        for name, value in (("--sizes", sizes), ("--figure", outputs["figure_path"])):
            if value is not None:
                raise click.UsageError(f"{name} is of write and read, which --cases leaves out")
    if cases == ("round_trip",) and wires == ("shm",):
        raise click.UsageError("round_trip is measured on tcp, which --wires leaves out")
    settings = MemorySettings.quick() if quick else MemorySettings()
    settings = chosen(settings, systems=systems, cases=cases, sizes=sizes, wires=wires)
    for system in systems or ():
        if not set(where := wires_of(system)) & set(settings.wires):
            raise click.UsageError(
                f"{system} is measured on {' and '.join(where)}, which --wires leaves out"
                if wires
                else f"{system} is measured on {' and '.join(where)} alone: name it with --wires"
            )
    if seconds is not None:
        settings.budget = dataclasses.replace(settings.budget, case_s=seconds)
    carry_out(partial(run, settings), print_report, draw, **outputs)


def _stored(path: Path, bench: str) -> Report:
    """Returns the report that an earlier run of this bench wrote."""
    try:
        report = Report.load(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if report.bench != bench:
        raise click.ClickException(f"{path}: rows of bench {report.bench}, not of bench {bench}")
    return report


def in_repository() -> Iterable[click.Command]:
    """Returns the other benches; where they are not, commands that say where to get them."""
    if checkout.found():
        found: Iterable[click.Command] = checkout.load("commands").COMMANDS
        return found
    return map(_elsewhere, _IN_REPOSITORY)


def _elsewhere(name: str) -> click.Command:
    command = f"bench {name}"
    reason = checkout.missing(f"'tensorwire {command}'", command) or ""

    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def tell(arguments: tuple[str, ...]) -> None:
        raise UnavailableError(reason)

    return click.command(
        name,
        cls=Command,
        help=f"{_IN_REPOSITORY[name]}\n\n{reason}.",
        short_help=_IN_REPOSITORY[name],
        context_settings={"ignore_unknown_options": True},
    )(tell)


for _command in in_repository():
    bench.add_command(_command)

"""`tensorwire bench`: runs a bench, shows its tables and verdicts, writes JSON and a figure."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tensorwire.bench.rows import parse_size
from tensorwire.cli.command import Command, check_file
from tensorwire.errors import TensorwireError

if TYPE_CHECKING:
    from tensorwire.bench.memory import Settings
    from tensorwire.bench.placement.placement import Settings as PlacementSettings
    from tensorwire.bench.rows import Report
    from tensorwire.bench.training.training import Settings as TrainingSettings


_FIGURES = (".svg", ".pdf", ".png")


class _Sizes(click.ParamType[tuple[int, ...]]):
    name = "sizes"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        try:
            return tuple(parse_size(part) for part in str(value).split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Names(click.ParamType[tuple[str, ...]]):
    """A comma-separated list of words that are known only when the bench is loaded."""

    name = "names"

    def __init__(self, known: Callable[[], tuple[str, ...]]) -> None:
        self._known = known

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        names = tuple(part.strip() for part in str(value).split(","))
        known = self._known()
        for name in names:
            if name not in known:
                self.fail(f"{name!r} is unknown; choose from {', '.join(known)}", param, ctx)
        return names


def _list_of(kind: click.ParamType[tuple[Any, ...]]) -> dict[str, Any]:
    """An option whose lists add up where it is given several times; None if it is not given."""

    def join(
        ctx: click.Context, param: click.Parameter, lists: tuple[tuple[Any, ...], ...]
    ) -> tuple[Any, ...] | None:
        joined = tuple(each for part in lists for each in part)
        if twice := [each for each in joined if joined.count(each) > 1]:
            raise click.BadParameter(f"{twice[0]} is named twice", ctx, param)
        return joined or None

    return {"type": kind, "multiple": True, "callback": join}


def _systems() -> tuple[str, ...]:
    from tensorwire.bench.memory import SYSTEMS

    return SYSTEMS


def _cases() -> tuple[str, ...]:
    from tensorwire.bench.memory import CASES

    return CASES


def _outputs(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every bench has."""
    for option in (
        click.option("--strict", is_flag=True, help="Exit with 1 if a measured bar is missed."),
        click.option(
            "--figure",
            "figure_path",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Draw a figure; .svg, .pdf or .png.",
        ),
        click.option(
            "--json",
            "json_path",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Write all rows, the machine and the verdicts to FILE.",
        ),
    ):
        command = option(command)
    return command


@click.group(short_help="Measure tensorwire beside the machine's limits and other libraries.")
def bench() -> None:
    """Measure tensorwire beside the machine's limits and beside other libraries."""


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise click.ClickException("this bench needs torch: pip install 'tensorwire[bench]'")


@bench.command(cls=Command)
@_outputs
@click.option("--quick", is_flag=True, help="Few sizes and little time: a look, not a measurement.")
@click.option(
    "--systems",
    **_list_of(_Names(_systems)),
    metavar="A,B",
    help="Only these: tensorwire, tensorwire-c++, memcpy, raw-socket, nixl, nixl-huge, "
    "torch-rpc, gloo, grpc. The limit of a system runs with it.",
)
@click.option(
    "--cases",
    **_list_of(_Names(_cases)),
    metavar="A,B",
    help="Only these: write, read, batch, signal, fetch_add, round_trip, waiting.",
)
@click.option(
    "--sizes",
    **_list_of(_Sizes()),
    metavar="A,B",
    help="Sizes of write and read, for example 8,64KiB,16MiB.",
)
@click.option(
    "--wires", **_list_of(_Names(lambda: ("shm", "tcp"))), metavar="A,B", help="shm, tcp or both."
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
    json_path: Path | None,
    figure_path: Path | None,
    from_path: Path | None,
    quick: bool,
    systems: tuple[str, ...] | None,
    cases: tuple[str, ...] | None,
    sizes: tuple[int, ...] | None,
    wires: tuple[str, ...] | None,
    seconds: float | None,
    strict: bool,
) -> None:
    """What does it cost to use another process as memory?

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
    The figure of an earlier run, drawn again:
        tensorwire bench memory --from memory.json --figure memory.svg

    \b
    The rivals:
        pip install 'tensorwire[bench,nixl]'
    """  # noqa: D301 (\b is what click reads)
    from tensorwire.bench.memory import Settings, run
    from tensorwire.bench.report import draw, print_report

    if from_path is not None:
        chosen = {
            "--quick": quick, "--systems": systems, "--cases": cases, "--sizes": sizes,
            "--wires": wires, "--seconds": seconds,
        }  # fmt: skip
        if name := next((name for name, value in chosen.items() if value), None):
            raise click.UsageError(f"{name} has no meaning for --from, which measures nothing")
        stored = _stored(from_path, "memory")
        _carry_out(lambda show: stored, print_report, draw, json_path, figure_path, strict)
        return
    if cases and not {"write", "read"} & set(cases):
        for name, value in (("--sizes", sizes), ("--figure", figure_path)):
            if value is not None:
                raise click.UsageError(f"{name} is of write and read, which --cases leaves out")
    if cases == ("round_trip",) and wires == ("shm",):
        raise click.UsageError("round_trip is measured on tcp, which --wires leaves out")
    settings = Settings.quick() if quick else Settings()
    _choose(settings, systems, cases, sizes, wires, seconds)
    _carry_out(partial(run, settings), print_report, draw, json_path, figure_path, strict)


def _stored(path: Path, bench: str) -> Report:
    """The report that an earlier run of this bench wrote."""
    from tensorwire.bench.rows import Report

    try:
        report = Report.load(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if report.bench != bench:
        raise click.ClickException(f"{path}: rows of bench {report.bench}, not of bench {bench}")
    return report


def _choose(
    settings: Settings,
    systems: tuple[str, ...] | None,
    cases: tuple[str, ...] | None,
    sizes: tuple[int, ...] | None,
    wires: tuple[str, ...] | None,
    seconds: float | None,
) -> None:
    settings.systems = systems or settings.systems
    settings.cases = cases or settings.cases
    settings.sizes = sizes or settings.sizes
    settings.wires = wires or settings.wires
    if seconds is not None:
        settings.budget = dataclasses.replace(settings.budget, case_s=seconds)


def _carry_out(
    run: Callable[[Callable[[int, int, str], None]], Report],
    print_report: Callable[[Report, Console], None],
    draw: Callable[[Report, Path], None],
    json_path: Path | None,
    figure_path: Path | None,
    strict: bool,
) -> None:
    """Runs a bench with a bar, shows its report, keeps it, and ends with its exit code."""
    _check_outputs(json_path, figure_path)
    # A file or a pipe has no width of its own; the tables need about 90 columns.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    report = _with_bar(run, console)
    print_report(report, console)
    _keep(report, json_path, figure_path, draw)
    if report.settings["interrupted"]:
        raise SystemExit(130)
    if strict and any(verdict.met is False for verdict in report.verdicts):
        raise SystemExit(1)


def _check_outputs(json_path: Path | None, figure_path: Path | None) -> None:
    """What would fail after the run is told before it."""
    check_file(json_path)
    check_file(figure_path)
    if figure_path is None:
        return
    if figure_path.suffix.lower() not in _FIGURES:
        raise click.BadParameter(f"{figure_path} is no figure; it ends with {', '.join(_FIGURES)}")
    if figure_path == json_path:
        raise click.UsageError(f"--json and --figure both name {json_path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("a figure needs matplotlib: pip install 'tensorwire[bench]'")


def _with_bar(run: Callable[[Callable[[int, int, str], None]], Report], console: Console) -> Report:
    """Runs with a progress bar.

    It is redrawn between the cases only: nothing of this process disturbs a measurement.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{label:34}", refresh=True)

        return run(show)


def _models() -> tuple[str, ...]:
    from tensorwire.bench.training.models import MODELS

    return tuple(model.name for model in MODELS)


def _training_systems() -> tuple[str, ...]:
    from tensorwire.bench.training.training import NAMES

    return NAMES


def _training_wires() -> tuple[str, ...]:
    from tensorwire.bench.training.training import WIRES

    return WIRES


@bench.command(cls=Command)
@_outputs
@click.option("--quick", is_flag=True, help="Two models, few steps: a look, not a measurement.")
@click.option(
    "--systems",
    **_list_of(_Names(_training_systems)),
    metavar="A,B",
    help="Only these: tensorwire, limit, ddp-gloo, grpc.",
)
@click.option(
    "--models",
    **_list_of(_Names(_models)),
    metavar="A,B",
    help="Only these: digits, mlp50, mlp200.",
)
@click.option(
    "--wires",
    **_list_of(_Names(_training_wires)),
    metavar="A,B",
    help="Only these: shm, tcp, alone (one process, small models).",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Steps of each system, per model and wire (default 300, 60 and 30).",
)
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adamw"]),
    default="sgd",
    show_default=True,
    help="sgd has momentum 0.9.",
)
def training(
    json_path: Path | None,
    figure_path: Path | None,
    quick: bool,
    systems: tuple[str, ...] | None,
    models: tuple[str, ...] | None,
    wires: tuple[str, ...] | None,
    steps: int | None,
    optimizer: str,
    strict: bool,
) -> None:
    """What does a synchronous training step cost?

    Two workers train a small CNN and MLPs of 50 and 200 MiB. A step is a whole iteration. Its
    exchange lasts from the last gradient until the slowest worker can read the updated parameters;
    an isolated exchange begins when all gradients are there and nothing has left.
    Beside tensorwire: torch's DistributedDataParallel over gloo, a parameter server on gRPC (a unix
    socket on the shm wire), and the limit, a C loop over gradients, parameters and state, on tcp
    with raw sockets. All take turns. Besides: what tensorwire costs a script that runs alone. The
    full run takes about half an hour and 10 GiB; other work on the machine spoils it.

    \b
    A first look, some minutes:
        tensorwire bench training --quick

    \b
    Everything, kept for comparison:
        tensorwire bench training --json training.json --figure training.svg

    \b
    One question only:
        tensorwire bench training --systems tensorwire,ddp-gloo --models mlp50 --wires shm

    \b
    The rivals:
        pip install 'tensorwire[bench]'
    """  # noqa: D301 (\b is what click reads)
    _need_torch()
    from tensorwire.bench.training.alone import MAX_BYTES
    from tensorwire.bench.training.report import draw, print_report
    from tensorwire.bench.training.training import Settings, run

    settings = Settings.quick() if quick else Settings()
    _choose_training(settings, systems, models, wires, steps, optimizer)
    if wires == ("alone",):
        if steps is not None:
            raise click.UsageError("--steps has no meaning for --wires alone")
        if "tensorwire" not in settings.systems:
            raise click.UsageError("--wires alone measures tensorwire, which --systems leaves out")
        if all(model.size_bytes > MAX_BYTES for model in settings.models):
            raise click.UsageError("--wires alone measures small models, which --models leaves out")
    _carry_out(partial(run, settings), print_report, draw, json_path, figure_path, strict)


def _choose_training(
    settings: TrainingSettings,
    systems: tuple[str, ...] | None,
    models: tuple[str, ...] | None,
    wires: tuple[str, ...] | None,
    steps: int | None,
    optimizer: str,
) -> None:
    from tensorwire.bench.training.models import model

    settings.systems = systems or settings.systems
    settings.models = tuple(map(model, models)) if models else settings.models
    settings.wires = wires or settings.wires
    settings.steps = steps or settings.steps
    settings.optimizer = optimizer


def _workloads() -> tuple[str, ...]:
    from tensorwire.bench.workloads.catalog import WORKLOADS

    return tuple(workload.name for workload in WORKLOADS)


def _placement_systems() -> tuple[str, ...]:
    from tensorwire.bench.placement.placement import NAMES

    return NAMES


def _placement_wires() -> tuple[str, ...]:
    from tensorwire.bench.placement.placement import WIRES

    return WIRES


_WORKLOAD = click.option(
    "--workload",
    "workloads",
    **_list_of(_Names(_workloads)),
    metavar="A,B",
    help="Only these: alexnet, inception-v3, vgg16, lstm, gru, fcn5, resnet50, gpt2-small, dlrm, "
    "dlrm-dense, moe, bilstm.",
)
_TINY = click.option(
    "--tiny", is_flag=True, help="The same structures with narrow layers: to see that all works."
)


@bench.command(cls=Command)
@_outputs
@click.option("--quick", is_flag=True, help="Two workloads, few steps: a look, no measurement.")
@_TINY
@_WORKLOAD
@click.option(
    "--systems",
    **_list_of(_Names(_placement_systems)),
    metavar="A,B",
    help="Only these: plan, limit, copy, computation, grpc.",
)
@click.option(
    "--wire",
    "wires",
    **_list_of(_Names(_placement_wires)),
    metavar="A,B",
    help="shm, tcp, alone (what placement itself costs, one process); these by default. 1gbit: two "
    "hosts on a slow link, which needs root.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Steps of each system, per workload and wire (default 12 to 30).",
)
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adamw"]),
    default="sgd",
    show_default=True,
    help="sgd has momentum 0.9; dlrm is always trained with SGD without momentum.",
)
def placement(
    json_path: Path | None,
    figure_path: Path | None,
    quick: bool,
    tiny: bool,
    workloads: tuple[str, ...] | None,
    systems: tuple[str, ...] | None,
    wires: tuple[str, ...] | None,
    steps: int | None,
    optimizer: str,
    strict: bool,
) -> None:
    """What does placing gradients gain, on real models?

    Two workers train. The isolated exchange begins when all gradients are there and nothing has
    left, the exchange of a step with its last gradient; both last until the slowest worker can read
    the updated parameters. plan: gradients are produced where they are needed. copy: the same
    transport without that. grpc: a parameter server on gRPC, over a unix socket on the shm wire.
    limit: a C loop over gradients, parameters and state, on tcp with raw sockets. computation: the
    workers with no exchange; what a step takes longer than theirs is exposed communication. plan
    and copy must end with the same bits.

    The full run takes some hours and 16 GiB. All systems of a model live at the same time where
    40 GiB are free, else one group after the other, and the notes say so. Other work on the machine
    spoils the figures.

    \b
    One model over one wire, some minutes:
        tensorwire bench placement --workload alexnet --wire shm

    \b
    Everything, kept for comparison; what steps are made of, as a figure:
        tensorwire bench placement --json placement.json --figure placement.pdf

    \b
    Over a link of 1 Gbit/s between two network namespaces, as root:
        tensorwire bench placement --wire 1gbit --workload lstm

    \b
    What placement alone changes:
        tensorwire bench placement --systems plan,copy,computation --workload fcn5

    \b
    What the models are:
        tensorwire bench workloads
    """  # noqa: D301 (\b is what click reads)
    _need_torch()
    from tensorwire.bench.placement.placement import Settings, run
    from tensorwire.bench.placement.report import draw, print_report

    settings = Settings.quick() if quick else Settings()
    _choose_placement(settings, workloads, systems, wires, steps, optimizer)
    if wires == ("alone",) and systems is not None:
        raise click.UsageError("--systems has no meaning for --wire alone, which compares two")
    if optimizer != "sgd" and all(each.optimizer for each in settings.workloads):
        names = ", ".join(each.name for each in settings.workloads)
        raise click.UsageError(f"--optimizer {optimizer} cannot be: {names} has one of its own")
    if tiny:
        settings.workloads = [workload.reduced() for workload in settings.workloads]
    _carry_out(partial(run, settings), print_report, draw, json_path, figure_path, strict)


def _choose_placement(
    settings: PlacementSettings,
    workloads: tuple[str, ...] | None,
    systems: tuple[str, ...] | None,
    wires: tuple[str, ...] | None,
    steps: int | None,
    optimizer: str,
) -> None:
    from tensorwire.bench.workloads.catalog import workload

    settings.workloads = tuple(map(workload, workloads)) if workloads else settings.workloads
    settings.systems = systems or settings.systems
    settings.wires = wires or settings.wires
    settings.steps = steps or settings.steps
    settings.optimizer = optimizer


@bench.command("workloads", cls=Command)
@_WORKLOAD
@_TINY
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every tensor of every workload to FILE.",
)
def show_workloads(workloads: tuple[str, ...] | None, tiny: bool, json_path: Path | None) -> None:
    """How many tensors do the models of bench placement have, and how large are they?

    An average hides much: half of AlexNet's tensors are below 91 KiB, and six hold 99.8 % of its
    bytes. Nothing is trained and no memory is taken for the tensors; it needs torch.

    \b
    Two of them, tensor by tensor:
        tensorwire bench workloads --workload lstm,dlrm --json tensors.json
    """  # noqa: D301 (\b is what click reads)
    from tensorwire.bench.workloads.catalog import WORKLOADS, workload
    from tensorwire.bench.workloads.report import print_sizes, write_sizes

    check_file(json_path)
    chosen = tuple(map(workload, workloads)) if workloads else WORKLOADS
    if tiny:
        chosen = tuple(model.reduced() for model in chosen)
    print_sizes(chosen, Console() if sys.stdout.isatty() else Console(width=120))
    if json_path is not None:
        write_sizes(chosen, json_path)
        click.echo(f"tensors written to {json_path}")


def _keep(
    report: Report,
    json_path: Path | None,
    figure_path: Path | None,
    draw: Callable[[Report, Path], None],
) -> None:
    if json_path is not None:
        report.write(json_path)
        click.echo(f"rows written to {json_path}")
    if figure_path is not None:
        try:
            draw(report, figure_path)
        except (TensorwireError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"figure written to {figure_path}")

"""The commands of the benches of training steps: training, placement, parameters."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import click

from tensorwire.bench.commands import (
    Decorator,
    carry_out,
    chosen,
    names,
    need,
    outputs,
    plain_outputs,
    quick_option,
    together,
)
from tensorwire.bench.rows import Report
from tensorwire.command import Command, Told, terminal
from tensorwire_benchmarks import engine, report
from tensorwire_benchmarks import scaling as scaling_bench
from tensorwire_benchmarks.alone import MAX_BYTES
from tensorwire_benchmarks.bench import ALONE, Bench, Settings
from tensorwire_benchmarks.benches import LINKS, PARAMETERS, PLACEMENT, TRAINING
from tensorwire_benchmarks.libraries import LIBRARIES, LibrarySettings
from tensorwire_benchmarks.libraries import measure as measure_libraries
from tensorwire_benchmarks.optimizers import CASES, OptimizerSettings
from tensorwire_benchmarks.optimizers import judge as judge_optimizers
from tensorwire_benchmarks.optimizers import measure as measure_optimizers
from tensorwire_benchmarks.scaling_report import draw_scaling
from tensorwire_benchmarks.verdicts import judge_libraries
from tensorwire_benchmarks.workloads.catalog import MODELS, WORKLOADS, named

_MODELS = tuple(each.name for each in MODELS)
_WORKLOADS = tuple(each.name for each in WORKLOADS)


def _options(bench: Bench, quick: str, *own: Decorator, steps: str) -> Decorator:
    """Returns the options that all benches of training steps have, around their `own`."""
    return together(
        plain_outputs,
        quick_option(quick),
        *own,
        names("--systems", known=bench.names),
        click.option("--steps", type=click.IntRange(1), help=f"Steps of each system, {steps}."),
    )


def _settings(bench: Bench, quick: bool, models: Any, **options: Any) -> Settings:
    need("torch", "bench")
    models = models and tuple(named(name, bench.models) for name in models)
    return chosen(bench.settings(quick), models=models, **options)


@click.command(cls=Command)
@_options(
    TRAINING,
    "Two models, few steps: a look, not a measurement.",
    names("--models", known=_MODELS),
    names(
        "--wires",
        known=TRAINING.wires,
        help=f"Only these: {', '.join(TRAINING.wires)} (one process, small models).",
    ),
    steps="per model and wire (default 300, 60 and 30)",
)
def training(quick: bool, json_path: Path | None, strict: bool, **options: Any) -> None:
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
        tensorwire bench training --json training.json

    \b
    One question only:
        tensorwire bench training --systems tensorwire,ddp-gloo --models mlp50 --wires shm

    \b
    The rivals:
        pip install 'tensorwire[bench]'
    """  # noqa: D301 (\b is what click reads)
    settings = _settings(TRAINING, quick, **options)
    if options["wires"] == (ALONE,):
        if options["steps"] is not None:
            raise click.UsageError("--steps has no meaning for --wires alone")
        if TRAINING.own not in settings.systems:
            raise click.UsageError("--wires alone measures tensorwire, which --systems leaves out")
        if all(each.size_bytes > MAX_BYTES for each in settings.models):
            raise click.UsageError("--wires alone measures small models, which --models leaves out")
    run = partial(engine.run, TRAINING, settings)
    carry_out(run, report.print_steps, json_path=json_path, strict=strict)


@click.command(cls=Command)
@_options(
    PLACEMENT,
    "Two workloads, few steps: a look, no measurement.",
    click.option("--list", "only_list", is_flag=True, help="Only list the models."),
    names("--workload", "models", known=_WORKLOADS),
    names(
        "--wire",
        "wires",
        known=PLACEMENT.wires,
        help="shm and tcp if none is named; 1gbit: two hosts on a slow link, which needs root.",
    ),
    steps="per workload and wire (default 12 to 30)",
)
def placement(
    quick: bool, only_list: bool, json_path: Path | None, strict: bool, **options: Any
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
    Everything, kept for comparison:
        tensorwire bench placement --json placement.json

    \b
    Over a link of 1 Gbit/s between two network namespaces, as root:
        tensorwire bench placement --wire 1gbit --workload lstm

    \b
    What placement alone changes:
        tensorwire bench placement --systems plan,copy,computation --workload fcn5

    \b
    What the models are:
        tensorwire bench placement --list
    """  # noqa: D301 (\b is what click reads)
    settings = _settings(PLACEMENT, quick, **options)
    if only_list:
        return report.print_workloads(settings.models, terminal(120))
    run = partial(engine.run, PLACEMENT, settings)
    carry_out(run, report.print_steps, json_path=json_path, strict=strict)


@click.command(cls=Command)
@outputs
@quick_option("Few steps and small models: a look.")
@names("--optimizers", known=CASES, help=f"Only these optimizers: {', '.join(CASES)}.")
@names("--libraries", known=LIBRARIES)
@names("--wires", known=PARAMETERS.wires, help="Only the tables, on these: shm, tcp.")
@names(
    "--links",
    known=LINKS.wires,
    help=f"Only push and pull, over these: {', '.join(LINKS.wires)}; it needs root.",
)
@click.option(
    "--scaling",
    "only_scaling",
    is_flag=True,
    help="Only more workers and servers, each on a host of its own; it needs root.",
)
@click.option("--steps", type=click.IntRange(1), help="Only the tables, so many steps (30).")
def parameters(
    quick: bool, optimizers: tuple[str, ...] | None, libraries: tuple[str, ...] | None,
    wires: tuple[str, ...] | None, links: tuple[str, ...] | None, only_scaling: bool,
    steps: int | None, **outputs: Any,
) -> None:  # fmt: skip
    """What do optimizers, tables, links and other libraries' loops cost?

    Of each optimizer of torch.optim: what a server does per MiB, beside torch's own step on the
    same bytes, in turns, with one thread. A model with sparse tables and Adagrad: whole steps of
    two workers beside torch's DistributedDataParallel over gloo, and beside workers that train by
    themselves. Whole steps of Lightning's Trainer and of Hugging Face's, beside their own
    DistributedDataParallel over gloo: a net for digits, ResNet-18 and GPT-2 small. Push and pull of
    50 MiB by two workers over links of 1, 2.5 and 5 Gbit/s between two network namespaces, beside a
    raw socket that carries both ways at once and a parameter server on gRPC, with the CPU seconds
    of both sides. And jobs of one to eight workers and one to four servers at a switch of 200
    Mbit/s, whose workers sleep where a recorded step computed: sync and async, beside what the
    links let through. The figure is of optimizers, or with --scaling of scaling.

    \b
    A first look:
        tensorwire bench parameters --quick

    \b
    Everything, kept for comparison, half an hour:
        tensorwire bench parameters --json parameters.json --figure parameters.svg

    \b
    One question only:
        tensorwire bench parameters --optimizers NAdam,Muon
        tensorwire bench parameters --libraries lightning
        tensorwire bench parameters --links 1gbit
        tensorwire bench parameters --scaling --figure scaling.svg

    \b
    The libraries:
        pip install 'tensorwire[integrations]'
    """  # noqa: D301 (\b is what click reads)
    settings = _settings(PARAMETERS, quick, None, wires=wires, steps=steps)
    if sum(map(bool, (optimizers, libraries, links, only_scaling, wires or steps))) > 1:
        raise click.UsageError(
            "--optimizers, --libraries, --links, --scaling and --wires with --steps are five "
            "questions: ask for one, or for all by none of them"
        )
    everything = not (optimizers or libraries or links or only_scaling or wires or steps)
    if not (everything or wires or steps):
        settings.models = ()
    linked = _settings(LINKS, quick, None, wires=links)
    if not (everything or links):
        linked.models = ()
    own = OptimizerSettings(optimizers or (CASES if everything else ()))
    loops = LibrarySettings(libraries or (LIBRARIES if everything else ()))
    growth = scaling_bench.ScalingSettings()
    if quick:
        own = dataclasses.replace(own, tensors=4, pairs=8)
        loops = dataclasses.replace(loops, models=loops.models[:1])
        growth = scaling_bench.ScalingSettings(workers=(1, 2), servers=(1,), batch=8, steps=4)

    def run(tell: Told) -> Report:
        def others(found: Report) -> None:
            if linked.models:
                found.add(engine.run(LINKS, linked, tell), "links")
            if found.settings["interrupted"]:
                return
            measure_optimizers(found, own, lambda name: tell(0, 1, name))
            if everything or only_scaling:
                scaling_bench.measure(found, growth, tell)
            measure_libraries(found, loops, lambda name: tell(0, 1, name))

        found = engine.run(PARAMETERS, settings, tell, others)
        found.verdicts += judge_optimizers(found, own.cases)
        found.verdicts += judge_libraries(found, [case for case, _, _ in loops.cases()])
        return found

    draw = draw_scaling if only_scaling else report.draw_parameters
    carry_out(run, report.print_steps, draw, **outputs)

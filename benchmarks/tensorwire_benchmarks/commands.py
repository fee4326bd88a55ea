"""The commands of these benches: their options, and what they run.

`tensorwire.bench.checkout` adds them to `tensorwire bench`. torch is imported only when a command
runs.
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import click

from tensorwire.bench.commands import (
    carry_out,
    chosen,
    json_option,
    names,
    need,
    outputs,
    plain_outputs,
    quick_option,
    sizes,
)
from tensorwire.command import Command
from tensorwire_benchmarks import faults as fault_bench
from tensorwire_benchmarks import files as file_bench
from tensorwire_benchmarks import modes as mode_bench
from tensorwire_benchmarks import rpc as rpc_bench
from tensorwire_benchmarks import rpc_names
from tensorwire_benchmarks.durable_cost import CostSettings
from tensorwire_benchmarks.faults_changes import ChangeSettings
from tensorwire_benchmarks.faults_kills import SCENARIOS as FAULT_SCENARIOS
from tensorwire_benchmarks.gpu_training import BATCHES as GPU_BATCHES
from tensorwire_benchmarks.gpu_training import GpuSettings
from tensorwire_benchmarks.gpu_training import run as run_gpu_training
from tensorwire_benchmarks.modes_report import draw_modes, print_modes
from tensorwire_benchmarks.modes_training import TASKS, TrainingSettings
from tensorwire_benchmarks.step_commands import parameters, placement, training


@click.command(cls=Command)
@json_option()
@click.option("--seed", type=int, default=0, show_default=True, help="Of victims and moments.")
@click.option("--kills", type=click.IntRange(1), help="Over all scenarios (default 50).")
@click.option("--cost", is_flag=True, help="Only what durability costs; nothing is killed.")
@click.option(
    "--changes",
    is_flag=True,
    help="Only how long workers wait when shares move, workers come and go, or die in other modes.",
)
@click.option(
    "--beside",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --cost: a built checkout of a commit before durability. Jobs there and jobs here "
    "that are not durable take turns.",
)
@click.option(
    "--scenario",
    "scenarios",
    type=click.Choice(FAULT_SCENARIOS),
    multiple=True,
    help="Only this one; may be given several times.",
)
@quick_option("Two kills of each scenario, few steps: a look.")
def faults(
    json_path: Path | None, seed: int, kills: int | None, cost: bool, changes: bool,
    beside: Path | None, scenarios: tuple[str, ...], quick: bool,
) -> None:  # fmt: skip
    """Does a job whose processes are killed compute the same, and what does that cost?

    Small jobs of two workers: BatchNorm, Dropout, a scheduler and accumulation; sparse tables; two
    optimizers with an average of weights; Muon; 50 MiB;
    two pipelines; checkpoints. Each runs undisturbed first, then with servers, workers and the
    standby killed by SIGKILL at random moments, the next one after the last repair, but sometimes
    two at once or the process in the place of the first. The last one loses the launcher, and is
    started again.
    A judge that knows nothing of tensorwire compares the final values to the bit, and looks
    whether each slice of each step was made once and each sample used once. The exit code is 1 if
    anything differs, or a job fails or hangs. Besides, how long workers wait when shares move,
    workers come, go or die, also in the modes async and bounded; and what durability costs while
    nobody dies: the server's CPU time and memory and the steps of a job with it and without, in
    turns. Some twenty
    minutes.

    \b
    Everything, kept for comparison:
        tensorwire bench faults --json faults.json

    \b
    One scenario, only the cost, or only what changes:
        tensorwire bench faults --scenario batchnorm --kills 10 --seed 7
        tensorwire bench faults --cost
        tensorwire bench faults --changes
    """  # noqa: D301 (\b is what click reads)
    need("torch", "bench")
    if cost and (scenarios or kills):
        raise click.UsageError("--cost kills nothing: leave out --scenario and --kills")
    if changes and (cost or scenarios or kills):
        raise click.UsageError("--changes is for itself: leave out --cost, --scenario and --kills")
    if beside and not cost:
        raise click.UsageError("--beside needs --cost")
    chosen_ones = () if cost or changes else tuple(dict.fromkeys(scenarios)) or FAULT_SCENARIOS
    costs = CostSettings(beside=str(beside or ""))
    if quick:
        costs = dataclasses.replace(costs, turns=8, steps=10)
    some = bool(scenarios or kills)
    settings = fault_bench.FaultSettings(
        chosen_ones, kills or (2 * len(chosen_ones) if quick else 50), seed,
        cost=None if some or changes else costs,
        changes=None if some or cost else ChangeSettings(rounds=2 if quick else 6),
    )  # fmt: skip
    report = carry_out(
        partial(fault_bench.run, settings), fault_bench.print_faults, json_path=json_path
    )
    if fault_bench.fails(report):
        raise SystemExit(1)


@click.command(cls=Command)
@plain_outputs
@quick_option("Few sizes and few turns: a look.")
@names("--wires", known=rpc_names.WIRES, help="shm, tcp or both.")
@names("--cases", known=rpc_names.CASES)
@sizes("--sizes", help="Sizes of payload, multiples of 8, for example 8,1MiB,64MiB.")
def rpc(
    quick: bool, wires: tuple[str, ...] | None, cases: tuple[str, ...] | None,
    sizes: tuple[int, ...] | None, **outputs: Any,
) -> None:  # fmt: skip
    """What do large messages cost in gRPC, and what with tensorwire.rpc?

    One client and one servicer that gives back what it got; both read the whole payload. Beside raw
    bytes over grpcio: the same over tensorwire.rpc and its runtime, arrays as messages, and the
    limit, memcpy. All take turns, over shared memory (grpcio: a unix socket) and TCP. About
    an hour; other work on the machine spoils the figures.

    \b
    A look, less than a minute:
        tensorwire bench rpc --quick

    \b
    Everything, kept for comparison:
        tensorwire bench rpc --json rpc.json
    """  # noqa: D301 (\b is what click reads)
    need("grpc", "rpc")
    if wrong := [size for size in sizes or () if size % 8]:
        raise click.UsageError(f"--sizes: {wrong[0]} is no multiple of 8")
    settings = rpc_bench.RpcSettings()
    if quick:
        cases = cases or (rpc_names.UNARY, rpc_names.CROWD)
        small = (8, 1 << 20, 16 << 20)
        settings = rpc_bench.RpcSettings(small, rounds=6, block_s=0.1)
    settings = chosen(settings, wires=wires, cases=cases, sizes=sizes)
    carry_out(partial(rpc_bench.run, settings), **outputs)


@click.command(cls=Command)
@outputs
@quick_option("Two short turns, a seed of few steps: a look.")
@names("--cases", known=mode_bench.CASES)
def modes(quick: bool, cases: tuple[str, ...] | None, **outputs: Any) -> None:
    """What do the modes of a job gain, and what do they cost?

    Four workers whose steps sleep. slow: one is four times slower than the others; async beside
    sync. stalls: each pauses once in four steps, for two or three steps; bounded beside sync.

    digits, characters, text: training with four, two and one workers and five seeds. How many
    steps do async and bounded need to the loss that sync ends with? And how long do they, sync,
    torch's DistributedDataParallel over gloo and a parameter server on gRPC need?

    About an hour on two cores; other work on the machine spoils the times. The figure is of
    training.

    \b
    A look, some minutes:
        tensorwire bench modes --quick

    \b
    Everything, kept for comparison:
        tensorwire bench modes --json modes.json --figure modes.svg

    \b
    One question only, four minutes:
        tensorwire bench modes --cases slow,stalls

    \b
    The rivals:
        pip install 'tensorwire[bench]'
    """  # noqa: D301 (\b is what click reads)
    need("torch", "bench")
    if outputs["figure_path"] is not None and cases and not set(cases) & set(TASKS):
        raise click.UsageError(f"--figure draws training, one of {', '.join(TASKS)}")
    settings = mode_bench.ModesSettings()
    if quick:
        short = TrainingSettings(sizes=(4,), seeds=1, shorten=4)
        settings = dataclasses.replace(settings, turns=2, steps=4, training=short)
    settings = chosen(settings, cases=cases)
    carry_out(partial(mode_bench.run, settings), print_modes, draw_modes, **outputs)


@click.command(cls=Command)
@plain_outputs
@quick_option("A small model and few turns: a look.")
@names("--cases", known=file_bench.CASES)
def files(quick: bool, cases: tuple[str, ...] | None, **outputs: Any) -> None:
    """What does it cost to read a running job as files?

    A parameter of 64 MiB by fsspec beside a copy and a file on tmpfs; one tensor of a mapped model
    beside the same file on tmpfs; a snapshot of 512 MiB taken and loaded beside torch.save and
    torch.load; the parameter by a mount beside libfuse's passthrough_ll; and steps while somebody
    reads 100 MB/s. Some ten minutes and 4 GiB of memory; other work on the machine spoils the
    figures. Mounts need root, passthrough_ll a C compiler and libfuse3-dev; what is missing is
    told, and its rows say so.

    \b
    A look, half a minute, without the case that rests for long (snapshot_first):
        tensorwire bench files --quick

    \b
    Everything, kept for comparison:
        tensorwire bench files --json files.json
    """  # noqa: D301 (\b is what click reads)
    for module in ("torch", "fsspec", "safetensors"):
        need(module, "torch,files")
    settings = file_bench.FilesSettings()
    if quick:
        settings = file_bench.FilesSettings(
            cases=file_bench.QUICK_CASES,
            large_mib=4,
            total_mib=16,
            rounds=6,
            window_s=0.3,
        )
    settings = chosen(settings, cases=cases)
    carry_out(partial(file_bench.run, settings), **outputs)


@click.command("gpu-training", cls=Command)
@json_option("Write all rows and the machine to FILE.")
@names("--models", known=tuple(GPU_BATCHES))
@click.option("--steps", type=click.IntRange(2), help="Of each model; the default is 20.")
def gpu_training(json_path: Path | None, models: tuple[str, ...] | None, steps: int | None) -> None:
    """What does a step cost with the model on a GPU?

    Two workers share one GPU: on a job with one server and with two, and under
    DistributedDataParallel over gloo (NCCL refuses two processes on one GPU). The limit is one
    process that has the GPU for itself and exchanges nothing. Some two minutes.

    \b
    One question only:
        tensorwire bench gpu-training --models resnet50,gpt2-small --json gpu.json
    """  # noqa: D301 (\b is what click reads)
    need("torch", "bench")
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise click.ClickException("this bench needs a CUDA device, and torch sees none")
    settings = chosen(GpuSettings(), models=models, steps=steps)
    carry_out(partial(run_gpu_training, settings), json_path=json_path)


COMMANDS = (training, placement, parameters, faults, rpc, modes, files, gpu_training)
"""What `tensorwire bench` offers beside `memory`."""

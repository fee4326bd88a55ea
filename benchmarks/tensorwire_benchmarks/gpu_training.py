"""Steps of real models on one GPU: two workers on a job, under DDP over gloo, one process alone.

Both workers share the GPU. NCCL refuses two processes on one GPU, so DDP uses gloo, which stages
gradients through the host. The limit is a process that has the GPU to itself and exchanges nothing:
two workers do twice its work in a step, so that half of its speed is the most where the GPU
computes all the time. The sides run one after the other; a time is the slower worker's step, up to
the end of its work on the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorwire.bench.harness import median
from tensorwire.bench.measuring import measuring
from tensorwire.bench.rows import Comparison, Report, Row
from tensorwire.command import Told
from tensorwire_benchmarks.jobs import LaunchedJob
from tensorwire_benchmarks.workloads.catalog import workload

ALONE, DDP, OWN = "one process", "ddp-gloo", "tensorwire"
BATCHES = {"resnet50": 32, "gpt2-small": 8, "vgg16": 32, "alexnet": 32, "dlrm": 2048}
"""Samples per worker and step."""
_SERVERS = (1, 2)
_WORKERS = 2
_LIMIT_S = 300.0  # for one side
_WORKER = "tensorwire_benchmarks.gpu_worker"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What to measure.

    Attributes:
        models: some of `BATCHES`.
        steps: counted steps of each model, after the warm-up.
    """

    models: Sequence[str] = tuple(BATCHES)
    steps: int = 20


def run(settings: GpuSettings, tell: Told) -> Report:
    """Measures one side after the other; Ctrl-C ends it with the rows so far."""
    torch: Any = importlib.import_module("torch")
    described = {"gpu": torch.cuda.get_device_name(0), "batches": BATCHES}
    sides = [("alone", ALONE, 0), ("ddp", DDP, 0), *(("tensorwire", OWN, n) for n in _SERVERS)]
    found: dict[str, dict[str, list[float]]] = {}
    with measuring("gpu-training", dataclasses.asdict(settings) | described) as report:
        for number, (side, system, servers) in enumerate(sides):
            name = f"{system}, {servers} server{'s' * (servers > 1)}" if servers else system
            tell(number, len(sides), name)
            found[name] = _times(side, servers, settings)
    for model in settings.models:
        _add(report, model, {name: times.get(model, []) for name, times in found.items()})
    return report


def _add(report: Report, model: str, times: dict[str, list[float]]) -> None:
    size = workload(model).size_bytes
    alone = median(times[ALONE]) if times.get(ALONE) else None
    for name, seconds in times.items():
        row = Row(report.bench, f"{model}.step", name, size, note=f"batch {BATCHES[model]}")
        if seconds:
            row = row.timed(seconds)
            if alone is not None:
                row = dataclasses.replace(row, ratio_to_limit=alone / median(seconds))
        report.rows.append(row)
    rival = times.get(DDP)
    for name in (name for name in times if name.startswith(OWN)):
        if rival and times[name]:
            ratio = median(rival) / median(times[name])
            report.comparisons.append(
                Comparison(f"{model}.step", size, name, DDP, ratio, None, len(rival))
            )


def _times(side: str, servers: int, settings: GpuSettings) -> dict[str, list[float]]:
    """Returns the seconds of each model's steps, of the slower worker."""
    found = trained(side, servers, settings)
    return {
        model: list(map(max, zip(*(each[model]["seconds"] for each in found), strict=True)))
        for model in settings.models
    }


def trained(
    side: str, servers: int, settings: GpuSettings, deterministic: bool = False
) -> list[dict[str, Any]]:
    """Trains models on one GPU; returns the results of each worker, by model.

    Args:
        side: "alone", "ddp" or "tensorwire".
        servers: the servers of a job of tensorwire; 0 on other sides.
        settings: what to train.
        deterministic: whether to use only kernels that give the same bits in each run.

    Raises:
        PairError: a process failed; with its last output.
    """
    models = [f"{model}:{BATCHES[model]}:{settings.steps}" for model in settings.models]
    models = ["deterministic"] * deterministic + models
    with tempfile.TemporaryDirectory(prefix="tensorwire-bench-") as folder:
        python = [sys.executable, "-m"]
        worker = [_WORKER, side, folder, *models]
        commands: list[list[str]] = [[*python, *worker]]
        if side == "ddp":
            commands *= _WORKERS
        elif servers:
            launch = ["tensorwire", "run", f"--workers={_WORKERS}", f"--servers={servers}", "-m"]
            commands = [[*python, *launch, *worker]]
        _run_all(commands, folder)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*-*.json"))]


def _run_all(commands: Sequence[Sequence[str]], folder: str) -> None:
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, command in enumerate(commands):
            place = Path(folder, f"rank{rank}")
            place.mkdir()
            processes.append(stack.enter_context(LaunchedJob(command, place, RANK=str(rank))))
        for each in processes:
            each.finish(_LIMIT_S)

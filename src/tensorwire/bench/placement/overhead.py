"""What placement itself costs: a script that runs alone, with gradients in place and with copies.

Measured: the CPU time of a whole step (forward, backward, step, zero_grad) of the same model twice
in one process, without servers; the two take turns, a step each. What is left of the difference is
what recognising allocations takes, less the copies that it saves.

Not measured: the first two steps, in which allocations are learned.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import time
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.harness import Ratio, median, paired_ratio, percentile
from tensorwire.bench.processes import Pair, PairError
from tensorwire.bench.rows import Row, Verdict
from tensorwire.bench.training.systems import COPY, PLAN
from tensorwire.bench.training.systems.base import make_optimizer
from tensorwire.bench.workloads.catalog import Workload

ALONE = "alone"
BAR = 1.02
PAIRS = 30
_WARM = 3


def run(bench: str, model: Workload, optimizer: str, pairs: int) -> tuple[list[Row], Verdict]:
    """Rows of the step with placement and without, and what the bar says."""
    case = f"{model.name}/{ALONE}/step"
    rows = [Row(bench, case, system.name, model.size_bytes) for system in (PLAN, COPY)]
    name = f"{case} CPU seconds, against copy"
    try:
        with Pair(__name__, {"model": model, "optimizer": optimizer}) as pair:
            walls, cpus = pair.call("alternate", pairs, timeout_s=60 + 60 * pairs)
    except PairError as error:
        rows = [dataclasses.replace(row, note=str(error)) for row in rows]
        return rows, Verdict(name, BAR, "<=", "x", detail=str(error))
    ratio: Ratio | None = paired_ratio(*cpus)
    assert ratio is not None
    rows = [
        dataclasses.replace(
            row,
            seconds_median=median(wall),
            seconds_p99=percentile(wall, 0.99),
            cpu_seconds_local=median(cpu),
            operations=len(wall),
            note="one process, no server",
        )
        for row, wall, cpu in zip(rows, walls, cpus, strict=True)
    ]
    met = ratio.median <= BAR
    return rows, Verdict(name, BAR, "<=", "x", ratio.median, ratio.interval, met)


class Driver:
    """Both models."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        for variable in [name for name in os.environ if name.startswith("TENSORWIRE_")]:
            del os.environ[variable]
        torch: Any = importlib.import_module("torch")
        tw: Any = importlib.import_module("tensorwire.torch")
        torch.set_num_threads(1)
        model: Workload = options["model"]
        self._job = tw.init()
        self._loss = model.loss(torch)
        self._batches = model.batches(torch, 0)
        self._at = 0
        self._trained = []
        for system in (PLAN, COPY):
            network = model.build(torch)
            inner = make_optimizer(torch, options["optimizer"], network.parameters(), fused=False)
            optimizer = tw.DistributedOptimizer(inner, network, placement=system.name)
            self._trained.append((network, optimizer))

    def alternate(self, pairs: int) -> tuple[list[list[float]], list[list[float]]]:
        """Wall and CPU seconds of each step of each model."""
        for _ in range(_WARM):
            for which in (0, 1):
                self._step(which)
        walls: list[list[float]] = [[], []]
        cpus: list[list[float]] = [[], []]
        gc.collect()
        gc.disable()
        try:
            for pair in range(pairs):
                self._at = pair
                for which in (0, 1) if pair % 2 == 0 else (1, 0):
                    wall_s, cpu_s = self._step(which)
                    walls[which].append(wall_s)
                    cpus[which].append(cpu_s)
        finally:
            gc.enable()
        return walls, cpus

    def _step(self, which: int) -> tuple[float, float]:
        network, optimizer = self._trained[which]
        inputs, labels = self._batches[self._at % len(self._batches)]
        wall, cpu = time.perf_counter(), time.process_time()
        self._loss(network(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - wall, time.process_time() - cpu

    def close(self) -> None:
        """Leaves the job."""
        self._job.close()


def serve(link: Connection, options: dict[str, Any]) -> None:
    """There is nobody else; waits for the end."""
    del options
    while link.recv()[0] != "stop":
        pass

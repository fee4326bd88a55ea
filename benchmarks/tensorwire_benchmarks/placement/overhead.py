"""What placement itself costs: a script that runs alone, with gradients in place and with copies.

Measured, of the same model in one process and without servers, the two in turn:

- the CPU time of a whole step (forward, backward, step, zero_grad). What is left of the difference
  is what recognising allocations takes, less the copies that it saves;
- the *first* steps: the time to make the optimizer and to train two steps with it, again and again.
  In the first allocations are learned, in the second gradients come to their places. The difference
  is what placement takes to begin: slots are made, allocations logged and looked up, and memory is
  touched for the first time, which is most of it. `planning` is that looking up alone.

Not measured: compiling the allocator where no library is there for this torch, once per machine; it
was loaded before, and the note of `planning` says how long that took.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tensorwire.bench.harness import median, paired_ratio, percentile
from tensorwire.bench.processes import Pair, PairError
from tensorwire.bench.rows import Row, Verdict, format_seconds
from tensorwire_benchmarks.placement.verdicts import judge_overhead, judge_planning
from tensorwire_benchmarks.training.systems import COPY, PLAN, System
from tensorwire_benchmarks.training.systems.base import make_optimizer
from tensorwire_benchmarks.workloads.catalog import Workload

ALONE = "alone"
FIRST_STEPS = 2
_ROUNDS = 3
_WARM = 3


class First(NamedTuple):
    """How it begins.

    Attributes:
        seconds: with placement and without, each time.
        learning: seconds of it for learning which allocations gradients are, by what it tells.
        load_s: what it took to load the allocator, or to compile it.
    """

    seconds: tuple[list[float], list[float]]
    learning: list[float]
    load_s: float


def run(bench: str, model: Workload, optimizer: str, pairs: int) -> tuple[list[Row], list[Verdict]]:
    """Rows of the steps with placement and without, and what the bars say."""
    alone = f"{model.name}/{ALONE}"
    size_bytes = model.traffic(1).up_bytes
    step, first = (
        [Row(bench, f"{alone}/{what}", system.name, size_bytes) for system in (PLAN, COPY)]
        for what in ("step", "first")
    )
    planning = Row(bench, f"{alone}/planning", PLAN.name, size_bytes)
    try:
        with Pair(__name__, {"model": model, "optimizer": optimizer}) as pair:
            begun: First = pair.call("first", _ROUNDS, timeout_s=300 + 120 * _ROUNDS)
            walls, cpus = pair.call("alternate", pairs, timeout_s=60 + 60 * pairs)
    except PairError as error:
        why = str(error)
        rows = [dataclasses.replace(row, note=why) for row in (*step, *first, planning)]
        return rows, [judge_overhead(step[0].case, None, why), judge_planning(alone, None, why)]
    note = f"one process, no server; optimizer {optimizer}"
    step = [
        dataclasses.replace(_timed(row, wall, note), cpu_seconds_local=median(cpu))
        for row, wall, cpu in zip(step, walls, cpus, strict=True)
    ]
    note = f"the optimizer is made and trains {FIRST_STEPS} steps"
    first = [_timed(row, taken, note) for row, taken in zip(first, begun.seconds, strict=True)]
    note = f"part of first; to load the allocator took {format_seconds(begun.load_s)} before"
    extra_s = median([plan - copy for plan, copy in zip(*begun.seconds, strict=True)])
    taken = (extra_s, median(begun.learning))
    return [*step, *first, _timed(planning, begun.learning, note)], [
        judge_overhead(step[0].case, paired_ratio(*cpus)),
        judge_planning(alone, taken),
    ]


def _timed(row: Row, samples: list[float], note: str) -> Row:
    return dataclasses.replace(
        row,
        seconds_median=median(samples),
        seconds_p99=percentile(samples, 0.99),
        operations=len(samples),
        note=note,
    )


class Driver:
    """Both models."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        for variable in [name for name in os.environ if name.startswith("TENSORWIRE_")]:
            del os.environ[variable]
        self._torch: Any = importlib.import_module("torch")
        self._tw: Any = importlib.import_module("tensorwire.torch")
        self._torch.set_num_threads(1)
        self._model: Workload = options["model"]
        self._optimizer: str = options["optimizer"]
        self._job = self._tw.init(rank=0, world_size=1)
        self._loss = self._model.loss(self._torch)
        self._batches = self._model.batches(self._torch, 0)

    def _distributed(self, network: Any, system: System) -> Any:
        parameters = network.parameters()
        inner = make_optimizer(self._torch, self._optimizer, parameters, fused=False)
        return self._tw.DistributedOptimizer(inner, network, placement=system.name)

    def first(self, rounds: int) -> First:
        """Begins again and again, each time with memory that nobody touched.

        A round before them is not counted: all that torch itself does once per process.
        """
        begin = time.perf_counter()
        importlib.import_module("tensorwire.torch.allocator.library").load()
        load_s = time.perf_counter() - begin
        network = self._model.build(self._torch)
        found = First(([], []), [], load_s)
        for at in range(rounds + 1):
            for which in (0, 1) if at % 2 == 0 else (1, 0):
                taken_s, learning_s = self._begin(network, (PLAN, COPY)[which])
                if at > 0:
                    found.seconds[which].append(taken_s)
                if at > 0 and which == 0:
                    found.learning.append(learning_s)
        return found

    def _begin(self, network: Any, system: System) -> tuple[float, float]:
        """Seconds in all, and those for learning."""
        gc.collect()
        begin = time.perf_counter()
        optimizer = self._distributed(network, system)
        for at in range(FIRST_STEPS):
            self._step(network, optimizer, at)
        taken_s = time.perf_counter() - begin
        learning_s = self._tw.explain_optimizer(optimizer).planning_s
        optimizer.close()
        return taken_s, learning_s

    def alternate(self, pairs: int) -> tuple[list[list[float]], list[list[float]]]:
        """Wall and CPU seconds of each step of each model."""
        networks = [self._model.build(self._torch) for _ in (PLAN, COPY)]
        trained = [
            (network, self._distributed(network, system))
            for network, system in zip(networks, (PLAN, COPY), strict=True)
        ]
        for _ in range(_WARM):
            for each in trained:
                self._step(*each, 0)
        walls: list[list[float]] = [[], []]
        cpus: list[list[float]] = [[], []]
        gc.collect()
        gc.disable()
        try:
            for pair in range(pairs):
                for which in (0, 1) if pair % 2 == 0 else (1, 0):
                    wall_s, cpu_s = self._step(*trained[which], pair)
                    walls[which].append(wall_s)
                    cpus[which].append(cpu_s)
        finally:
            gc.enable()
        return walls, cpus

    def _step(self, network: Any, optimizer: Any, at: int) -> tuple[float, float]:
        inputs, labels = self._batches[at % len(self._batches)]
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

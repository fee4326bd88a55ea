"""Measures what tensorwire costs in one process without a server.

Two scripts take turns: a plain one, and the same with `tw.init`, `tw.DistributedOptimizer` and
`job.loader`. The extra time of a step is the median of the differences of neighbouring passes over
the data. After the first pass both must have the same parameters.

Not measured: starting, evaluation, saving.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.harness import paired_ratio
from tensorwire.bench.measuring import take_turns
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire.bench.rows import Row, Verdict
from tensorwire_benchmarks.bench import ALONE, OPTIMIZER, Bench, Settings
from tensorwire_benchmarks.figures import extra_seconds
from tensorwire_benchmarks.systems import OWN
from tensorwire_benchmarks.systems.base import make_optimizer
from tensorwire_benchmarks.verdicts import judge_alone
from tensorwire_benchmarks.worker import serve, use_settings
from tensorwire_benchmarks.workloads.catalog import Workload

__all__ = ["Driver", "serve"]

PLAIN = "plain"
MAX_BYTES = 1 << 20
"""The largest model that is measured: the step of a larger one hides the extra time."""
PASS_STEPS = 20
_PASSES_PER_TURN = 4
_SAME = 1e-4  # relative; the same kernels in another order

Found = tuple[list[Row], list[Verdict]]
Two = tuple[list[float], list[float]]
"""Samples of the first way and of the second."""


def beside_plain(bench: Bench, model: Workload, settings: Settings) -> Found:
    """Returns the rows of the script with tensorwire and of the plain one, and the verdict."""
    case = bench.case(ALONE, model.name, "step")
    if OWN not in settings.systems:
        return [], [judge_alone(case, None, "it did not run")]
    rows = [Row(bench.name, case, name, model.size_bytes) for name in (OWN, PLAIN)]
    pairs = _PASSES_PER_TURN * settings.turns
    try:
        with ProcessPair(__name__, {"model": model}) as pair:
            (own, plain), walls, cpus = pair.call("passes", pairs, timeout_s=600)
            if abs(plain - own) > _SAME * plain:
                raise PairError(f"after one pass the parameters differ: {own}, plain {plain}")
    except PairError as error:
        return _unmeasured(rows, error), [judge_alone(case, None, str(error))]
    notes = ("no server; job.loader", "torch alone; DataLoader")
    rows = [
        row.timed(
            wall,
            cpu_seconds_local=sum(cpu) / pairs,
            operations=len(wall) * PASS_STEPS,
            note=f"{note}; samples are means of {PASS_STEPS} steps",
        )
        for row, wall, cpu, note in zip(rows, walls, cpus, notes, strict=True)
    ]
    rows[0] = rows[0].beside(paired_ratio(*reversed(walls)))
    return rows, [judge_alone(case, extra_seconds(*walls), "")]


def _unmeasured(rows: list[Row], error: PairError) -> list[Row]:
    return [dataclasses.replace(row, note=str(error)) for row in rows]


class _Script:
    """A training script that runs over a given number of batches."""

    def __init__(self, network: Any, loss: Any, optimizer: Any) -> None:
        self._network, self._loss, self._optimizer = network, loss, optimizer

    def train(self, batches: Iterable[Any]) -> None:
        for inputs, labels in batches:
            self._loss(self._network(inputs), labels).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def digest(self) -> float:
        return float(sum(p.detach().double().abs().sum() for p in self._network.parameters()))


class Driver:
    """The driver of the measuring process: trains one model with and without tensorwire."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        del link
        use_settings({})
        self._torch: Any = importlib.import_module("torch")
        self._tw: Any = importlib.import_module("tensorwire.torch")
        self._torch.set_num_threads(1)
        self._model: Workload = options["model"]
        self._job = self._tw.init(rank=0, world_size=1)
        self._loss = self._model.loss(self._torch)

    def _script(self, own: bool) -> _Script:
        network = self._model.build(self._torch)
        plain = make_optimizer(self._torch, OPTIMIZER, network.parameters(), fused=False)
        optimizer = self._tw.DistributedOptimizer(plain, network) if own else plain
        return _Script(network, self._loss, optimizer)

    def passes(self, pairs: int) -> tuple[list[float], Two, Two]:
        """Returns the sums of parameter magnitudes of both scripts after a pass of equal batches.

        Also returns wall and CPU seconds per step of `pairs` later passes, which are shuffled.
        """
        scripts = [self._script(True), self._script(False)]
        for script, loader in zip(scripts, self._loaders(shuffle=False), strict=True):
            script.train(loader)
        digests = [script.digest() for script in scripts]
        ways = zip((OWN, PLAIN), scripts, self._loaders(shuffle=True), strict=True)
        gc.disable()
        taken = take_turns({name: partial(_timed, *both) for name, *both in ways}, pairs)
        gc.enable()
        walls, cpus = (
            [[each[at] / PASS_STEPS for each in taken[name]] for name in (OWN, PLAIN)]
            for at in (0, 1)
        )
        return digests, (walls[0], walls[1]), (cpus[0], cpus[1])

    def _loaders(self, shuffle: bool) -> tuple[Any, Any]:
        data: Any = importlib.import_module("torch.utils.data")
        random = self._torch.Generator().manual_seed(1000)
        passes = [self._model.sample(random) for _ in range(PASS_STEPS)]
        samples = data.TensorDataset(*map(self._torch.cat, zip(*passes, strict=True)))
        size = self._model.batch
        return (
            self._job.loader(samples, batch_size=size, shuffle=shuffle),
            data.DataLoader(samples, batch_size=size, shuffle=shuffle),
        )

    def close(self) -> None:
        """Leaves the job."""
        self._job.close()


def _timed(script: _Script, batches: Iterable[Any]) -> tuple[float, float]:
    """Returns wall and CPU seconds of a pass."""
    wall, cpu = time.perf_counter(), time.process_time()
    script.train(batches)
    return time.perf_counter() - wall, time.process_time() - cpu

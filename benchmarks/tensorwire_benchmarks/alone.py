"""What tensorwire costs in one process without a server: two ways to train take turns in it.

For `training` a script as it is without tensorwire, and with `tw.init`, `tw.DistributedOptimizer`
and `job.loader`: the extra time of a step is the median of the differences of neighbouring passes
over the data. After the first pass both must have the same parameters.

For `placement` gradients in place and with copies:

- the CPU time of a whole step (forward, backward, step, zero_grad). What is left of the difference
  is what recognising allocations takes, less the copies that it saves;
- the *first* steps: the time to make the optimizer and to train two steps with it, again and again.
  In the first allocations are learned, in the second gradients come to their places. The difference
  is what placement takes to begin: slots are made, allocations logged and looked up, and memory is
  touched for the first time, which is most of it. `planning` is that looking up alone.

Not measured: starting, evaluation, saving; compiling the allocator where no library is there for
this torch, once per machine; it was loaded before, and the note of `planning` says how long that
took.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.harness import median, paired_ratio
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire.bench.rows import Row, Verdict, format_seconds
from tensorwire_benchmarks.bench import ALONE, Bench, Settings
from tensorwire_benchmarks.figures import extra_seconds
from tensorwire_benchmarks.systems import COPY, OWN, PLAN
from tensorwire_benchmarks.systems.base import make_optimizer
from tensorwire_benchmarks.verdicts import (
    OVERHEAD_PAIRS,
    judge_alone,
    judge_overhead,
    judge_planning,
)
from tensorwire_benchmarks.worker import serve, use_settings
from tensorwire_benchmarks.workloads.catalog import Workload

__all__ = ["Driver", "serve"]

PLAIN = "plain"
MAX_BYTES = 1 << 20
"""Scripts are measured with models up to this size: a larger one's step hides what each costs."""
PASS_STEPS = 20
FIRST_STEPS = 2
_PASSES_PER_TURN = 4
_SAME = 1e-4  # relative; the same kernels in another order
_ROUNDS = 3
_WAYS = (PLAN, COPY)
_WARM = 3

Found = tuple[list[Row], list[Verdict]]
Two = tuple[list[float], list[float]]
"""Samples of the first way and of the second."""


def beside_plain(bench: Bench, model: Workload, settings: Settings) -> Found:
    """Rows of the script with tensorwire and of the plain one, and what the bar says."""
    case = bench.case(ALONE, model.name, "step")
    if OWN not in settings.systems:
        return [], [judge_alone(case, None, "it did not run")]
    rows = [Row(bench.name, case, name, model.size_bytes) for name in (OWN, PLAIN)]
    pairs = _PASSES_PER_TURN * settings.turns
    try:
        with ProcessPair(__name__, {"model": model, "optimizer": settings.optimizer}) as pair:
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


def beside_copy(bench: Bench, model: Workload, settings: Settings) -> Found:
    """Rows of the steps with placement and without, and what the bars say."""
    rows = [
        Row(bench.name, bench.case(ALONE, model.name, what), way.name, model.traffic(1).up_bytes)
        for what, ways in (("step", _WAYS), ("first", _WAYS), ("planning", _WAYS[:1]))
        for way in ways
    ]
    case, label = rows[0].case, bench.label(ALONE, model.name)
    optimizer = model.optimizer or settings.optimizer
    pairs = settings.steps or OVERHEAD_PAIRS
    try:
        with ProcessPair(__name__, {"model": model, "optimizer": optimizer}) as pair:
            begun, learning, load_s = pair.call("first", _ROUNDS, timeout_s=300 + 120 * _ROUNDS)
            walls, cpus = pair.call("steps", pairs, timeout_s=60 + 60 * pairs)
    except PairError as error:
        verdicts = [judge_overhead(case, None, str(error)), judge_planning(label, None, str(error))]
        return _unmeasured(rows, error), verdicts
    note = f"one process, no server; optimizer {optimizer}"
    begins = f"the optimizer is made and trains {FIRST_STEPS} steps"
    load = f"part of first; to load the allocator took {format_seconds(load_s)} before"
    extra_s = median([plan - copy for plan, copy in zip(*begun, strict=True)])
    figures: list[tuple[list[float], dict[str, Any]]] = [
        *((wall, {"cpu_seconds_local": median(cpu), "note": note})
          for wall, cpu in zip(walls, cpus, strict=True)),
        *((taken, {"note": begins}) for taken in begun),
        (learning, {"note": load}),
    ]  # fmt: skip
    return [row.timed(each, **more) for row, (each, more) in zip(rows, figures, strict=True)], [
        judge_overhead(case, paired_ratio(*cpus)),
        judge_planning(label, (extra_s, median(learning))),
    ]


def _unmeasured(rows: list[Row], error: PairError) -> list[Row]:
    return [dataclasses.replace(row, note=str(error)) for row in rows]


class _Script:
    """A training script, some batches at a time."""

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
    """The process: makes both ways of the model that is asked for."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        del link
        use_settings({})
        self._torch: Any = importlib.import_module("torch")
        self._tw: Any = importlib.import_module("tensorwire.torch")
        self._torch.set_num_threads(1)
        self._model: Workload = options["model"]
        self._optimizer: str = options["optimizer"]
        self._job = self._tw.init(rank=0, world_size=1)
        self._loss = self._model.loss(self._torch)
        self._batches = self._model.batches(self._torch, 0)

    def _made(self, network: Any, placement: str) -> Any:
        """The optimizer; plain without a placement."""
        plain = make_optimizer(self._torch, self._optimizer, network.parameters(), fused=False)
        if not placement:
            return plain
        return self._tw.DistributedOptimizer(plain, network, placement=placement)

    def _script(self, placement: str) -> _Script:
        network = self._model.build(self._torch)
        return _Script(network, self._loss, self._made(network, placement))

    # --- with tensorwire, and plain -------------------------------------------------------------

    def passes(self, pairs: int) -> tuple[list[float], Two, Two]:
        """Sums of magnitudes of both scripts' parameters after a pass over the same batches.

        And wall and CPU seconds per step of all passes behind it, in whatever order batches come.
        """
        scripts = [self._script("plan"), self._script("")]
        for script, loader in zip(scripts, self._loaders(shuffle=False), strict=True):
            script.train(loader)
        digests = [script.digest() for script in scripts]
        loaders = self._loaders(shuffle=True)
        walls, cpus = _alternate(scripts, pairs, 1, lambda which, at: loaders[which])
        per_step = [[seconds / PASS_STEPS for seconds in way] for way in (*walls, *cpus)]
        return digests, (per_step[0], per_step[1]), (per_step[2], per_step[3])

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

    # --- with placement, and with copies --------------------------------------------------------

    def first(self, rounds: int) -> tuple[Two, list[float], float]:
        """Begins again and again, each time with memory that nobody touched.

        A round before them is not counted: all that torch itself does once per process.

        Returns:
            Seconds of each way, those for learning which allocations gradients are, by what it
            tells, and what it took to load the allocator, or to compile it.
        """
        begin = time.perf_counter()
        importlib.import_module("tensorwire.torch.allocator.library").load()
        load_s = time.perf_counter() - begin
        network = self._model.build(self._torch)
        seconds: Two = ([], [])
        learning = []
        for at in range(rounds + 1):
            for which in _order(at):
                taken_s, learning_s = self._begin(network, _WAYS[which].name)
                if at > 0:
                    seconds[which].append(taken_s)
                if at > 0 and which == 0:
                    learning.append(learning_s)
        return seconds, learning, load_s

    def _begin(self, network: Any, placement: str) -> tuple[float, float]:
        """Seconds in all, and those for learning."""
        gc.collect()
        begin = time.perf_counter()
        optimizer = self._made(network, placement)
        _Script(network, self._loss, optimizer).train(self._batches[:FIRST_STEPS])
        taken_s = time.perf_counter() - begin
        learning_s = self._tw.explain_optimizer(optimizer).planning_s
        optimizer.close()
        return taken_s, learning_s

    def steps(self, pairs: int) -> tuple[Two, Two]:
        """Wall and CPU seconds of each step of each way."""
        scripts = [self._script(way.name) for way in _WAYS]
        batches = self._batches
        return _alternate(scripts, pairs, _WARM, lambda which, at: [batches[at % len(batches)]])

    def close(self) -> None:
        """Leaves the job."""
        self._job.close()


def _alternate(
    scripts: list[_Script], pairs: int, warm: int, batches: Callable[[int, int], Iterable[Any]]
) -> tuple[Two, Two]:
    """Wall and CPU seconds of every turn of each script, after some that are not counted."""
    for _ in range(warm):
        for which, script in enumerate(scripts):
            script.train(batches(which, 0))
    walls: Two = ([], [])
    cpus: Two = ([], [])
    gc.collect()
    gc.disable()
    try:
        for at in range(pairs):
            for which in _order(at):
                wall, cpu = time.perf_counter(), time.process_time()
                scripts[which].train(batches(which, at))
                walls[which].append(time.perf_counter() - wall)
                cpus[which].append(time.process_time() - cpu)
    finally:
        gc.enable()
    return walls, cpus


def _order(at: int) -> tuple[int, int]:
    return (0, 1) if at % 2 == 0 else (1, 0)

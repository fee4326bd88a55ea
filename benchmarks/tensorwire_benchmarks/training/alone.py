"""What tensorwire costs a script that runs alone: one process, no server, against plain torch.

Measured: a whole step of a short training script (batch from a loader, forward, backward, step,
zero_grad), as it is without tensorwire and with `tw.init`, `tw.DistributedOptimizer` and
`job.loader`. Both live in the same process and take turns, a pass over the data each; the extra
time is the median of the differences of neighbouring passes. After the first pass both must have
the same parameters.

Not measured: starting, evaluation, saving.
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
from tensorwire.bench.rows import Row, Verdict
from tensorwire_benchmarks.training.figures import extra_seconds
from tensorwire_benchmarks.training.models import Network
from tensorwire_benchmarks.training.systems import OWN
from tensorwire_benchmarks.training.systems.base import make_optimizer
from tensorwire_benchmarks.training.verdicts import judge_alone

ALONE = "alone"
PLAIN = "plain"
MAX_BYTES = 1 << 20
"""Models up to this size are measured: of larger ones the step hides what every step costs."""
PASS_STEPS = 20
_PAIRS_PER_TURN = 4
_SAME = 1e-4  # relative; the same kernels in another order


class Passes(NamedTuple):
    """Seconds per step, pass by pass, and CPU seconds per step."""

    seconds: list[float]
    cpu_s: float


def case_of(model: Network) -> str:
    """The name of the case."""
    return f"{ALONE}.{model.name}.step"


def run(bench: str, model: Network, optimizer: str, turns: int) -> tuple[list[Row], Verdict]:
    """Rows of the script with tensorwire and of the plain one, and what the bar says."""
    case = case_of(model)
    rows = [Row(bench, case, name, model.size_bytes) for name in (OWN, PLAIN)]
    try:
        own, plain = _measure(model, optimizer, _PAIRS_PER_TURN * turns)
    except PairError as error:
        rows = [dataclasses.replace(row, note=str(error)) for row in rows]
        return rows, judge_alone(case, None, str(error))
    ratio = paired_ratio(plain.seconds, own.seconds)
    of_limit = {OWN: (ratio.median, ratio.interval) if ratio else (None, None)}
    notes = {OWN: "no server; job.loader", PLAIN: "torch alone; DataLoader"}
    rows = [
        dataclasses.replace(
            row,
            seconds_median=median(passes.seconds),
            seconds_p99=percentile(passes.seconds, 0.99),
            ratio_to_limit=of_limit.get(row.system, (None, None))[0],
            ratio_interval=of_limit.get(row.system, (None, None))[1],
            cpu_seconds_local=passes.cpu_s,
            operations=len(passes.seconds) * PASS_STEPS,
            note=f"{notes[row.system]}; samples are means of {PASS_STEPS} steps",
        )
        for row, passes in zip(rows, (own, plain), strict=True)
    ]
    return rows, judge_alone(case, extra_seconds(own.seconds, plain.seconds), "")


def _measure(model: Network, optimizer: str, pairs: int) -> tuple[Passes, Passes]:
    """The passes with tensorwire and the plain ones.

    Raises:
        PairError: the process failed, or the two scripts did not compute the same.
    """
    with Pair(__name__, {"model": model, "optimizer": optimizer}) as pair:
        plain, own = pair.call("digests")
        if abs(plain - own) > _SAME * plain:
            raise PairError(f"after one pass the parameters differ: {own}, plain {plain}")
        seconds, cpu = pair.call("alternate", pairs, timeout_s=600)
    return Passes(seconds[1], cpu[1]), Passes(seconds[0], cpu[0])


class _Script:
    """A training script, a pass at a time."""

    def __init__(self, network: Any, loss: Any, optimizer: Any) -> None:
        self._network, self._loss, self._optimizer = network, loss, optimizer

    def train(self, loader: Any) -> None:
        for inputs, labels in loader:
            self._loss(self._network(inputs), labels).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def digest(self) -> float:
        return float(sum(p.detach().double().abs().sum() for p in self._network.parameters()))


class Driver:
    """Both scripts."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        for variable in [name for name in os.environ if name.startswith("TENSORWIRE_")]:
            del os.environ[variable]
        torch: Any = importlib.import_module("torch")
        data: Any = importlib.import_module("torch.utils.data")
        tw: Any = importlib.import_module("tensorwire.torch")
        torch.set_num_threads(1)
        model: Network = options["model"]
        count, random = PASS_STEPS * model.batch, torch.Generator().manual_seed(1000)
        samples = data.TensorDataset(
            torch.rand((count, *model.inputs), generator=random),
            torch.randint(model.widths[-1], (count,), generator=random),
        )
        self._job = tw.init(rank=0, world_size=1)
        loss = torch.nn.CrossEntropyLoss()
        self._scripts = []
        for distributed in (False, True):
            network = model.build(torch)
            inner = make_optimizer(torch, options["optimizer"], network.parameters(), fused=False)
            optimizer = tw.DistributedOptimizer(inner, network) if distributed else inner
            self._scripts.append(_Script(network, loss, optimizer))

        def loaders(shuffle: bool) -> tuple[Any, Any]:
            return (
                data.DataLoader(samples, batch_size=model.batch, shuffle=shuffle),
                self._job.loader(samples, batch_size=model.batch, shuffle=shuffle),
            )

        self._in_order, self._shuffled = loaders(False), loaders(True)

    def digests(self) -> list[float]:
        """Both train a pass over the same batches: sums of magnitudes of their parameters."""
        for script, loader in zip(self._scripts, self._in_order, strict=True):
            script.train(loader)
        return [script.digest() for script in self._scripts]

    def alternate(self, pairs: int) -> tuple[list[list[float]], list[float]]:
        """Seconds per step of every pass of each script, and CPU seconds per step of each."""
        for which in (0, 1):
            self._pass(which)
        seconds: list[list[float]] = [[], []]
        cpu = [0.0, 0.0]
        gc.collect()
        gc.disable()
        try:
            for pair in range(pairs):
                for which in (0, 1) if pair % 2 == 0 else (1, 0):
                    wall_s, cpu_s = self._pass(which)
                    seconds[which].append(wall_s)
                    cpu[which] += cpu_s / pairs
        finally:
            gc.enable()
        return seconds, cpu

    def _pass(self, which: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        self._scripts[which].train(self._shuffled[which])
        return (
            (time.perf_counter() - wall) / PASS_STEPS,
            (time.process_time() - cpu) / PASS_STEPS,
        )

    def close(self) -> None:
        """Leaves the job."""
        self._job.close()


def serve(link: Connection, options: dict[str, Any]) -> None:
    """There is nobody else; waits for the end."""
    del options
    while link.recv()[0] != "stop":
        pass

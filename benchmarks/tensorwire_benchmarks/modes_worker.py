"""A worker of `bench modes`: its steps sleep, or it trains a task; the rest is in `worker.py`.

Unlike in other benches no step begins with a barrier: workers wait only where their system makes
them. They begin a turn together, and report seconds since then.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from tensorwire.bench.harness import median
from tensorwire_benchmarks import worker

serve = worker.serve
_LEARNING_RATE = 3e-3  # of sync


class Trained(NamedTuple):
    """The result of one worker's training.

    Attributes:
        ends: seconds since the beginning at the end of each step.
        marks: of worker 0: steps so far, and the loss of its copy after them.
        size_bytes: the size of its gradients.
    """

    ends: list[float]
    marks: list[tuple[int, float]]
    size_bytes: int


class Driver(worker.Driver):
    """A worker that has one trainer after the other; `idle` and `train` make one."""

    def start(self, server: str) -> int:
        """Makes this process the worker; returns its process id."""
        self._place = self._enter(server)
        self._end_last: Callable[[], None] = lambda: None
        self._tuned: dict[str, Any] = {}
        return os.getpid()

    def idle(self) -> int:
        """Makes a tiny model for `sleep`; returns the bytes of its gradients."""
        torch = self._place.torch
        torch.manual_seed(0)
        network = torch.nn.Linear(64, 64)
        self._trainer = self._make_trainer(self._place, network)
        self._inputs = torch.ones(1, 64)
        self.sleep([[0.001] * 3] * self._order.workers)  # warms up
        return sum(4 * parameter.numel() for parameter in network.parameters())

    def sleep(self, seconds: list[list[float]]) -> float:
        """Makes steps that sleep `seconds[rank]`; returns the seconds of all of them."""
        self._barrier()
        begin = time.monotonic()
        for length in seconds[self._rank]:
            time.sleep(length)
            self._advance(self._trainer.module(self._inputs).square().mean())
        took = time.monotonic() - begin
        self._trainer.settle()
        return took

    def train(self, name: str, seed: int, steps: int, every: int) -> Trained:
        """Trains a new model of a task; worker 0 copies and judges it every `every` steps."""
        torch, workers = self._place.torch, self._order.workers
        self._task = task = importlib.import_module(f"{__package__}.modes_tasks").task(name)
        if name not in self._tuned:
            self._train_anew(seed)
            self._median_step(3)  # warms up
            self._trainer.tune(self._median_step)
            self._tuned[name] = self._trainer.tuned
        network = self._train_anew(seed)
        if self._tuned[name] is not None:
            self._trainer.use(self._tuned[name])
        torch.manual_seed(1000 * seed + self._rank)  # for dropout
        ends, copies = [], [(0, _copy(network))]
        self._barrier()
        begin = time.monotonic()
        for step, (inputs, labels) in enumerate(
            islice(task.batches(seed, self._rank, workers), steps), 1
        ):
            self._advance(task.loss(self._trainer.module, inputs, labels))
            ends.append(time.monotonic() - begin)
            if self._rank == 0 and step % every == 0:
                copies.append((step, _copy(network)))
        self._trainer.settle()
        marks, judged = [], task.build()
        for step, state in copies if self._rank == 0 else ():
            judged.load_state_dict(state)
            marks.append((step, task.judge(judged)))
        return Trained(ends, marks, sum(4 * each.numel() for each in network.parameters()))

    def _train_anew(self, seed: int) -> Any:
        """Returns a new module of the task, with a new trainer; closes the trainer before it."""
        self._end_last()
        self._place.torch.manual_seed(seed)
        network = self._task.build()
        place = dataclasses.replace(self._place, learning_rate=_LEARNING_RATE)
        self._trainer = self._make_trainer(place, network)
        self._end_last = self._trainer.close
        return network

    def _median_step(self, count: int) -> float:
        seconds = []
        for batch in islice(self._task.batches(0, self._rank, self._order.workers), count):
            begin = time.monotonic()
            self._advance(self._task.loss(self._trainer.module, *batch))
            seconds.append(time.monotonic() - begin)
        return median(seconds)

    def _advance(self, loss: Any) -> None:
        loss.backward()
        self._trainer.exchange()
        self._trainer.zero_grad()


def _copy(network: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in network.state_dict().items()}

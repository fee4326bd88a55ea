"""A worker of `bench modes`: steps that sleep, or the training of a task; the rest is `worker`.

Unlike in other benches no step begins with a barrier: workers go at the pace that their system lets
them. They begin a turn together, and what a turn reports is seconds since then.
"""

from __future__ import annotations

import os
import time
from typing import Any

from tensorwire_benchmarks import worker

serve = worker.serve


class Driver(worker.Driver):
    """Trainers follow each other in it; the first call after `start` makes one."""

    def start(self, server: str) -> int:
        """Makes this process the worker; returns the process number."""
        self._place = self._enter(server)
        return os.getpid()

    def idle(self) -> int:
        """Makes a model whose steps cost nothing, for `sleep`; the bytes of its gradients."""
        torch = self._place.torch
        torch.manual_seed(0)
        network = torch.nn.Linear(64, 64)
        self._trainer = self._make_trainer(self._place, network)
        self._inputs = torch.ones(1, 64)
        self.sleep([[0.001] * 3] * self._order.workers)  # what is slow once
        return sum(4 * parameter.numel() for parameter in network.parameters())

    def sleep(self, seconds: list[list[float]]) -> float:
        """Makes steps that sleep so long, the lists by rank; how long its own took in all."""
        self._barrier()
        begin = time.monotonic()
        for length in seconds[self._rank]:
            time.sleep(length)
            self._advance(self._trainer.module(self._inputs).square().mean())
        took = time.monotonic() - begin
        self._trainer.settle()
        return took

    def _advance(self, loss: Any) -> None:
        loss.backward()
        self._trainer.exchange()
        self._trainer.zero_grad()

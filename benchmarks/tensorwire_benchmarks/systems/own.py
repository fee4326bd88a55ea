"""tensorwire itself, through its public interface."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from tensorwire_benchmarks.systems.base import Trainer, TrainerPlace, make_optimizer

STALENESS = 3
"""The bound of the mode "bounded", in steps."""


def _divisor(place: TrainerPlace) -> float:
    """Returns the divisor of sync's learning rate in async and bounded: see docs/modes.md."""
    return place.workers**0.5 if place.optimizer == "adamw" else place.workers


class OwnTrainer(Trainer):
    """A worker of a job; rank, servers and secret come from the environment."""

    placement = "plan"
    mode = "sync"

    def __init__(self, place: TrainerPlace, module: Any) -> None:
        self._tw: Any = importlib.import_module("tensorwire.torch")
        apart = self.mode != "sync"
        staleness = STALENESS if self.mode == "bounded" else None
        self._job = self._tw.init(mode=self.mode, staleness=staleness)
        found = (self._job.rank, self._job.size)
        assert found == (place.rank, place.workers), f"the job says {found}"
        self.module = module
        divisor = _divisor(place) if apart else 1.0
        inner = make_optimizer(
            place.torch, place.optimizer, module.parameters(), place.learning_rate / divisor,
            fused=False,
        )  # fmt: skip
        self._optimizer = self._tw.DistributedOptimizer(inner, module, placement=self.placement)
        self._job.barrier()
        self.note = "one server process"

    def exchange(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which nothing is sent; gradients are still produced in place."""
        found: contextlib.AbstractContextManager[None] = self._optimizer.accumulate()
        return found

    def in_place(self) -> float | None:
        """Returns the share of dense gradient bytes that were produced in place, or None."""
        found = self._tw.explain_optimizer(self._optimizer)
        dense = [row for row in found.gradients if row.route != "rows sent"]
        size = sum(row.bytes for row in dense)
        return sum(row.bytes for row in dense if row.in_place) / size if size else None

    def close(self) -> None:
        self._job.close()


class CopyTrainer(OwnTrainer):
    """A worker without the analysis of the model: every gradient is copied before it is sent.

    Transport and server are the same as of `OwnTrainer`: the difference is the gain of placement.
    """

    placement = "copy"


class SyncTrainer(OwnTrainer):
    """A worker with one trainer after the other: each closes its optimizer, none the job."""

    def settle(self) -> None:
        """Waits until the module has the commits of all workers."""
        self._job.barrier()
        with self._tw.edit(self.module):
            pass

    def close(self) -> None:
        self._optimizer.close()


class AsyncTrainer(SyncTrainer):
    """A worker that does not wait for others."""

    mode = "async"


class BoundedTrainer(SyncTrainer):
    """A worker that waits only when it is more than `STALENESS` steps ahead."""

    mode = "bounded"

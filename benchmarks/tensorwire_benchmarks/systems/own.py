"""tensorwire itself, through the interface that its users have."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from tensorwire_benchmarks.systems.base import Trainer, TrainerPlace, make_optimizer

STALENESS = 3
"""In the mode "bounded", in steps."""


def _divisor(place: TrainerPlace) -> float:
    """Of the learning rate of sync, where each slice is applied by itself: see docs/modes.md."""
    return place.workers**0.5 if place.optimizer == "adamw" else place.workers


class OwnTrainer(Trainer):
    """One worker of a job; rank, servers and secret come from the environment."""

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
        self._steps = 0
        self.note = "one server process"

    def exchange(self) -> None:
        self._optimizer.step()
        self._steps += 1

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Where gradients are produced in place they still are."""
        found: contextlib.AbstractContextManager[None] = self._optimizer.accumulate()
        return found

    def hidden_s(self) -> float:
        per_step: float = self._job.report()["hidden_communication_s"]
        return per_step * self._steps

    def in_place(self) -> float | None:
        """By the addresses at which dense gradients arrived; None where none has a place."""
        found = self._tw.explain_optimizer(self._optimizer)
        dense = [row for row in found.gradients if row.route != "rows sent"]
        size = sum(row.bytes for row in dense)
        return sum(row.bytes for row in dense if row.in_place) / size if size else None

    def close(self) -> None:
        self._job.close()


class CopyTrainer(OwnTrainer):
    """The same without the analysis of the model: every gradient is copied to where it leaves from.

    The transport and the server are those of `OwnTrainer`: what placement gains is the difference.
    """

    placement = "copy"


class SyncTrainer(OwnTrainer):
    """A job in a mode, where trainers follow each other: each ends its optimizer, none the job."""

    def settle(self) -> None:
        """What all workers have committed is in every module."""
        self._job.barrier()
        with self._tw.edit(self.module):
            pass

    def close(self) -> None:
        self._optimizer.close()


class AsyncTrainer(SyncTrainer):
    """Each worker at its own pace."""

    mode = "async"


class BoundedTrainer(SyncTrainer):
    """Each at its own pace, and none further ahead than `STALENESS` steps."""

    mode = "bounded"

"""The interface of a system to a worker: it wraps a model, and exchanges after backward.

A worker's loop is the same for every system (`worker.py`); a Trainer adds the code that users of
the system would write around it. Trainers run in a worker process, with torch imported.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
PLAIN_SGD = "plain-sgd"
ADAGRAD = "adagrad"


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """The surroundings of a Trainer.

    Attributes:
        torch: the module.
        rank, workers: this worker's number, and the number of workers.
            optimizer: "sgd" (with momentum), "plain-sgd" (without), "adamw" or "adagrad".
            folder: a directory of this team, for sockets and rendezvous.
            server: the address of the system's server; "" without one.
            barrier: returns when all workers have called it.
            learning_rate: of the optimizer.
    """

    torch: Any
    rank: int
    workers: int
    optimizer: str
    folder: str
    server: str
    barrier: Callable[[], None]
    learning_rate: float = LEARNING_RATE


class Trainer(ABC):
    """One worker's part of a system.

    Attributes:
        module: the module to call.
        note: how the system is tuned, for the note of its rows.
        tuned: the settings that `tune` found, for `use`.
    """

    module: Any
    note: str = ""
    tuned: Any = None

    @abstractmethod
    def exchange(self) -> None:
        """Exchanges after backward; returns when this worker may read the updated parameters."""

    def zero_grad(self) -> None:
        """Clears the gradients, as the system's users would."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for backward in which nothing is sent, so that `exchange` sends all.

        Raises:
            NotImplementedError: the system cannot do that (`System.holds`).
        """
        raise NotImplementedError("this system exchanges during backward")

    def tune(self, run: Callable[[int], float]) -> None:
        """Looks for the best settings; all workers call it together.

        `run(steps)` makes steps on all workers and returns this worker's median seconds of a step.
        """
        del run

    def use(self, tuned: Any) -> None:
        """Applies settings that `tune` found for the same model; all workers call it together."""
        del tuned

    def settle(self) -> None:  # noqa: B027 (most are there anyway)
        """Waits, after the last step, until the module has the steps of all workers."""

    def in_place(self) -> float | None:
        """Returns the share of gradient bytes that the last step produced in place, or None."""
        return None

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Ends the worker's part; the process ends right after it."""


class Computation(Trainer):
    """A worker that only computes forward and backward, and changes no parameter.

    The extra time of another system's step is its communication.
    """

    def __init__(self, place: TrainerPlace, module: Any) -> None:
        del place
        self.module = module

    def exchange(self) -> None:
        pass


class Plain(Computation):
    """A worker that trains by itself: the optimizer of torch, and no exchange."""

    def __init__(self, place: TrainerPlace, module: Any) -> None:
        super().__init__(place, module)
        self._optimizer = make_optimizer(
            place.torch, place.optimizer, module.parameters(), place.learning_rate, fused=False
        )

    def exchange(self) -> None:
        self._optimizer.step()


def make_optimizer(
    torch: Any, name: str, parameters: Any, learning_rate: float = LEARNING_RATE, *, fused: bool
) -> Any:
    """Returns an optimizer of torch, with the same constants for every system.

    "plain-sgd", if not fused, and "adagrad" accept sparse gradients.

    Raises:
        ValueError: there is no optimizer of that name.
    """
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, fused=fused)
    if name == ADAGRAD:  # the fused one takes no sparse gradients
        return torch.optim.Adagrad(parameters, lr=learning_rate, foreach=False)
    momentum = {"sgd": MOMENTUM, PLAIN_SGD: 0.0}.get(name)
    if momentum is None:
        raise ValueError(f"no optimizer {name!r}; known: sgd, {PLAIN_SGD}, adamw, {ADAGRAD}")
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, fused=fused)
